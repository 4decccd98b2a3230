"""Caches, sequences and expectations that the kernel tests share."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch

from locks_kernels import reference
from locks_kernels.cache import TORCH_DTYPE, PagedCache, Sequences
from locks_kernels.decode import Stages, stages_class
from locks_kernels.shapes import DecodeShape, SelectOptions, ShapeError
from locks_kernels.summary import RecordLayout

ON_GPU = torch.cuda.is_available()
DEVICE = "cuda" if ON_GPU else "cpu"
KERNELS = [pytest.param(name, marks=pytest.mark.gpu) for name in ("triton", "cuda")] if ON_GPU else ["triton"]
ROUNDING = {"bfloat16": 2**-7, "float16": 2**-10}  # of one stored value; Triton's interpreter truncates, a GPU rounds
SCORE_ERROR = 2e-3  # nats, on scores up to about 15

# query heads, KV heads, D, PAGE, R, dtype: every value of every axis at least once
SHAPES = [
    DecodeShape(8, 2, 128, 16, 8, "bfloat16"),
    DecodeShape(2, 2, 64, 32, 2, "float16"),
    DecodeShape(5, 1, 256, 64, 4, "bfloat16"),
    DecodeShape(9, 3, 64, 16, 8, "float16"),
]


def named(shape: DecodeShape) -> str:
    return f"g{shape.group}h{shape.kv_heads}d{shape.head_dim}p{shape.page_size}r{shape.rank}{shape.dtype}"


every_shape = pytest.mark.parametrize("shape", SHAPES, ids=named)


def randn(*size: int, seed: int = 0) -> torch.Tensor:
    """The same numbers on every device."""
    return torch.randn(size, generator=torch.Generator().manual_seed(seed)).to(DEVICE)


def empty_cache(shape: DecodeShape, pages: int, page_major: bool = False) -> PagedCache:
    """A pool whose every slot is NaN and whose every summary is not a number either."""
    cache = PagedCache.allocate(shape, pages, DEVICE)
    if page_major:
        cache.keys, cache.values = cache.keys.contiguous(), cache.values.contiguous()
    cache.keys.fill_(float("nan"))
    cache.values.fill_(float("nan"))
    cache.summaries.fill_(0xFF)
    return cache


def make(
    shape: DecodeShape, tokens: Sequence[int], room: int = 1, seed: int = 0, page_major: bool = False
) -> tuple[PagedCache, Sequences]:
    """A cache with `tokens` random tokens per sequence in pages in random order, `room` more pages each, and summaries of
    all complete pages by the reference.  Everything that no token owns is poison."""
    width = max(shape.pages(n) for n in tokens) + room
    order = torch.randperm(len(tokens) * width + 3, generator=torch.Generator().manual_seed(seed))
    table = order[: len(tokens) * width].view(len(tokens), width).int().to(DEVICE)
    cache = empty_cache(shape, len(order), page_major)
    for b, count in enumerate(tokens):
        size = (count, shape.kv_heads, shape.head_dim)
        where = table[b].long().repeat_interleave(shape.page_size)[:count]
        slot = torch.arange(count, device=DEVICE) % shape.page_size
        cache.keys[where, :, slot] = (1.5 * randn(*size, seed=seed + 10 * b)).to(cache.keys.dtype)
        cache.values[where, :, slot] = randn(*size, seed=seed + 10 * b + 1).to(cache.keys.dtype)
        reference.build(cache, table[b, : count // shape.page_size])
    return cache, Sequences(table, torch.tensor(tokens, dtype=torch.int32, device=DEVICE))


def make_query(shape: DecodeShape, batch: int, seed: int = 99) -> torch.Tensor:
    return randn(batch, shape.query_heads, shape.head_dim, seed=seed).to(TORCH_DTYPE[shape.dtype])


def make_stages(kernels: str, cache: PagedCache, sequences: Sequences, options: SelectOptions | None = None) -> Stages:
    """The implementation to test; skips where it says that it does not support the cache."""
    try:
        _, stages = stages_class(kernels, cache)
    except ShapeError as error:
        pytest.skip(str(error))
    return stages(cache, sequences, options or smallest_budget(cache.shape), None)


def smallest_budget(shape: DecodeShape) -> SelectOptions:
    """Three pages, so that four pages are enough to have something to select."""
    return SelectOptions(budget_tokens=3 * shape.page_size)


def scores_of(stages: Stages, cache: PagedCache, sequences: Sequences, options: SelectOptions) -> torch.Tensor:
    """What `score` wrote, fp32 [B, HQ, P], -inf where nothing is to be read."""
    scores = stages.scores[..., : sequences.max_pages].clone()  # type: ignore[attr-defined]
    counts = reference.scored_pages(sequences.seq_lens, cache.shape, options.recent_pages)
    logical = torch.arange(sequences.max_pages, device=DEVICE)
    return scores.masked_fill((logical >= counts[:, None])[:, None], float("-inf"))


def relative_error(found: torch.Tensor, expected: torch.Tensor) -> torch.Tensor:
    """Frobenius error over the last two axes, relative; an all-zero expectation counts as of size 1e-3."""
    norm = expected.flatten(-2).norm(dim=-1).clamp_min(1e-3)
    return (found - expected).flatten(-2).norm(dim=-1) / norm


def assert_close_output(found: torch.Tensor, expected: torch.Tensor, dtype: str) -> None:
    assert torch.isfinite(found).all()
    error = (found.float() - expected.float()).abs().max()
    assert error <= 2 * ROUNDING[dtype] * expected.float().abs().max().clamp_min(0.1), float(error)


def assert_good_table(
    tables: torch.Tensor, combined: torch.Tensor, sequences: Sequences, shape: DecodeShape, options: SelectOptions
) -> None:
    """Sound tables, and nothing left out that is more than 1 % better than something kept."""
    kept = options.kept_pages(shape.page_size)
    for b, tokens in enumerate(sequences.seq_lens.tolist()):
        pages = shape.pages(tokens)
        for h in range(shape.kv_heads):
            table = tables[b, h].tolist()
            ids = table[: min(pages, kept)]
            assert table[len(ids) :] == [-1] * (kept - len(ids))
            assert ids == sorted(set(ids)) and all(0 <= page < pages for page in ids)
            upper = pages - options.recent_pages
            if pages > kept:
                assert ids[: options.sink_pages] == list(range(options.sink_pages))
                assert ids[kept - options.recent_pages :] == list(range(upper, pages))
                left_out = sorted(set(range(options.sink_pages, upper)) - set(ids))
                ranked = ids[options.sink_pages : kept - options.recent_pages]
                assert combined[b, h, ranked].min() >= 0.99 * combined[b, h, left_out].max()


def record_scores(cache: PagedCache, page_ids: torch.Tensor, query: torch.Tensor) -> torch.Tensor:
    """Reference scores [HQ, n] of pages by their records; query [HQ, D]."""
    shape = cache.shape
    table = torch.cat((page_ids, page_ids[:1])).int()[None]
    tokens = torch.tensor([len(page_ids) * shape.page_size + 1], dtype=torch.int32, device=DEVICE)
    return reference.score(query[None], cache, Sequences(table, tokens))[0, :, : len(page_ids)]


def layout(cache: PagedCache) -> RecordLayout:
    return RecordLayout.of(cache.shape)
