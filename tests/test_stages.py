"""Every stage of every implementation against the plain-torch function of the same name."""

from __future__ import annotations

import pytest
import torch
from kernel_cases import (
    DEVICE,
    KERNELS,
    ON_GPU,
    SCORE_ERROR,
    assert_close_output,
    empty_cache,
    layout,
    make,
    make_query,
    make_stages,
    randn,
    record_scores,
    relative_error,
    scores_of,
    smallest_budget,
)

from locks_kernels import reference
from locks_kernels.cache import Sequences
from locks_kernels.shapes import DecodeShape, SelectOptions
from locks_kernels.summary import unpack

pytestmark = pytest.mark.parametrize("kernels", KERNELS)

# query heads, KV heads, D, PAGE, R, dtype: every value of every axis at least once
SHAPES = [
    DecodeShape(8, 2, 128, 16, 8, "bfloat16"),
    DecodeShape(2, 2, 64, 32, 2, "float16"),
    DecodeShape(5, 1, 256, 64, 4, "bfloat16"),
    DecodeShape(9, 3, 64, 16, 8, "float16"),
]
GROUPS = (1, 2, 3, 4, 5, 7, 8, 12, 16)
RAGGED = (0, 1, 15, 16, 17, 32, 100)


def named(shape: DecodeShape) -> str:
    return f"g{shape.group}h{shape.kv_heads}d{shape.head_dim}p{shape.page_size}r{shape.rank}{shape.dtype}"


every_shape = pytest.mark.parametrize("shape", SHAPES, ids=named)


@every_shape
def test_build_is_as_good_as_the_reference(kernels: str, shape: DecodeShape) -> None:
    cache = empty_cache(shape, 6)
    cache.keys.copy_(1.5 * randn(*cache.keys.shape) + randn(shape.head_dim, seed=1))
    cache.keys[0] = cache.keys[0, :, :1]  # no rank at all
    cache.keys[1, :, 3] *= 300  # one token dwarfs the page
    cache.keys[2] = 0
    decay = 0.6 ** torch.arange(shape.page_size, device=DEVICE)  # a page whose ranks differ much in size
    cache.keys[4] = (
        20 * (randn(shape.page_size, shape.page_size, seed=2) * decay) @ randn(shape.page_size, shape.head_dim, seed=3)
    )
    cache.keys[5] = float("nan")  # not listed, must stay as it is
    listed = torch.tensor([3, 0, 2, 1, 4], device=DEVICE)
    make_stages(kernels, cache, Sequences(listed[None].int(), listed[:1].int())).build(listed)
    assert (cache.summaries[5] == 0xFF).all()

    keys = cache.keys[:5].float()
    found = unpack(cache.summaries[:5], layout(cache))
    expected = reference.summarise(keys, shape.rank)
    best = relative_error(expected.reconstruct(), keys)
    assert (relative_error(found.reconstruct(), keys) <= 1.01 * best + 1e-4).all()
    assert torch.equal(found.centroid, expected.centroid)
    # singular values: the ranks are eigenvectors, in the order of their eigenvalues
    mine, theirs = (s.coefficients.float() * s.coefficient_scale.float()[..., None] for s in (found, expected))
    assert ((mine.norm(dim=-2) / theirs.norm(dim=-2))[3:] - 1).abs().max() < 0.01

    query = 0.5 * make_query(shape, 1)[0]
    mine = record_scores(cache, listed, query)
    reference.build(cache, listed)
    # One int4 rounding that falls the other way moves a logit by about 0.003 of the keys' size: they are 20 on the last page,
    # and in the hundreds on the outlier's, which is left out.
    apart = (mine - record_scores(cache, listed, query)).abs()
    assert apart[:, [0, 1, 2]].max() < 0.05
    assert apart[:, 4].max() < 0.2


