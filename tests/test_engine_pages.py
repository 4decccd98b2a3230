"""What an engine that owns the cache needs: summaries behind its pages, queries inside its fused projection, pages that it
fills itself, and sequences that stay dense."""

from __future__ import annotations

import pytest
import torch
from kernel_cases import (
    DEVICE,
    KERNELS,
    assert_close_output,
    assert_good_table,
    layout,
    make,
    make_query,
    make_stages,
    randn,
    relative_error,
    scores_of,
)

from locks_kernels import reference
from locks_kernels.cache import PagedCache, Sequences
from locks_kernels.shapes import DecodeShape, SelectOptions
from locks_kernels.summary import RecordLayout, unpack

pytestmark = pytest.mark.parametrize("kernels", KERNELS)
SHAPES = [DecodeShape(8, 2), DecodeShape(9, 3, head_dim=64, page_size=32, dtype="float16")]
every_shape = pytest.mark.parametrize("shape", SHAPES, ids=("d128p16", "d64p32"))


def in_engine_pages(cache: PagedCache) -> PagedCache:
    """The same cache with a page as engines have it, [H, PAGE, keys and values], and its summaries in the padding behind."""
    shape, pages = cache.shape, cache.num_pages
    elements = shape.kv_heads * shape.page_size * 2 * shape.head_dim
    record = RecordLayout.of(shape).record_bytes
    stride = -(-(elements * 2 + shape.kv_heads * record) // 128) * 128 + 256
    pool = torch.full((pages * stride // 2,), float("nan"), dtype=cache.keys.dtype, device=DEVICE)
    size = (pages, shape.kv_heads, shape.page_size, 2 * shape.head_dim)
    kv = pool.as_strided(size, (stride // 2, shape.page_size * 2 * shape.head_dim, 2 * shape.head_dim, 1))
    keys, values = kv.split(shape.head_dim, -1)
    summaries = pool.view(torch.uint8).as_strided((pages, shape.kv_heads, record), (stride, record, 1), elements * 2)
    for to, source in ((keys, cache.keys), (values, cache.values), (summaries, cache.summaries)):
        to.copy_(source)
    return PagedCache(shape, keys, values, summaries)


def in_fused_projection(query: torch.Tensor) -> torch.Tensor:
    """The same numbers as a slice of a wider matrix."""
    batch, heads, width = query.shape
    fused = torch.full((batch, (heads + 4) * width), float("nan"), dtype=query.dtype, device=DEVICE)
    fused[:, : heads * width] = query.flatten(1)
    return fused[:, : heads * width].view(batch, heads, width)


@every_shape
def test_a_step_in_engine_pages_is_the_same(kernels: str, shape: DecodeShape) -> None:
    page = shape.page_size
    tokens = (0, 1, page, 4 * page, 5 * page + 1, 40 * page)
    query = make_query(shape, len(tokens))
    new_keys, new_values = (randn(len(tokens), shape.kv_heads, shape.head_dim, seed=s).to(query.dtype) for s in (5, 6))
    results = []
    for engine in (False, True):
        cache, sequences = make(shape, tokens)
        if engine:
            cache = in_engine_pages(cache)
        stages = make_stages(kernels, cache, sequences)
        out = torch.full_like(query, float("nan"))
        mine = in_fused_projection(query) if engine else query
        stages.append_finalise(new_keys, new_values)
        stages.score(mine)
        stages.select()
        stages.attend(mine, out)
        full = sequences.block_table[5, :40].long()
        results.append((out, stages.tables, cache.summaries[full][..., : layout(cache).payload_bytes]))
    for one, other in zip(*results, strict=True):
        assert torch.equal(one, other)


@every_shape
def test_pages_that_the_engine_filled_are_summarised(kernels: str, shape: DecodeShape) -> None:
    page = shape.page_size
    cache, _ = make(shape, (12 * page,), room=3)
    cache.keys.copy_(randn(*cache.keys.shape))
    cache = in_engine_pages(cache)
    cache.summaries.fill_(0xFF)
    prompt = torch.cat(
        (torch.arange(5 * page + 3, 6 * page), torch.arange(2 * page, 3 * page), torch.arange(9 * page, 9 * page + 5))
    )
    decode = torch.tensor([7 * page - 1, -1, 8 * page - 2, page - 1])
    stages = make_stages(kernels, cache, Sequences(torch.zeros(1, 1).int().to(DEVICE), torch.ones(1).int().to(DEVICE)))
    stages.finalise_slots(torch.cat((prompt, decode, torch.tensor([-1, -page]))).to(DEVICE))
    stages.finalise_slots(torch.empty(0, dtype=torch.int64, device=DEVICE))
    filled = torch.tensor([0, 2, 5, 6], device=DEVICE)
    others = torch.ones(cache.num_pages, dtype=torch.bool, device=DEVICE)
    others[filled] = False
    assert (cache.summaries[others] == 0xFF).all()
    keys = cache.keys[filled].float()
    found = unpack(cache.summaries[filled], layout(cache)).reconstruct()
    best = relative_error(reference.summarise(keys, shape.rank).reconstruct(), keys)
    assert (relative_error(found, keys) <= 1.01 * best + 1e-4).all()


@pytest.mark.parametrize("dense_pages", (2, 5, 11))
def test_short_sequences_stay_dense(kernels: str, dense_pages: int) -> None:
    """Up to the bound a sequence attends to everything; longer ones keep their budget and leave nothing behind it."""
    shape = DecodeShape(4, 2, 64)
    options = SelectOptions(3 * 16, dense_tokens=dense_pages * 16 + 7)
    cache, sequences = make(shape, (0, 1, 3 * 16, 3 * 16 + 1, 5 * 16, 5 * 16 + 1, 11 * 16, 11 * 16 + 1, 30 * 16))
    query = make_query(shape, sequences.batch)
    stages = make_stages(kernels, cache, sequences, options)
    stages.tables.fill_(12345)
    stages.score(query)
    stages.select()
    width = max(3, dense_pages)
    assert stages.tables.shape[-1] == width
    for b, tokens in enumerate(sequences.seq_lens.tolist()):
        pages, table = shape.pages(tokens), stages.tables[b]
        if pages <= width:
            assert table[:, :pages].tolist() == [list(range(pages))] * 2 and (table[:, pages:] == -1).all()
        else:
            assert (table[:, 3:] == -1).all() and (table[:, :3] >= 0).all()
    long = Sequences(sequences.block_table[8:], sequences.seq_lens[8:])
    combined = reference.combine(scores_of(stages, cache, sequences, options), 2, "share")
    assert_good_table(stages.tables[8:, :, :3], combined[8:], long, shape, SelectOptions(3 * 16))
    out = torch.full_like(query, float("nan"))
    stages.attend(query, out)
    assert_close_output(out, reference.attend(query, cache, sequences, stages.tables)[0], shape.dtype)
