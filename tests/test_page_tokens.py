"""Kernels that score pages from a row per token, against plain torch; and whole steps with them."""

from __future__ import annotations

import math

import pytest
import torch
from kernel_cases import DEVICE, assert_close_output, make, make_query, randn, smallest_budget

from locks_kernels import page_tokens, reference
from locks_kernels.cache import PagedCache, Sequences
from locks_kernels.page_tokens import FORMS, PageTokens
from locks_kernels.selector_stages import TokenStages
from locks_kernels.selectors.base import Steps, page_mass
from locks_kernels.shapes import DecodeShape

kernels = pytest.importorskip("locks_kernels.page_tokens_score")
SHAPES = [DecodeShape(8, 2, 64), DecodeShape(2, 2, 64), DecodeShape(5, 1, 128, page_size=32, dtype="float16")]


def built(cache: PagedCache, sequences: Sequences, form: str) -> PageTokens:
    tokens = PageTokens.allocate(cache, form)
    page = cache.shape.page_size
    ids = torch.cat([sequences.block_table[b, : n // page] for b, n in enumerate(sequences.seq_lens.tolist())])
    page_tokens.calibrate(cache, tokens, ids)
    page_tokens.build(cache, tokens, ids)
    return tokens


@pytest.mark.parametrize("form", FORMS)
def test_plain_torch_is_the_mass_of_the_keys_that_the_rows_stand_for(form: str) -> None:
    shape = DecodeShape(8, 2, 64)
    cache, sequences = make(shape, [200])
    tokens = built(cache, sequences, form)
    query = make_query(shape, 1)
    found = page_tokens.score(query, shape, tokens, sequences)[0, :, :12]
    pages = cache.keys[sequences.block_table[0, :12].long()].transpose(0, 1).float()
    if tokens.axes is not None:
        axes = tokens.axes.float()[:, None]
        assert torch.allclose(axes[:, 0].mT @ axes[:, 0], torch.eye(axes.shape[-1], device=DEVICE), atol=0.02)
        pages = pages @ axes @ axes.mT
    wanted = page_mass(Steps(query.float().view(1, 2, 4, 64), torch.tensor([200])), pages).reshape(8, 12)
    assert torch.allclose(found, wanted, atol=0.05, rtol=0.01)
    assert page_tokens.page_bytes(form, shape) == tokens.rows[0, 0].numel() * tokens.rows.element_size()


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("form", FORMS)
def test_kernels_append_and_score_like_plain_torch(form: str, shape: DecodeShape) -> None:
    page = shape.page_size
    cache, sequences = make(shape, [9 * page, 4 * page + 3, 6 * page + 1, 0])
    tokens = built(cache, sequences, form)
    keys, values = (randn(4, shape.kv_heads, shape.head_dim, seed=seed).to(cache.keys.dtype) for seed in (1, 2))
    kernels.append_finalise(cache, tokens, sequences, keys, values)
    found = tokens.rows.clone()
    reference.append(cache, sequences, keys, values)
    page_tokens.finalise(cache, tokens, sequences)
    written = sequences.block_table[1, 4].long()
    assert torch.allclose(found[written, :, 2].float(), tokens.rows[written, :, 2].float(), atol=2e-2, rtol=1e-2)
    query = make_query(shape, 4)
    exact = page_tokens.score(query, shape, tokens, sequences)
    out = torch.full_like(exact, float("-inf"))
    kernels.score(query, shape, tokens, sequences, 1, 3, out)
    assert torch.equal(out.isfinite(), exact.isfinite())
    assert torch.allclose(out, exact, atol=3e-2, rtol=3e-3)


@pytest.mark.parametrize("form", ["keys", "axes-8"])
def test_programs_of_several_blocks_score_every_page(form: str, monkeypatch: pytest.MonkeyPatch) -> None:
    vectors = pytest.importorskip("locks_kernels.page_vectors_score")
    shape = DecodeShape(4, 1, 64)
    cache, sequences = make(shape, [16 * 75 + 5])
    tokens = built(cache, sequences, form)
    monkeypatch.setattr(kernels, "MAX_BLOCK_P", 8)
    monkeypatch.setattr(kernels, "PROGRAMS", 3)
    query = make_query(shape, 1)
    exact = page_tokens.score(query, shape, tokens, sequences)
    out = torch.full_like(exact, float("-inf"))
    block, programs, per_program = kernels.blocks_of(shape, sequences, tokens.rows.shape[-1])
    assert (block, programs, per_program) == (8, 4, 3)
    partial = torch.full((1, 4, programs, 2), float("nan"), device=DEVICE)
    kernels.score(query, shape, tokens, sequences, 1, 3, out, partial)
    assert torch.allclose(out, exact, atol=3e-2, rtol=3e-3)
    parts = torch.full((1, 4, 5, 4), float("nan"), device=DEVICE)
    vectors.share_out(partial, shape, sequences, 1, parts, block * per_program)
    assert (parts[..., 2] == float("-inf")).all()  # the least score is not known
    found = (parts[..., 0] + parts[..., 1].log2()) * math.log(2)  # natural log
    assert torch.allclose(found, exact.logsumexp(-1)[..., None].expand(-1, -1, 5), atol=3e-2)


@pytest.mark.parametrize("kernels", ["reference", "triton"])
@pytest.mark.parametrize("form", ["keys", "axes-32"])
def test_a_step_attends_the_pages_with_the_best_scores(form: str, kernels: str) -> None:
    shape = DecodeShape(8, 2, 64)
    cache, sequences = make(shape, [16 * 9, 16 * 7 + 4])
    options = smallest_budget(shape)
    stages = TokenStages(form, cache, sequences, options, kernels)
    stages.prefill()
    query = make_query(shape, 2)
    out = torch.empty_like(query)
    keys, values = (randn(2, 2, 64, seed=seed).to(cache.keys.dtype) for seed in (1, 2))
    stages.step(query, keys, values, out)
    scores = page_tokens.score(query, shape, stages.summaries, sequences)
    wanted = reference.select(reference.combine(scores, 2, "share"), sequences, shape, options)
    assert torch.equal(stages.tables, wanted)
    assert_close_output(out, reference.attend(query, cache, sequences, wanted)[0], shape.dtype)
