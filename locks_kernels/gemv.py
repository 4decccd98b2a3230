"""Matrix times one or a few vectors at the read roof: every weight is read once, 16 bytes a lane, and the small work around
a decode projection (RMS norm before; bias, residual, SiLU * up, rotary embedding and append after) is done by the programs
that hold the data anyway.

A program owns some output rows and walks the whole contraction, so no partial sums leave it.  The next tile of weights is
requested before the present one is used, and the first one before the preceding kernel has ended (programmatic dependent
launch): weights never depend on it.
"""

# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from locks_kernels.layer_ops import NORM_EPSILON, NewToken

BLOCK_V = 128
WARPS = 2
ROWS = 4  # of weights in flight per program: at batch 1 on an H200 3.7 TB/s, where 8 rows and 4 warps reach 3.1
_VECTOR = tl.constexpr(8)  # 16-bit elements in one 16-byte load


@triton.jit
def _products(
    x_ptr,
    gain_ptr,
    w_ptr,
    other_ptr,
    offs_n,
    batch,
    epsilon,
    IN: tl.constexpr,
    BLOCK_B: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_V: tl.constexpr,
    NORM: tl.constexpr,
    TWO: tl.constexpr,
    PDL: tl.constexpr,
):
    """fp32 [BLOCK_N, BLOCK_B]: rows offs_n [BLOCK_N] behind w_ptr times each x, and (TWO) those behind other_ptr."""
    VECTORS: tl.constexpr = IN // _VECTOR
    offs_b = tl.arange(0, BLOCK_B)[None, :, None, None]
    offs_v = tl.arange(0, BLOCK_V)[None, None, :, None]
    offs_in = offs_v * _VECTOR + tl.arange(0, _VECTOR)[None, None, None, :]
    offs_w = offs_n[:, None, None, None] * IN + offs_in
    # [BLOCK_N, 1, BLOCK_V, 8]
    w_next = tl.load(w_ptr + offs_w, mask=offs_v < VECTORS, other=0.0, eviction_policy="evict_first")
    w_sum = tl.zeros([BLOCK_N, BLOCK_B, BLOCK_V], tl.float32)
    if TWO:
        other_next = tl.load(other_ptr + offs_w, mask=offs_v < VECTORS, other=0.0, eviction_policy="evict_first")
        other_sum = tl.zeros([BLOCK_N, BLOCK_B, BLOCK_V], tl.float32)
    squares = tl.zeros([1, BLOCK_B, BLOCK_V], tl.float32)
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    for at in range(0, VECTORS, BLOCK_V):
        offs_next = (at + BLOCK_V) * _VECTOR
        mask_next = offs_v < VECTORS - BLOCK_V - at
        w = w_next
        w_next = tl.load(w_ptr + offs_w + offs_next, mask=mask_next, other=0.0, eviction_policy="evict_first")
        if TWO:
            other = other_next
            other_next = tl.load(other_ptr + offs_w + offs_next, mask=mask_next, other=0.0, eviction_policy="evict_first")
        mask_v = offs_v < VECTORS - at
        # [1, BLOCK_B, BLOCK_V, 8]
        x = tl.load(x_ptr + offs_b * IN + offs_in + at * _VECTOR, mask=mask_v & (offs_b < batch), other=0.0).to(tl.float32)
        if NORM:
            squares += tl.sum(x * x, axis=3)
            x *= tl.load(gain_ptr + offs_in + at * _VECTOR, mask=mask_v, other=0.0).to(tl.float32)
        w_sum += tl.sum(w.to(tl.float32) * x, axis=3)
        if TWO:
            other_sum += tl.sum(other.to(tl.float32) * x, axis=3)
    total = tl.sum(w_sum, axis=2)
    other_total = tl.sum(other_sum, axis=2) if TWO else total
    if NORM:
        scale = tl.rsqrt(tl.sum(squares, axis=2) / IN + epsilon)
        total *= scale
        other_total *= scale
    return total, other_total


