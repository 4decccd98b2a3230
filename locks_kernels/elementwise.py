"""The small kernels between the projections of a decode step, each one launch.  Reference: the same names in `layer_ops`.

All of them wait for the preceding kernel before their first access (PDL), so that chains of early launches stay in order.
"""

# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from locks_kernels.layer_ops import NORM_EPSILON, ROPE_BASE, NewToken


@triton.jit
def _rms_norm_kernel(x_ptr, gain_ptr, out_ptr, width, epsilon, BLOCK: tl.constexpr, PDL: tl.constexpr):
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    row = tl.program_id(0).to(tl.int64) * width
    offs = tl.arange(0, BLOCK)
    mask = offs < width
    x = tl.load(x_ptr + row + offs, mask=mask, other=0.0).to(tl.float32)
    gain = tl.load(gain_ptr + offs, mask=mask, other=0.0).to(tl.float32)
    x *= tl.rsqrt(tl.sum(x * x, axis=0) / width + epsilon)
    tl.store(out_ptr + row + offs, (x * gain).to(out_ptr.dtype.element_ty), mask=mask)


def rms_norm(x: torch.Tensor, gain: torch.Tensor, out: torch.Tensor, pdl: bool = False) -> None:
    """out [B, W] = x [B, W] / rms(x) * gain [W]."""
    batch, width = x.shape
    block = triton.next_power_of_2(width)
    _rms_norm_kernel[(batch,)](
        x, gain, out, width, NORM_EPSILON, BLOCK=block, PDL=pdl, num_warps=max(1, min(16, block // 512)), launch_pdl=pdl
    )


@triton.jit
def _silu_mul_kernel(gate_up_ptr, out_ptr, width, BLOCK: tl.constexpr, PDL: tl.constexpr):
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    row = tl.program_id(1).to(tl.int64)
    offs = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = offs < width
    gate = tl.load(gate_up_ptr + row * 2 * width + offs, mask=mask, other=0.0).to(tl.float32)
    up = tl.load(gate_up_ptr + (row * 2 + 1) * width + offs, mask=mask, other=0.0).to(tl.float32)
    result = gate / (1 + tl.exp(-gate)) * up
    tl.store(out_ptr + row * width + offs, result.to(out_ptr.dtype.element_ty), mask=mask)


def silu_mul(gate_up: torch.Tensor, out: torch.Tensor, pdl: bool = False) -> None:
    """out [B, M] = silu(gate_up[:, :M]) * gate_up[:, M:]."""
    batch, width = out.shape
    block = 1024
    _silu_mul_kernel[(triton.cdiv(width, block), batch)](gate_up, out, width, BLOCK=block, PDL=pdl, num_warps=4, launch_pdl=pdl)


@triton.jit
def _rope_table_kernel(seq_lens_ptr, table_ptr, HALF: tl.constexpr, LOG2_STEP: tl.constexpr, PDL: tl.constexpr):
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    sequence = tl.program_id(0)
    offs = tl.arange(0, HALF)
    position = (tl.load(seq_lens_ptr + sequence) - 1).to(tl.float64)
    # double precision up to the fraction of a turn (an argument that is no constexpr would arrive as fp32)
    turns = position * tl.exp2(offs.to(tl.float64) * LOG2_STEP) * 0.15915494309189535
    angle = ((turns - tl.floor(turns)) * 6.283185307179586).to(tl.float32)
    tl.store(table_ptr + sequence * 2 * HALF + offs, tl.cos(angle))
    tl.store(table_ptr + sequence * 2 * HALF + HALF + offs, tl.sin(angle))


def rope_table(seq_lens: torch.Tensor, table: torch.Tensor, pdl: bool = False) -> None:
    """table fp32 [B, D]: cosines, then sines, at position seq_lens [B] - 1."""
    batch, head_dim = table.shape
    half = head_dim // 2
    _rope_table_kernel[(batch,)](
        seq_lens, table, HALF=half, LOG2_STEP=-math.log2(ROPE_BASE) / half, PDL=pdl, num_warps=1, launch_pdl=pdl
    )


@triton.jit
def _rotate_and_place_kernel(
    qkv_ptr,
    table_ptr,
    query_gain_ptr,
    key_gain_ptr,
    queries_ptr,
    keys_ptr,
    values_ptr,
    cache_keys_ptr,
    cache_values_ptr,
    block_table_ptr,
    seq_lens_ptr,
    stride_tb,
    stride_cp,
    stride_ch,
    stride_ct,
    epsilon,
    HQ: tl.constexpr,
    H: tl.constexpr,
    HALF: tl.constexpr,
    PAGE: tl.constexpr,
    NORM: tl.constexpr,
    APPEND: tl.constexpr,
    PDL: tl.constexpr,
):
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    head, sequence = tl.program_id(0), tl.program_id(1)
    D: tl.constexpr = 2 * HALF
    offs = tl.arange(0, HALF)
    source = qkv_ptr + (sequence * (HQ + 2 * H) + head) * D
    low = tl.load(source + offs).to(tl.float32)
    high = tl.load(source + HALF + offs).to(tl.float32)
    if head < HQ + H:
        if NORM:
            gain_ptr = query_gain_ptr if head < HQ else key_gain_ptr
            scale = tl.rsqrt((tl.sum(low * low, axis=0) + tl.sum(high * high, axis=0)) / D + epsilon)
            low *= scale * tl.load(gain_ptr + offs).to(tl.float32)
            high *= scale * tl.load(gain_ptr + HALF + offs).to(tl.float32)
        cosine = tl.load(table_ptr + sequence * D + offs)
        sine = tl.load(table_ptr + sequence * D + HALF + offs)
        low, high = low * cosine - high * sine, high * cosine + low * sine
    dtype = queries_ptr.dtype.element_ty
    if head < HQ:
        target = queries_ptr + (sequence * HQ + head) * D
    elif head < HQ + H:
        target = keys_ptr + (sequence * H + head - HQ) * D
    else:
        target = values_ptr + (sequence * H + head - HQ - H) * D
    tl.store(target + offs, low.to(dtype))
    tl.store(target + HALF + offs, high.to(dtype))
    if APPEND:
        position = tl.load(seq_lens_ptr + sequence) - 1
        if (head >= HQ) & (position >= 0):
            page = tl.load(block_table_ptr + sequence.to(tl.int64) * stride_tb + position // PAGE).to(tl.int64)
            is_value = head >= HQ + H
            cache_ptr = cache_values_ptr if is_value else cache_keys_ptr
            kv_head = (head - HQ - H if is_value else head - HQ).to(tl.int64)
            slot = cache_ptr + page * stride_cp + kv_head * stride_ch + (position % PAGE) * stride_ct
            tl.store(slot + offs, low.to(dtype))
            tl.store(slot + HALF + offs, high.to(dtype))


def rotate_and_place(
    projected: torch.Tensor,
    table: torch.Tensor,
    head_gains: tuple[torch.Tensor, torch.Tensor] | None,
    token: NewToken,
    pdl: bool = False,
) -> None:
    """Split, per-head norm, rotate and append in one launch; see `layer_ops`."""
    batch, query_heads, head_dim = token.queries.shape
    kv_heads = token.keys.shape[1]
    _rotate_and_place_kernel[(query_heads + 2 * kv_heads, batch)](
        projected,
        table,
        *((table, table) if head_gains is None else head_gains),
        token.queries,
        token.keys,
        token.values,
        *token.append_arguments[:8],
        NORM_EPSILON,
        HQ=query_heads,
        H=kv_heads,
        HALF=head_dim // 2,
        PAGE=token.append_arguments[8],
        NORM=head_gains is not None,
        APPEND=token.append is not None,
        PDL=pdl,
        num_warps=1,
        launch_pdl=pdl,
    )