@every_shape
def test_append_finalise(kernels: str, shape: DecodeShape) -> None:
    page = shape.page_size
    cache, sequences = make(shape, (0, 1, page - 1, page, page + 1, 2 * page), room=0)
    expected, _ = make(shape, (0, 1, page - 1, page, page + 1, 2 * page), room=0)
    new_keys = randn(6, shape.kv_heads, shape.head_dim, seed=5).to(cache.keys.dtype)
    new_values = randn(6, shape.kv_heads, shape.head_dim, seed=6).to(cache.keys.dtype)
    cache.summaries.fill_(0xFF)
    make_stages(kernels, cache, sequences).append_finalise(new_keys, new_values)
    reference.append(expected, sequences, new_keys, new_values)
    assert torch.equal(cache.keys.nan_to_num(7.0), expected.keys.nan_to_num(7.0))
    assert torch.equal(cache.values.nan_to_num(7.0), expected.values.nan_to_num(7.0))

    filled = torch.stack((sequences.block_table[3, 0], sequences.block_table[5, 1])).long()
    others = torch.ones(cache.num_pages, dtype=torch.bool, device=DEVICE)
    others[filled] = False
    assert (cache.summaries[others] == 0xFF).all()
    keys = cache.keys[filled].float()
    found = unpack(cache.summaries[filled], layout(cache)).reconstruct()
    best = relative_error(reference.summarise(keys, shape.rank).reconstruct(), keys)
    assert (relative_error(found, keys) <= 1.01 * best + 1e-4).all()


@pytest.mark.skipif(not ON_GPU, reason="kernels run side by side on a GPU only")
def test_build_waits_for_the_keys_that_the_kernel_before_it_writes(kernels: str) -> None:
    shape, batch = DecodeShape(8, 8), 1000
    cache = empty_cache(shape, batch)
    cache.keys.normal_(generator=torch.Generator(DEVICE).manual_seed(0))
    sequences = Sequences(torch.arange(batch, device=DEVICE).int()[:, None], torch.full((batch,), 15, device=DEVICE).int())
    stages = make_stages(kernels, cache, sequences)
    ids = torch.arange(batch, device=DEVICE)
    for size in (1.0, 8.0, 64.0):
        token = size * randn(batch, 8, 128).to(cache.keys.dtype)
        torch.cuda.synchronize()
        stages.append_finalise(token, token)  # fills no page
        stages.build(ids)
        built = cache.summaries.clone()
        torch.cuda.synchronize()
        stages.build(ids)
        assert torch.equal(built, cache.summaries)


