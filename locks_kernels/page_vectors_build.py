"""Summaries of page_vectors on a GPU: of many pages at once, and of the page that a new token fills."""

# The bodies of kernels are not Python to a type checker.
# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

import torch
import triton
import triton.language as tl

from locks_kernels.cache import PagedCache, Sequences
from locks_kernels.page_vectors import FORMS, PageVectors

MIN_MAX = tl.constexpr(FORMS.index("min-max"))
CUBOID_MEAN = tl.constexpr(FORMS.index("cuboid-mean"))
MEAN_STD = tl.constexpr(FORMS.index("mean-std"))
MEAN_SPREAD = tl.constexpr(FORMS.index("mean-spread"))


@triton.jit
def _store_summary(vector_ptr, spread_ptr, at, keys, FORM: tl.constexpr, HEAD_DIM: tl.constexpr, PAGE: tl.constexpr):
    """Summary of one page of one KV head, keys fp32 [PAGE, HEAD_DIM]; `at` is its index among all of them."""
    offs_d = tl.arange(0, HEAD_DIM)
    mean = tl.sum(keys, 0) / PAGE
    away = keys - mean[None, :]
    if FORM == MIN_MAX:
        first = tl.min(keys, 0)
        second = tl.max(keys, 0)
    elif FORM == CUBOID_MEAN:
        radius = tl.sum(tl.abs(away), 0) / PAGE
        first = mean - radius
        second = mean + radius
    else:
        first = mean
        second = tl.sqrt(tl.sum(away * away, 0) / PAGE)
    if FORM <= MEAN_STD:
        row_ptr = vector_ptr + at * (2 * HEAD_DIM) + offs_d
        tl.store(row_ptr, first)
        tl.store(row_ptr + HEAD_DIM, second)
    else:
        tl.store(vector_ptr + at * HEAD_DIM + offs_d, first)
        if FORM == MEAN_SPREAD:
            tl.store(spread_ptr + at, tl.sqrt(tl.sum(second * second, 0) / HEAD_DIM))


@triton.jit
def _build_kernel(
    key_ptr,
    vector_ptr,
    spread_ptr,
    ids_ptr,
    stride_kp,
    stride_kh,
    stride_kt,
    kv_heads,
    FORM: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    PAGE: tl.constexpr,
):
    h = tl.program_id(1).to(tl.int64)
    page = tl.load(ids_ptr + tl.program_id(0)).to(tl.int64)
    offs_t = tl.arange(0, PAGE)[:, None]
    offs_d = tl.arange(0, HEAD_DIM)[None, :]
    keys = tl.load(key_ptr + page * stride_kp + h * stride_kh + offs_t * stride_kt + offs_d).to(tl.float32)
    _store_summary(vector_ptr, spread_ptr, page * kv_heads + h, keys, FORM, HEAD_DIM, PAGE)


@triton.jit
def _append_kernel(
    key_ptr,
    value_ptr,
    vector_ptr,
    spread_ptr,
    new_key_ptr,
    new_value_ptr,
    table_ptr,
    seq_lens_ptr,
    stride_kp,
    stride_kh,
    stride_kt,
    stride_nb,
    stride_nh,
    stride_vb,
    stride_vh,
    stride_tb,
    FORM: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    PAGE: tl.constexpr,
):
    h = tl.program_id(0).to(tl.int64)
    b = tl.program_id(1).to(tl.int64)
    tokens = tl.load(seq_lens_ptr + b)
    if tokens <= 0:
        return
    last = tokens - 1
    slot = last % PAGE
    page = tl.load(table_ptr + b * stride_tb + last // PAGE).to(tl.int64)
    offs_d = tl.arange(0, HEAD_DIM)
    page_at = page * stride_kp + h * stride_kh
    new_key = tl.load(new_key_ptr + b * stride_nb + h * stride_nh + offs_d).to(key_ptr.dtype.element_ty)
    new_value = tl.load(new_value_ptr + b * stride_vb + h * stride_vh + offs_d).to(value_ptr.dtype.element_ty)
    tl.store(key_ptr + page_at + slot * stride_kt + offs_d, new_key)
    tl.store(value_ptr + page_at + slot * stride_kt + offs_d, new_value)
    if slot == PAGE - 1:
        # The new row comes from its source: the store above need not be visible to this program's other threads.
        offs_t = tl.arange(0, PAGE)[:, None]
        old = tl.load(key_ptr + page_at + offs_t * stride_kt + offs_d[None, :], mask=offs_t < PAGE - 1, other=0.0)
        keys = tl.where(offs_t < PAGE - 1, old.to(tl.float32), new_key.to(tl.float32)[None, :])
        _store_summary(vector_ptr, spread_ptr, page * tl.num_programs(0) + h, keys, FORM, HEAD_DIM, PAGE)


def build(cache: PagedCache, summaries: PageVectors, page_ids: torch.Tensor) -> None:
    """`page_vectors.build`; page_ids int32 or int64 [n], contiguous."""
    if page_ids.numel() == 0:
        return
    shape = cache.shape
    _build_kernel[(page_ids.numel(), shape.kv_heads)](
        cache.keys,
        summaries.vectors,
        summaries.spread,
        page_ids,
        *cache.keys.stride()[:3],
        shape.kv_heads,
        FORM=FORMS.index(summaries.form),
        HEAD_DIM=shape.head_dim,
        PAGE=shape.page_size,
        num_warps=4,
    )


def append_finalise(
    cache: PagedCache, summaries: PageVectors, sequences: Sequences, keys: torch.Tensor, values: torch.Tensor
) -> None:
    """Write the token at `seq_lens - 1` (keys, values: [B, H, D]) and summarise its page if that is now full."""
    shape = cache.shape
    _append_kernel[(shape.kv_heads, sequences.batch)](
        cache.keys,
        cache.values,
        summaries.vectors,
        summaries.spread,
        keys,
        values,
        sequences.block_table,
        sequences.seq_lens,
        *cache.keys.stride()[:3],
        *keys.stride()[:2],
        *values.stride()[:2],
        sequences.block_table.stride(0),
        FORM=FORMS.index(summaries.form),
        HEAD_DIM=shape.head_dim,
        PAGE=shape.page_size,
        num_warps=4,
    )
