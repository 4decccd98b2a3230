"""Summaries of complete pages, and the append that completes them: kernels, then their launchers.

One kernel goes from keys to packed records (spectral.py); decoding summarises a page in the launch that fills it.
"""

# The bodies of kernels are not Python to a type checker.
# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

import torch
import triton
import triton.language as tl

from locks_kernels.cache import PagedCache, Sequences
from locks_kernels.spectral import constants, store_summaries


@triton.jit
def _build_kernel(
    key_ptr,
    summary_ptr,
    ids_ptr,
    count,
    stride_kp,
    stride_kh,
    stride_kt,
    stride_sp,
    stride_sh,
    BLOCK_P: tl.constexpr,
    HALF: tl.constexpr,
    PAGE: tl.constexpr,
    RANK: tl.constexpr,
    SWEEPS: tl.constexpr,
    AT_COEFFICIENTS: tl.constexpr,
    AT_CENTROID: tl.constexpr,
    AT_COEFFICIENT_SCALE: tl.constexpr,
    AT_BASIS_SCALE: tl.constexpr,
    AT_CENTROID_SCALE: tl.constexpr,
):
    h = tl.program_id(1).to(tl.int64)
    offs_p = tl.program_id(0) * BLOCK_P + tl.arange(0, BLOCK_P)
    page = tl.load(ids_ptr + offs_p, mask=offs_p < count, other=-1).to(tl.int64)
    mask_p = page >= 0
    # keys [BLOCK_P, PAGE, HALF, 2]
    offs_t = tl.arange(0, PAGE)[None, :, None]
    offs_d = tl.arange(0, 2 * HALF)[None, None, :]
    k_ptr = key_ptr + (page * stride_kp)[:, None, None] + h * stride_kh + offs_t * stride_kt + offs_d
    keys = tl.load(k_ptr, mask=mask_p[:, None, None], other=0.0).to(tl.float32)
    even, odd = tl.split(tl.reshape(keys, (BLOCK_P, PAGE, HALF, 2)))
    store_summaries(
        even,
        odd,
        summary_ptr + page * stride_sp + h * stride_sh,
        mask_p,
        BLOCK_P,
        HALF,
        PAGE,
        RANK,
        SWEEPS,
        AT_COEFFICIENTS,
        AT_CENTROID,
        AT_COEFFICIENT_SCALE,
        AT_BASIS_SCALE,
        AT_CENTROID_SCALE,
    )