@pytest.mark.parametrize("batch", (1, 6, 150))
@pytest.mark.parametrize("starts_early", (False, True))
def test_appending_beside_the_scoring_is_the_same_as_before_it(kernels: str, batch: int, starts_early: bool) -> None:
    if kernels != "cuda":
        pytest.skip("two launches elsewhere")
    shape, lengths = DecodeShape(8, 2), (48, 1, 15, 333, 64, 3200)
    both = [make(shape, (lengths * batch)[:batch], room=0) for _ in range(2)]
    query, new_keys, new_values = make_query(shape, batch), *(randn(2, batch, 2, 128, seed=5).bfloat16())
    apart, beside = (make_stages(kernels, *made) for made in both)
    for (cache, sequences), stages in zip(both, (apart, beside), strict=True):
        filled = sequences.seq_lens % 16 == 0
        cache.summaries[sequences.block_table[filled, sequences.seq_lens[filled].long() // 16 - 1].long()] = 0xFF
        stages.scores.fill_(0)
    apart.append_finalise(new_keys, new_values)
    apart.score(query)
    beside.append_score(query, new_keys, new_values, starts_early)
    for pool in ("keys", "values", "summaries"):
        mine, theirs = (getattr(cache, pool).view(torch.uint8) for cache, _ in both)
        assert torch.equal(mine, theirs), pool
    assert torch.equal(apart.scores, beside.scores)


@every_shape
@pytest.mark.parametrize("recent", (1, 2))
def test_score_of_ragged_batches(kernels: str, shape: DecodeShape, recent: int) -> None:
    page = shape.page_size
    options = SelectOptions((recent + 2) * page, recent_pages=recent)
    cache, sequences = make(shape, (0, 1, page, 4 * page, 5 * page + 1, 70 * page + page // 2))
    query = make_query(shape, sequences.batch)
    stages = make_stages(kernels, cache, sequences, options)
    stages.score(query)
    found = scores_of(stages, cache, sequences, options)
    expected = reference.score(query, cache, sequences, recent)
    for b, tokens in enumerate(sequences.seq_lens.tolist()):
        count = shape.pages(tokens) - recent
        if shape.pages(tokens) > options.kept_pages(page):  # others keep every page and need no score
            assert (found[b, :, :count] - expected[b, :, :count]).abs().max() < SCORE_ERROR


@pytest.mark.parametrize("group", GROUPS)
def test_score_is_the_log_sum_exp_of_the_reconstructed_keys(kernels: str, group: int) -> None:
    shape = DecodeShape(2 * group, 2)
    cache, sequences = make(shape, (96, 8 * 16))
    query = 3 * make_query(shape, 2)
    stages = make_stages(kernels, cache, sequences)
    stages.score(query)
    for b, pages in enumerate((5, 7)):
        records = cache.summaries[sequences.block_table[b, :pages].long()]
        keys = unpack(records, layout(cache)).reconstruct().transpose(0, 1)  # [H, p, PAGE, D]
        grouped = query[b].double().view(2, group, 128) * shape.softmax_scale
        logits = torch.einsum("hgd,hptd->hgpt", grouped, keys.double())
        mass = logits.logsumexp(-1).view(2 * group, pages)
        assert mass.abs().max() > 5
        assert (stages.scores[b, :, :pages] - mass).abs().max() < SCORE_ERROR


def test_score_survives_logits_that_overflow(kernels: str) -> None:
    shape = DecodeShape(4, 1)
    cache, sequences = make(shape, (5 * 16 + 1,))
    query = 200 * make_query(shape, 1)
    stages = make_stages(kernels, cache, sequences)
    stages.score(query)
    expected = reference.score(query, cache, sequences)[0, :, :5]
    assert expected.max() > 200
    assert ((stages.scores[0, :, :5] - expected) / expected).abs().max() < 1e-3


@pytest.mark.skipif(not ON_GPU, reason="needs records that come slowly from a GPU's memory")
@pytest.mark.parametrize(
    "shape",
    [
        DecodeShape(8, 1),  # more stages than warps a head, no multiple of them
        DecodeShape(40, 5, page_size=32),
        DecodeShape(32, 4, page_size=64),  # fewer stages than the warps that would help
        DecodeShape(8, 1, page_size=64),
        DecodeShape(32, 16, head_dim=256, page_size=64),  # two stages do not fit for eight heads
    ],
    ids=named,
)
def test_score_by_several_warps_a_head(kernels: str, shape: DecodeShape) -> None:
    pages = 4000
    cache = empty_cache(shape, pages)
    cache.keys.normal_(generator=torch.Generator(DEVICE).manual_seed(0))
    table = torch.randperm(pages, generator=torch.Generator().manual_seed(1)).int().to(DEVICE).view(2, -1)
    sequences = Sequences(table, torch.tensor((pages // 2 * shape.page_size, 999 * shape.page_size), device=DEVICE).int())
    query = make_query(shape, 2)
    stages = make_stages(kernels, cache, sequences)
    stages.build(table.flatten())
    expected = reference.score(query, cache, sequences)
    for _ in range(20):
        torch.empty(1 << 28, dtype=torch.uint8, device=DEVICE).fill_(1)  # nothing is left in the second-level cache
        stages.scores.fill_(float("nan"))
        stages.score(query)
        found = scores_of(stages, cache, sequences, smallest_budget(shape))
        live = expected > float("-inf")
        assert (found - expected)[live].abs().max() < SCORE_ERROR


def any_tables(sequences: Sequences, shape: DecodeShape, kept: int) -> torch.Tensor:
    """Every second page, the last one always, at most `kept`, a different set for each head."""
    tables = torch.full((sequences.batch, shape.kv_heads, kept), -1, dtype=torch.int32, device=DEVICE)
    for b, tokens in enumerate(sequences.seq_lens.tolist()):
        for h in range(shape.kv_heads):
            ids = list(range(h % 2, shape.pages(tokens), 2))[-kept:]
            tables[b, h, : len(ids)] = torch.tensor(ids, dtype=torch.int32)
    return tables


@every_shape
@pytest.mark.parametrize("page_major", (False, True))
def test_attend_ragged_and_poisoned(kernels: str, shape: DecodeShape, page_major: bool) -> None:
    options = SelectOptions(6 * shape.page_size)
    cache, sequences = make(shape, (*RAGGED, 20 * shape.page_size + 3), page_major=page_major)
    query = make_query(shape, sequences.batch)
    stages = make_stages(kernels, cache, sequences, options)
    tables = any_tables(sequences, shape, 6)
    stages.tables.copy_(tables)
    out = torch.full_like(query, float("nan"))
    stages.attend(query, out)
    expected, lse = reference.attend(query, cache, sequences, tables)
    assert_close_output(out, expected, shape.dtype)
    assert (out[0] == 0).all() and torch.isinf(lse[0]).all()


@pytest.mark.parametrize("tokens", (255, 256, 257))
def test_a_zero_query_gives_the_mean_of_the_values(kernels: str, tokens: int) -> None:
    shape = DecodeShape(4, 2)
    cache, sequences = make(shape, (tokens,))
    stages = make_stages(kernels, cache, sequences, SelectOptions(17 * 16))
    query = torch.zeros_like(make_query(shape, 1))
    out = torch.empty_like(query)
    stages.score(query)
    stages.select()
    stages.attend(query, out)
    where = sequences.block_table[0].long().repeat_interleave(16)[:tokens]
    slot = torch.arange(tokens, device=DEVICE) % 16
    mean = cache.values[where, :, slot].float().mean(0)  # [H, D]
    assert_close_output(out[0], mean.repeat_interleave(2, 0), shape.dtype)


def test_storage_order_does_not_matter(kernels: str) -> None:
    shape = DecodeShape(8, 2)
    results = []
    for page_major in (False, True):
        cache, sequences = make(shape, (6 * 16,), page_major=page_major)
        stages = make_stages(kernels, cache, sequences)
        query, out = make_query(shape, 1), torch.empty_like(make_query(shape, 1))
        stages.append_finalise(query[:, :2], query[:, 2:4])
        stages.score(query)
        stages.select()
        stages.attend(query, out)
        results.append((out, stages.tables, cache.summaries[sequences.block_table[0, 5].long(), :, :818]))
    for one, other in zip(*results, strict=True):
        assert torch.equal(one, other)


@pytest.mark.skipif(not ON_GPU, reason="needs a pool of 24 GB on a GPU")
@pytest.mark.parametrize("page_major", (False, True))
def test_a_pool_past_32_bit_offsets(kernels: str, page_major: bool) -> None:
    shape = DecodeShape(8, 8)
    pages = 330_000  # keys pass 2^31 elements, summaries 2^31 bytes
    cache = empty_cache(shape, pages, page_major)
    small, sequences = make(shape, (10 * 16,))
    moved = Sequences(pages - 1 - sequences.block_table, sequences.seq_lens)
    cache.keys[moved.block_table.long()] = small.keys[sequences.block_table.long()]
    cache.values[moved.block_table.long()] = small.values[sequences.block_table.long()]
    results = []
    for pool, where in ((small, sequences), (cache, moved)):
        stages = make_stages(kernels, pool, where, smallest_budget(shape))
        query, out = make_query(shape, 1), torch.empty_like(make_query(shape, 1))
        stages.build(where.block_table[0, :9])
        stages.append_finalise(query, query)
        stages.score(query)
        stages.select()
        stages.attend(query, out)
        results.append((out, stages.tables))
    assert torch.equal(results[0][0], results[1][0]) and torch.equal(results[0][1], results[1][1])
