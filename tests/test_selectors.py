"""Acceptance tests of the selectors: bounds, identities, tables, and what each may never do."""

from __future__ import annotations

import math

import pytest
import torch
from selector_cases import OPTIONS, PROMPT, SHAPE, TOKENS, kept, layer, rope, steps

from locks_kernels import reference
from locks_kernels.cache import PagedCache, Sequences
from locks_kernels.selectors import SELECTORS
from locks_kernels.selectors.base import Steps, best, page_mass, softmax_attention
from locks_kernels.selectors.boxes import CuboidMean, QuestGroup
from locks_kernels.selectors.kvzip import KVzip
from locks_kernels.selectors.locks import Locks
from locks_kernels.selectors.moments import Centroid, SecondOrderFull
from locks_kernels.selectors.pages import PageSelector, combine_group
from locks_kernels.selectors.rocket import RocketKV
from locks_kernels.selectors.shadow import ShadowKV
from locks_kernels.selectors.shared import SharedBasis
from locks_kernels.shapes import SelectOptions
from locks_kernels.spectral_keys import spectral_keys

PAGES = [name for name, selector in SELECTORS.items() if isinstance(selector, PageSelector)]
GROUP_PAGES = [name for name in PAGES if name not in ("quest", "quest-all-layers", "unique")]
EXTRA = {"shadowkv": (48 + 5) * 8 + 21, "kvzip-pair-uniform": 20 + 40 + 21}  # tokens on top of the budget


def scores_of(selector: PageSelector) -> torch.Tensor:
    of = layer()
    return selector.score(steps(), selector.build(of, OPTIONS, SHAPE))


def exact() -> tuple[torch.Tensor, torch.Tensor]:
    """Largest logit and mass of each page, [S, H, G, P]."""
    pages = layer().pages(16)
    logits = torch.einsum("shgd,hptd->shgpt", steps().queries, pages) * steps().scale
    return logits.amax(-1), logits.logsumexp(-1)


def test_quest_bounds_every_logit_and_the_mass() -> None:
    top, mass = exact()
    scores = scores_of(QuestGroup())
    assert (scores >= top - 1e-4).all()
    assert (scores + math.log(16) >= mass - 1e-4).all()


def test_centroid_is_a_lower_bound_and_second_order_lies_above_it() -> None:
    _, mass = exact()
    centroid = scores_of(Centroid())
    assert (centroid + math.log(16) <= mass + 1e-4).all()
    second = scores_of(SecondOrderFull())
    assert (second >= centroid - 1e-5).all()
    assert (second + math.log(16) - mass).abs().mean() < (centroid + math.log(16) - mass).abs().mean() / 2


def test_cuboid_corners_equal_centre_and_radius() -> None:
    pages, queries = layer().pages(16), steps().queries
    centre = pages.mean(2)
    radius = (pages - centre[:, :, None]).abs().mean(2)
    direct = torch.einsum("shgd,hpd->shgp", queries, centre) + torch.einsum("shgd,hpd->shgp", queries.abs(), radius)
    assert torch.allclose(scores_of(CuboidMean()), direct * steps().scale, atol=1e-4)


def test_rank_15_unquantised_is_exact_and_rank_8_is_not() -> None:
    pages = torch.randn(2, 20, 16, 64, generator=torch.Generator().manual_seed(0))
    one = Steps(3 * torch.randn(1, 2, 3, 64, generator=torch.Generator().manual_seed(1)), torch.tensor([320]))
    mass = page_mass(one, pages)
    assert torch.allclose(page_mass(one, spectral_keys(pages, 15)), mass, atol=1e-3)
    assert (page_mass(one, spectral_keys(pages, 8)) - mass).abs().max() > 0.1