@triton.jit
def _append_kernel(
    key_ptr,
    value_ptr,
    summary_ptr,
    new_key_ptr,
    new_value_ptr,
    table_ptr,
    seq_lens_ptr,
    stride_kp,
    stride_kh,
    stride_kt,
    stride_sp,
    stride_sh,
    stride_nb,
    stride_nh,
    stride_vb,
    stride_vh,
    stride_tb,
    FINALISE: tl.constexpr,
    BLOCK_P: tl.constexpr,
    HALF: tl.constexpr,
    PAGE: tl.constexpr,
    RANK: tl.constexpr,
    SWEEPS: tl.constexpr,
    AT_COEFFICIENTS: tl.constexpr,
    AT_CENTROID: tl.constexpr,
    AT_COEFFICIENT_SCALE: tl.constexpr,
    AT_BASIS_SCALE: tl.constexpr,
    AT_CENTROID_SCALE: tl.constexpr,
):
    h = tl.program_id(0).to(tl.int64)
    b = tl.program_id(1).to(tl.int64)
    tokens = tl.load(seq_lens_ptr + b)
    if tokens <= 0:
        return
    last = tokens - 1
    slot = last % PAGE
    page = tl.load(table_ptr + b * stride_tb + last // PAGE).to(tl.int64)
    if page < 0:
        return
    offs_d = tl.arange(0, 2 * HALF)
    page_at = page * stride_kp + h * stride_kh
    new_key = tl.load(new_key_ptr + b * stride_nb + h * stride_nh + offs_d).to(key_ptr.dtype.element_ty)
    new_value = tl.load(new_value_ptr + b * stride_vb + h * stride_vh + offs_d).to(value_ptr.dtype.element_ty)
    tl.store(key_ptr + page_at + slot * stride_kt + offs_d, new_key)
    tl.store(value_ptr + page_at + slot * stride_kt + offs_d, new_value)
    if FINALISE:  # noqa: SIM102  (decided at compile time, the next one at run time)
        if slot == PAGE - 1:
            # The new row comes from its source: the store above need not be visible to this program's other threads.
            offs_t = tl.arange(0, PAGE)[None, :, None]
            old_ptr = key_ptr + page_at + offs_t * stride_kt + offs_d[None, None, :]
            old = tl.load(old_ptr, mask=offs_t < PAGE - 1, other=0.0).to(tl.float32)
            keys = tl.where(offs_t < PAGE - 1, old, new_key.to(tl.float32)[None, None, :])  # [1, PAGE, 2 * HALF]
            even, odd = tl.split(tl.reshape(keys, (BLOCK_P, PAGE, HALF, 2)))
            one = tl.arange(0, BLOCK_P)
            store_summaries(
                even,
                odd,
                summary_ptr + page * stride_sp + h * stride_sh + one,
                one == 0,
                BLOCK_P,
                HALF,
                PAGE,
                RANK,
                SWEEPS,
                AT_COEFFICIENTS,
                AT_CENTROID,
                AT_COEFFICIENT_SCALE,
                AT_BASIS_SCALE,
                AT_CENTROID_SCALE,
            )


def build(cache: PagedCache, page_ids: torch.Tensor) -> None:
    """`reference.build`: summarise the physical pages `page_ids`, int32 or int64 [n], contiguous; negative ones are skipped.

    The padding behind a record's fields is left as it is.
    """
    if page_ids.numel() == 0:
        return
    elements = 8192 if triton.knobs.runtime.interpret else 1024  # of a Gram matrix: one page of 16 per warp
    block = max(1, elements // cache.shape.page_size**2)
    _build_kernel[(triton.cdiv(page_ids.numel(), block), cache.shape.kv_heads)](
        cache.keys,
        cache.summaries,
        page_ids,
        page_ids.numel(),
        *cache.keys.stride()[:3],
        *cache.summaries.stride()[:2],
        BLOCK_P=block,
        **constants(cache.shape),
        num_warps=4,
    )


def finalise_slots(cache: PagedCache, slots: torch.Tensor) -> None:
    """`reference.finalise_slots`: summarise the pages whose last slot is among `slots`, int64 [T]."""
    page_size = cache.shape.page_size
    build(cache, torch.where(slots % page_size == page_size - 1, slots // page_size, -1).where(slots >= 0, -1))


def append(cache: PagedCache, sequences: Sequences, keys: torch.Tensor, values: torch.Tensor) -> None:
    """`reference.append`: write the token at `seq_lens - 1`.  keys, values: [B, H, D], last axis contiguous."""
    _append(cache, sequences, keys, values, finalise=False)


def append_finalise(cache: PagedCache, sequences: Sequences, keys: torch.Tensor, values: torch.Tensor) -> None:
    """`append`, then `reference.finalise` in the same launch."""
    _append(cache, sequences, keys, values, finalise=True)


def _append(cache: PagedCache, sequences: Sequences, keys: torch.Tensor, values: torch.Tensor, finalise: bool) -> None:
    _append_kernel[(cache.shape.kv_heads, sequences.batch)](
        cache.keys,
        cache.values,
        cache.summaries,
        keys,
        values,
        sequences.block_table,
        sequences.seq_lens,
        *cache.keys.stride()[:3],
        *cache.summaries.stride()[:2],
        *keys.stride()[:2],
        *values.stride()[:2],
        sequences.block_table.stride(0),
        FINALISE=finalise,
        BLOCK_P=1,
        **constants(cache.shape),
        num_warps=1 if cache.shape.page_size == 16 else 4,
    )
