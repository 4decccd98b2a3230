"""Where summaries lie: in the padded tail of each page of vLLM's cache, so that vLLM budgets, moves and re-uses them with it.

A page of one layer is H x PAGE x (keys and values, 2 D) in either order of H and PAGE, then H records, then nothing up to the
next multiple of ALIGNMENT.
"""

from __future__ import annotations

import torch

from locks_kernels.cache import PagedCache
from locks_kernels.shapes import DecodeShape
from locks_kernels.summary import RecordLayout

ALIGNMENT = 128  # bytes: pages start where a line of memory does


def tail_bytes(shape: DecodeShape) -> int:
    """Summaries of one page, all KV heads of one layer."""
    return shape.kv_heads * RecordLayout.of(shape).record_bytes


def padded_bytes(page_bytes: int, shape: DecodeShape) -> int:
    """A page of `page_bytes` of keys and values with its summaries, on ALIGNMENT."""
    return -(-(page_bytes + tail_bytes(shape)) // ALIGNMENT) * ALIGNMENT


def page_cache(kv_cache: torch.Tensor, shape: DecodeShape) -> PagedCache:
    """vLLM's cache of one layer [pages, H, PAGE, 2 D] as ours, without a copy.

    ValueError where its pages are not apart far enough for summaries to lie between them.
    """
    pages, heads, tokens, width = kv_cache.shape
    dense_bytes = heads * tokens * width * kv_cache.element_size()
    stride_bytes = kv_cache.stride(0) * kv_cache.element_size()
    if stride_bytes < dense_bytes + tail_bytes(shape):
        raise ValueError(
            f"pages of {dense_bytes} bytes lie {stride_bytes} bytes apart, without room for {tail_bytes(shape)} bytes of "
            "summaries: the engine has not padded them"
        )
    record_bytes = RecordLayout.of(shape).record_bytes
    raw = kv_cache.view(torch.uint8)
    summaries = raw.as_strided(
        (pages, heads, record_bytes), (stride_bytes, record_bytes, 1), raw.storage_offset() + dense_bytes
    )
    keys, values = kv_cache.split(shape.head_dim, dim=-1)
    return PagedCache(shape, keys, values, summaries)


def write_slots(cache: PagedCache, keys: torch.Tensor, values: torch.Tensor, slots: torch.Tensor) -> None:
    """Keys and values [T, H, D] into the slots int64 [T]; negative ones are skipped.  Synchronises with a GPU."""
    live = slots >= 0
    pages, offsets = slots[live] // cache.shape.page_size, slots[live] % cache.shape.page_size
    cache.keys[pages, :, offsets] = keys[: len(slots)][live].to(cache.keys.dtype)
    cache.values[pages, :, offsets] = values[: len(slots)][live].to(cache.values.dtype)