def test_locks_scores_are_those_of_the_kernels_reference() -> None:
    of, at = layer(), steps()
    pages = TOKENS // 16
    cache = PagedCache.allocate(SHAPE, pages + 1, "cpu")
    for part, data in ((cache.keys, of.keys), (cache.values, of.values)):
        part.zero_()
        part.transpose(0, 1).flatten(1, 2)[:, :TOKENS] = data.to(part.dtype)
    reference.build(cache, torch.arange(pages))
    sequences = Sequences(torch.arange(pages + 1, dtype=torch.int32)[None], torch.tensor([TOKENS], dtype=torch.int32))
    wanted = reference.score(at.queries[-1].reshape(1, 6, 64), cache, sequences)[0, :, :pages]
    found = scores_of(Locks(8))[-1].reshape(6, pages)
    assert torch.allclose(found, wanted, atol=2e-3)
    table = reference.select(reference.combine(wanted[None], 2, "share"), sequences, SHAPE, OPTIONS)[0]
    keep = kept(Locks(8), of, at)[-1, :, 0]
    assert [sorted(set((row.nonzero()[:, 0] // 16).tolist())) for row in keep] == table.tolist()


def test_blind_pair_equal_shared_scores_but_different_mass() -> None:
    """Proposition 1: pages that differ only outside a shared basis look alike to it, however different their mass is."""
    generator = torch.Generator().manual_seed(0)
    axes = torch.linalg.qr(torch.randn(64, 64, generator=generator)).Q
    query = torch.randn(64, generator=generator)
    blind = axes[:, 32:] @ (axes[:, 32:].T @ query)
    first = torch.randn(16, 64, generator=generator)
    second = first.clone()
    second[3] += 40 * 8 * blind / blind.square().sum()
    one = Steps(query.view(1, 1, 1, 64), torch.tensor([32]))
    pages = torch.stack((first, second))[None]
    seen = pages @ axes[:, :32] @ axes[:, :32].T
    shared, mass = page_mass(one, seen)[0, 0, 0], page_mass(one, pages)[0, 0, 0]
    own = page_mass(one, spectral_keys(pages, 8))[0, 0, 0]
    assert abs(shared[0] - shared[1]) < 1e-4
    assert abs(mass[0] - mass[1]) > 30
    assert abs((own[0] - own[1]) - (mass[0] - mass[1])) < 2


@pytest.mark.parametrize("how", ["share", "peak", "max"])
def test_combinations_against_a_loop(how: str) -> None:
    scores = torch.randn(2, 2, 3, 9, generator=torch.Generator().manual_seed(0)) * 4
    found = combine_group(scores, how)  # type: ignore[arg-type]
    for s in range(2):
        for h in range(2):
            for p in range(9):
                row = [scores[s, h, g] for g in range(3)]
                if how == "share":
                    wanted = sum(math.exp(r[p]) / sum(math.exp(x) for x in r) for r in row) / 3
                elif how == "peak":
                    wanted = sum(math.exp(r[p] - max(r)) for r in row)
                else:
                    wanted = max(float(r[p]) for r in row)
                assert found[s, h, 0, p] == pytest.approx(wanted, rel=1e-4)


def test_share_and_peak_choose_differently() -> None:
    share, peak = (kept(SELECTORS[name], layer(), steps()) for name in ("locks-r8", "locks-r8-peak"))
    assert not torch.equal(share, peak)


@pytest.mark.parametrize("name", SELECTORS)
def test_every_selector_keeps_its_budget_of_visible_tokens_and_repeats_itself(name: str) -> None:
    selector, of, at = SELECTORS[name], layer(), steps()
    assert selector.missing(of) is None
    keep = kept(selector, of, at)
    assert keep.shape[:2] == (3, 2) and keep.shape[2] in (1, 3) and keep.shape[3] == TOKENS
    assert not (keep & ~at.visible(TOKENS)).any()
    counts = keep.sum(-1)
    most = OPTIONS.budget_tokens + EXTRA.get(name, 0)
    if name == "kvzip-pair":
        assert abs(sum(int(kept(selector, layer(index=i), at)[-1].sum()) for i in range(4)) - 8 * (128 + 81)) <= 1
        most = 3 * most
    assert (counts > 0).all() and (counts <= most).all(), "selection must be active"
    if name in GROUP_PAGES:
        assert (counts >= 128 - 15).all()
    assert torch.equal(keep, kept(selector, of, at))
    assert selector.score_bytes(SHAPE, OPTIONS, TOKENS) >= 0


@pytest.mark.parametrize("name", GROUP_PAGES)
def test_pages_are_whole_and_sink_and_open_page_are_kept(name: str) -> None:
    at = steps()
    for keep, length in zip(kept(SELECTORS[name], layer(), at), at.lengths.tolist(), strict=True):
        first = (length - 1) // 16 * 16
        assert keep[..., :16].all() and keep[..., first:length].all()
        whole = keep[..., : length // 16 * 16].unflatten(-1, (-1, 16)).sum(-1)
        assert ((whole == 0) | (whole == 16)).all()


@pytest.mark.parametrize("name", PAGES)
def test_what_a_step_does_not_see_changes_nothing(name: str) -> None:
    """Later tokens, the open page among them, are in no summary that a step uses."""
    of, later, at = layer(), layer(), steps(1)
    at.lengths[:] = TOKENS - 5
    later.keys[:, TOKENS - 5 :] = 50.0
    assert torch.equal(kept(SELECTORS[name], of, at), kept(SELECTORS[name], later, at))


@pytest.mark.parametrize("name", GROUP_PAGES)
def test_budget_of_everything_is_full_attention(name: str) -> None:
    of, at = layer(), steps()
    keep = kept(SELECTORS[name], of, at, SelectOptions(budget_tokens=1024))
    assert torch.equal(keep.expand(-1, 2, 1, -1), at.visible(TOKENS).expand(-1, 2, 1, -1))
    assert torch.allclose(
        SELECTORS[name].attend(at, of, None, keep), softmax_attention(at, of.keys, of.values, at.visible(TOKENS))
    )


def test_ties_go_to_the_lowest_page_and_nothing_unscored_is_chosen() -> None:
    scores = torch.tensor([[1.0, 2.0, 2.0, 2.0, float("-inf")]])
    assert best(scores, 2).tolist() == [[False, True, True, False, False]]
    assert best(scores, 5).sum() == 4


def test_oracle_keeps_the_most_mass_of_one_head() -> None:
    """For a group of one the oracle's table is the best one: no other selector keeps more."""
    of, at = layer(), steps()
    single = Steps(at.queries[:, :, :1], at.lengths)
    full = torch.einsum("shgd,hnd->shgn", single.queries, of.keys) * single.scale
    share = full.masked_fill(~single.visible(TOKENS), float("-inf")).softmax(-1)
    mass = {name: (share * kept(SELECTORS[name], of, single)).sum(-1) for name in GROUP_PAGES}
    for name, value in mass.items():
        assert (value <= mass["oracle"] + 1e-5).all(), name
    assert mass["locks-r8"].mean() > mass["locks-r2"].mean() > mass["random-pages"].mean()


def test_window_drops_the_middle_and_random_depends_on_the_layer() -> None:
    keep = kept(SELECTORS["sliding-window"], layer(), steps())
    assert not keep[..., 16:880].any()
    tables = [kept(SELECTORS["random-pages"], layer(index=index), steps()) for index in (0, 1)]
    assert not torch.equal(*tables)


def test_quest_as_published_forces_nothing_and_differs_by_query_head() -> None:
    selector = SELECTORS["quest"]
    assert selector.declaration.dense_layers == (0, 1) and selector.declaration.granularity == "query head"
    keep = kept(selector, layer(), steps())
    assert keep.shape[2] == 3 and not torch.equal(keep[:, :, 0], keep[:, :, 1])
    assert not keep[..., 0].all()
    assert (kept(selector, layer(), steps(), SelectOptions(48)).unflatten(-1, (-1, 1))[..., 0].sum(-1) <= 48).all()


def test_shadowkv_rebuilds_keys_and_keeps_outliers_local_and_generated_tokens() -> None:
    selector, of, at = ShadowKV(), layer(), steps()
    state = selector.build(of, OPTIONS, SHAPE)
    keep = selector.select(selector.score(at, state), at, of, state, OPTIONS)
    assert keep[-1, ..., PROMPT:].all() and keep[..., PROMPT - 32 : PROMPT].all()
    assert (state.outlier.sum(-1) == 48).all()
    # rank 160 of 2 heads x 64 channels is everything: the rebuilt keys are the keys
    assert torch.allclose(state.keys, of.keys, atol=1e-2)
    exact_keys = state.exact[..., None].expand_as(of.keys)
    assert torch.equal(state.keys[exact_keys], of.keys[exact_keys])
    short = layer(tokens=400, prompt=390)
    assert "prompt of more than" in str(selector.missing(short))


def test_rope_is_undone_and_redone() -> None:
    keys, turn = torch.randn(2, 50, 64), rope(50)
    assert torch.allclose(turn.remove(turn.apply(keys)), keys, atol=1e-5)
    turn.interleaved, turn.cos, turn.sin = True, 1.3 * turn.cos[:, :32], 1.3 * turn.sin[:, :32]
    turn.cos, turn.sin = (part[:, :16].repeat_interleave(2, -1) for part in (turn.cos, turn.sin))
    applied = turn.apply(keys)
    assert torch.allclose(turn.remove(applied), keys, atol=1e-5)
    assert torch.equal(applied[..., 32:], keys[..., 32:]) and not torch.allclose(applied, keys)


def test_rocketkv_evicts_for_good_and_keeps_its_window() -> None:
    selector, of, at = RocketKV(), layer(), steps()
    state = selector.build(of, OPTIONS, SHAPE)
    assert state.order.shape[1] <= state.plan.capacity and state.order.shape[1] < TOKENS
    assert (state.order[:, -21 - 32 :] == torch.arange(PROMPT - 32, TOKENS)).all()
    survivors = torch.zeros(2, TOKENS, dtype=torch.bool).scatter_(1, state.order, True)
    assert not (kept(selector, of, at) & ~survivors[None, :, None]).any()
    assert kept(selector, of, at)[-1].sum(-1).max() == OPTIONS.budget_tokens // 2


def test_rocketkv_with_chunks_of_one_and_all_channels_is_exact_ranking() -> None:
    """SparQ without approximation: the mean share of each token."""
    selector, of, at = RocketKV(evict=False), layer(), steps()
    options = SelectOptions(budget_tokens=1024)
    state = selector.build(of, options, SHAPE)
    assert (state.plan.chunk, state.plan.channels) == (1, 64)
    logits = torch.einsum("shgd,hnd->shgn", at.queries, of.keys) * at.scale
    wanted = logits.masked_fill(~at.visible(TOKENS), float("-inf")).softmax(-1).mean(2, keepdim=True)
    found = selector.combine(selector.score(at, state)).clamp_min(0)
    assert torch.allclose(found, wanted, atol=1e-5)


def test_kvzip_keeps_question_and_system_and_the_most_important() -> None:
    of, at = layer(), steps()
    keep = kept(KVzip("pair-uniform"), of, at)[-1, :, 0]
    assert keep[:, :20].all() and keep[:, PROMPT - 40 :].all()
    assert of.importance is not None
    context = slice(20, PROMPT - 40)
    for h in range(2):
        inside, outside = (of.importance[h, context][mask[h, context]] for mask in (keep, ~keep))
        assert len(inside) == 128 and inside.min() >= outside.max()


def test_selectors_say_what_they_miss() -> None:
    bare = layer()
    bare.rope = bare.observed = bare.importance = bare.shared_basis = None
    for name in ("shadowkv", "rocketkv", "kvzip-pair", "loki-page-r8"):
        assert "needs" in str(SELECTORS[name].missing(bare))


def test_shared_basis_of_full_rank_is_the_oracle() -> None:
    of, at = layer(), steps()
    for scope in ("global", "sequence"):
        assert torch.equal(kept(SharedBasis(scope, 64), of, at), kept(SELECTORS["oracle"], of, at))


def test_two_stages_with_everything_on_the_list_are_one_stage() -> None:
    of, at = layer(), steps()
    assert torch.equal(kept(SELECTORS["locks-r4x8-r8"], of, at), kept(SELECTORS["locks-r8"], of, at))
    assert not torch.equal(kept(SELECTORS["locks-r1x2-r8"], of, at), kept(SELECTORS["locks-r8"], of, at))
