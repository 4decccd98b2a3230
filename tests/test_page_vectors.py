"""Kernels of the rival page scores against plain torch, and whole steps with them."""

from __future__ import annotations

import math

import pytest
import torch
from kernel_cases import DEVICE, assert_close_output, make, make_query, randn, smallest_budget

from locks_kernels import page_vectors, reference
from locks_kernels.page_vectors import FORMS, PageVectors
from locks_kernels.selector_stages import SelectorStages
from locks_kernels.selectors import SELECTORS
from locks_kernels.selectors.base import Layer, Steps
from locks_kernels.shapes import DecodeShape, SelectOptions

builder = pytest.importorskip("locks_kernels.page_vectors_build")
scorer = pytest.importorskip("locks_kernels.page_vectors_score")
SHAPES = [DecodeShape(8, 2, 64), DecodeShape(5, 1, 128, page_size=32, dtype="float16")]
SELECTOR = {
    "min-max": "quest-group",
    "cuboid-mean": "cuboid-mean",
    "mean-std": "mean-std-vector",
    "mean-spread": "mean-std-scalar",
    "centroid": "centroid",
}


@pytest.mark.parametrize("form", FORMS)
def test_plain_torch_is_the_selector(form: str) -> None:
    """The timed backend scores as the specification does, up to the rounding of what is stored."""
    shape = DecodeShape(8, 2, 64)
    cache, sequences = make(shape, [200])
    summaries = PageVectors.allocate(cache, form)
    page_vectors.build(cache, summaries, sequences.block_table[0, :12])
    query = make_query(shape, 1)
    found = page_vectors.score(query, shape, summaries, sequences)[0, :, :12]
    keys = cache.keys[sequences.block_table[0, :12].long()].transpose(0, 1).flatten(1, 2).float()
    layer = Layer(0, keys.cpu(), keys.cpu(), 192, 192)
    selector, steps = SELECTORS[SELECTOR[form]], Steps(query.float().view(1, 2, 4, 64).cpu(), torch.tensor([192]))
    wanted = selector.score(steps, selector.build(layer, SelectOptions(), shape)).reshape(8, 12)
    assert torch.allclose(found.cpu(), wanted, atol=0.1, rtol=0.01)
    assert page_vectors.page_bytes(form, shape) == selector.page_bytes(shape)  # type: ignore[attr-defined]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("form", FORMS)
def test_kernels_build_append_and_score_like_plain_torch(form: str, shape: DecodeShape) -> None:
    page = shape.page_size
    tokens = [9 * page, 4 * page + 3, 6 * page, 0]  # a page just filled, an open one, one filled by this token, no sequence
    cache, sequences = make(shape, tokens)
    wanted, found = PageVectors.allocate(cache, form), PageVectors.allocate(cache, form)
    for part in (wanted.vectors, wanted.spread, found.vectors, found.spread):
        part.fill_(float("nan"))
    complete = [sequences.block_table[b, : (n - 1) // page] for b, n in enumerate(tokens) if n]
    for ids in complete:
        page_vectors.build(cache, wanted, ids)
        builder.build(cache, found, ids.contiguous())
    keys, values = (randn(4, shape.kv_heads, shape.head_dim, seed=seed).to(cache.keys.dtype) for seed in (1, 2))
    builder.append_finalise(cache, found, sequences, keys, values)
    reference.append(cache, sequences, keys, values)
    page_vectors.finalise(cache, wanted, sequences)
    assert torch.equal(found.vectors.isnan(), wanted.vectors.isnan())
    assert torch.allclose(found.vectors.float(), wanted.vectors.float(), atol=2e-2, rtol=1e-2, equal_nan=True)
    assert torch.allclose(found.spread.float(), wanted.spread.float(), atol=2e-2, rtol=1e-2, equal_nan=True)
    query = make_query(shape, 4)
    exact = page_vectors.score(query, shape, wanted, sequences)
    out = torch.full_like(exact, float("-inf"))
    scorer.score(query, shape, wanted, sequences, 1, 3, out)
    assert torch.equal(out.isfinite(), exact.isfinite())
    assert torch.allclose(out, exact, atol=2e-2, rtol=2e-3)


def test_programs_of_several_blocks_score_every_page(monkeypatch: pytest.MonkeyPatch) -> None:
    shape = DecodeShape(4, 1, 64)
    cache, sequences = make(shape, [16 * 75 + 5])
    summaries = PageVectors.allocate(cache, "min-max")
    page_vectors.build(cache, summaries, sequences.block_table[0, :75])
    monkeypatch.setattr(scorer, "BLOCK_P", 16)
    monkeypatch.setattr(scorer, "PROGRAMS", 2)
    query = make_query(shape, 1)
    exact = page_vectors.score(query, shape, summaries, sequences)
    out = torch.full_like(exact, float("-inf"))
    programs, per_program = scorer.programs_of(shape, sequences)
    assert programs == 3
    partial = torch.full((1, 4, programs, 2), float("nan"), device=DEVICE)
    scorer.score(query, shape, summaries, sequences, 1, 3, out, partial)
    assert torch.allclose(out, exact, atol=2e-2, rtol=2e-3)
    parts = torch.full((1, 4, 132, 4), float("nan"), device=DEVICE)
    scorer.share_out(partial, shape, sequences, 1, parts, 16 * per_program)
    assert (parts[..., 2] == float("-inf")).all()  # the least score is not known
    found = (parts[..., 0] + parts[..., 1].log2()) * math.log(2)  # natural log
    assert torch.allclose(found, exact.logsumexp(-1)[..., None].expand(-1, -1, 132), atol=2e-2)


@pytest.mark.parametrize("kernels", ["reference", "triton"])
@pytest.mark.parametrize("form", ["min-max", "mean-spread"])
def test_a_step_attends_the_pages_with_the_best_scores(form: str, kernels: str) -> None:
    shape = DecodeShape(8, 2, 64)
    cache, sequences = make(shape, [16 * 9, 16 * 7 + 4])
    options = smallest_budget(shape)
    stages = SelectorStages(form, cache, sequences, options, kernels)
    stages.prefill()
    query, out = make_query(shape, 2), torch.empty_like(make_query(shape, 2))
    keys, values = (randn(2, 2, 64, seed=seed).to(cache.keys.dtype) for seed in (1, 2))
    stages.step(query, keys, values, out)
    scores = page_vectors.score(query, shape, stages.summaries, sequences)
    wanted = reference.select(reference.combine(scores, 2, "share"), sequences, shape, options)
    assert torch.equal(stages.tables, wanted)
    assert_close_output(out, reference.attend(query, cache, sequences, wanted)[0], shape.dtype)
    assert torch.equal(cache.keys[sequences.block_table[1, 7].long(), :, 3], keys[1])
    assert DEVICE in str(out.device)