@triton.jit
def _gemv_kernel(
    x_ptr,
    gain_ptr,
    w_ptr,
    bias_ptr,
    out_ptr,
    batch,
    rows,
    epsilon,
    IN: tl.constexpr,
    BLOCK_B: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_V: tl.constexpr,
    NORM: tl.constexpr,
    EPILOGUE: tl.constexpr,
    PDL: tl.constexpr,
):
    first = tl.program_id(0) * BLOCK_N
    w_ptr += first.to(tl.int64) * IN
    offs_n = tl.minimum(tl.arange(0, BLOCK_N), rows - 1 - first)
    TWO: tl.constexpr = EPILOGUE == "silu_mul"
    up_ptr = w_ptr + rows.to(tl.int64) * IN
    total, up = _products(x_ptr, gain_ptr, w_ptr, up_ptr, offs_n, batch, epsilon, IN, BLOCK_B, BLOCK_N, BLOCK_V, NORM, TWO, PDL)
    # [BLOCK_N, BLOCK_B]
    offs_row = (first + tl.arange(0, BLOCK_N))[:, None]
    offs_b = tl.arange(0, BLOCK_B)[None, :]
    out_tile = out_ptr + offs_b * rows + offs_row
    mask_out = (offs_row < rows) & (offs_b < batch)
    if EPILOGUE == "silu_mul":
        total = total / (1 + tl.exp(-total)) * up
    elif EPILOGUE == "bias":
        total += tl.load(bias_ptr + offs_row, mask=offs_row < rows, other=0.0).to(tl.float32)
    elif EPILOGUE == "add":
        total += tl.load(out_tile, mask=mask_out, other=0.0).to(tl.float32)
    tl.store(out_tile, total.to(out_ptr.dtype.element_ty), mask=mask_out)


