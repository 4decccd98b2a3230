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
    every_shape,
    layout,
    make,
    make_query,
    make_stages,
    named,
    scores_of,
    smallest_budget,
)

from locks_kernels import reference
from locks_kernels.cache import Sequences
from locks_kernels.shapes import DecodeShape, SelectOptions
from locks_kernels.summary import unpack

pytestmark = pytest.mark.parametrize("kernels", KERNELS)

GROUPS = (1, 2, 3, 4, 5, 7, 8, 12, 16)
RAGGED = (0, 1, 15, 16, 17, 32, 100)


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