@triton.jit
def _qkv_kernel(
    x_ptr,
    gain_ptr,
    w_ptr,
    bias_ptr,
    table_ptr,
    queries_ptr,
    keys_ptr,
    values_ptr,
    cache_keys_ptr,
    cache_values_ptr,
    block_table_ptr,
    seq_lens_ptr,
    batch,
    stride_tb,
    stride_cp,
    stride_ch,
    stride_ct,
    epsilon,
    IN: tl.constexpr,
    HQ: tl.constexpr,
    H: tl.constexpr,
    HALF: tl.constexpr,
    PAGE: tl.constexpr,
    BLOCK_B: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_V: tl.constexpr,
    BIAS: tl.constexpr,
    APPEND: tl.constexpr,
    PDL: tl.constexpr,
):
    D: tl.constexpr = 2 * HALF
    head = tl.program_id(0)
    offs_n = tl.arange(0, BLOCK_N)
    first = tl.program_id(1) * BLOCK_N
    w_ptr += (head * D + first).to(tl.int64) * IN
    # [BLOCK_N, BLOCK_B]: channels d and d + D/2, which rotate together
    low, high = _products(
        x_ptr, gain_ptr, w_ptr, w_ptr + HALF * IN, offs_n, batch, epsilon, IN, BLOCK_B, BLOCK_N, BLOCK_V, True, True, PDL
    )
    offs_d = (first + offs_n)[:, None]
    offs_b = tl.arange(0, BLOCK_B)[None, :]
    mask_b = offs_b < batch
    if BIAS:
        low += tl.load(bias_ptr + head * D + offs_d).to(tl.float32)
        high += tl.load(bias_ptr + head * D + HALF + offs_d).to(tl.float32)
    if head < HQ + H:
        cosine = tl.load(table_ptr + offs_b * D + offs_d, mask=mask_b, other=0.0)
        sine = tl.load(table_ptr + offs_b * D + HALF + offs_d, mask=mask_b, other=0.0)
        low, high = low * cosine - high * sine, high * cosine + low * sine
    dtype = queries_ptr.dtype.element_ty
    if head < HQ:
        target = queries_ptr + (offs_b * HQ + head) * D + offs_d
    elif head < HQ + H:
        target = keys_ptr + (offs_b * H + head - HQ) * D + offs_d
    else:
        target = values_ptr + (offs_b * H + head - HQ - H) * D + offs_d
    tl.store(target, low.to(dtype), mask=mask_b)
    tl.store(target + HALF, high.to(dtype), mask=mask_b)
    if APPEND:  # noqa: SIM102  a branch at compile time around one at run time
        if head >= HQ:
            position = tl.load(seq_lens_ptr + offs_b, mask=mask_b, other=0) - 1
            live = mask_b & (position >= 0)
            page = tl.load(block_table_ptr + offs_b.to(tl.int64) * stride_tb + position // PAGE, mask=live, other=0)
            is_value = head >= HQ + H
            cache_ptr = cache_values_ptr if is_value else cache_keys_ptr
            kv_head = (head - HQ - H if is_value else head - HQ).to(tl.int64)
            slot = cache_ptr + kv_head * stride_ch + page.to(tl.int64) * stride_cp + (position % PAGE) * stride_ct
            tl.store(slot + offs_d, low.to(dtype), mask=live)
            tl.store(slot + offs_d + HALF, high.to(dtype), mask=live)


def gemv(
    x: torch.Tensor,
    weight: torch.Tensor,
    out: torch.Tensor,
    gain: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    epilogue: str = "none",
    pdl: bool = False,
) -> None:
    """out [B, OUT] from x [B, IN] and weight [rows, IN]; all contiguous and 16 bits wide, IN a multiple of 8, B <= 4.

    gain      RMS-norm x with this gain [IN] first
    epilogue  "none"; "bias": add bias [OUT]; "add": add to what `out` holds; "silu_mul": weight has 2 OUT rows,
              gate then up, and out = silu(gate) * up
    pdl       programmatic dependent launch (compute capability 9.0 and newer)
    """
    batch, width = x.shape
    rows = out.shape[1]
    block_n = ROWS // (2 if epilogue == "silu_mul" else 1)
    _gemv_kernel[(triton.cdiv(rows, block_n),)](
        x,
        x if gain is None else gain,
        weight,
        x if bias is None else bias,
        out,
        batch,
        rows,
        NORM_EPSILON,
        IN=width,
        BLOCK_B=triton.next_power_of_2(batch),
        BLOCK_N=block_n,
        BLOCK_V=BLOCK_V,
        NORM=gain is not None,
        EPILOGUE=epilogue,
        PDL=pdl,
        num_warps=WARPS,
        launch_pdl=pdl,
    )


def qkv(
    x: torch.Tensor,
    gain: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    table: torch.Tensor,
    token: NewToken,
    pdl: bool = False,
) -> None:
    """`layer_ops.norm_qkv` without per-head norms in one launch, B <= 4."""
    batch, width = x.shape
    _, query_heads, head_dim = token.queries.shape
    kv_heads, half = token.keys.shape[1], head_dim // 2
    block_n = ROWS // 2  # and as many that rotate with them
    _qkv_kernel[(query_heads + 2 * kv_heads, half // block_n)](
        x,
        gain,
        weight,
        x if bias is None else bias,
        table,
        token.queries,
        token.keys,
        token.values,
        *token.append_arguments[:4],
        batch,
        *token.append_arguments[4:8],
        NORM_EPSILON,
        IN=width,
        HQ=query_heads,
        H=kv_heads,
        HALF=half,
        PAGE=token.append_arguments[8],
        BLOCK_B=triton.next_power_of_2(batch),
        BLOCK_N=block_n,
        BLOCK_V=BLOCK_V,
        BIAS=bias is not None,
        APPEND=token.append is not None,
        PDL=pdl,
        num_warps=WARPS,
        launch_pdl=pdl,
    )
