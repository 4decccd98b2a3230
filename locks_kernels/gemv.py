"""Matrix times one or a few vectors at the read roof: every weight is read once, 16 bytes a lane, and the small work around
a decode projection (RMS norm before; bias, residual, SiLU * up after) is done by the programs that hold the data anyway.

A program owns BLOCK_N output rows and walks the whole contraction, so no partial sums leave it.  The next tile of weights
is requested before the present one is used, and the first one before the preceding kernel has ended (programmatic dependent
launch): weights never depend on it.
"""

# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from locks_kernels.layer_ops import NORM_EPSILON

MAX_BATCH = 4  # above it tensor cores win: the products here are plain multiply-adds, B per weight
_VECTOR = tl.constexpr(8)  # 16-bit elements in one 16-byte load


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
    VECTORS: tl.constexpr = IN // _VECTOR
    first = tl.program_id(0) * BLOCK_N
    offs_n = tl.minimum(tl.arange(0, BLOCK_N), rows - 1 - first)[:, None, None, None]
    offs_b = tl.arange(0, BLOCK_B)[None, :, None, None]
    offs_v = tl.arange(0, BLOCK_V)[None, None, :, None]
    offs_in = offs_v * _VECTOR + tl.arange(0, _VECTOR)[None, None, None, :]
    w_tile = w_ptr + first.to(tl.int64) * IN + (offs_n * IN + offs_in)
    # [BLOCK_N, 1, BLOCK_V, 8]
    w_next = tl.load(w_tile, mask=offs_v < VECTORS, other=0.0, eviction_policy="evict_first")
    if EPILOGUE == "silu_mul":
        up_tile = w_tile + rows.to(tl.int64) * IN
        up_next = tl.load(up_tile, mask=offs_v < VECTORS, other=0.0, eviction_policy="evict_first")
        up_sum = tl.zeros([BLOCK_N, BLOCK_B, BLOCK_V], tl.float32)
    w_sum = tl.zeros([BLOCK_N, BLOCK_B, BLOCK_V], tl.float32)
    squares = tl.zeros([1, BLOCK_B, BLOCK_V], tl.float32)
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    for at in range(0, VECTORS, BLOCK_V):
        w = w_next
        mask_next = offs_v < VECTORS - BLOCK_V - at
        w_next = tl.load(w_tile + (at + BLOCK_V) * _VECTOR, mask=mask_next, other=0.0, eviction_policy="evict_first")
        if EPILOGUE == "silu_mul":
            up = up_next
            up_next = tl.load(up_tile + (at + BLOCK_V) * _VECTOR, mask=mask_next, other=0.0, eviction_policy="evict_first")
        mask_v = offs_v < VECTORS - at
        # [1, BLOCK_B, BLOCK_V, 8]
        x = tl.load(x_ptr + offs_b * IN + offs_in + at * _VECTOR, mask=mask_v & (offs_b < batch), other=0.0).to(tl.float32)
        if NORM:
            squares += tl.sum(x * x, axis=3)
            x *= tl.load(gain_ptr + offs_in + at * _VECTOR, mask=mask_v, other=0.0).to(tl.float32)
        w_sum += tl.sum(w.to(tl.float32) * x, axis=3)
        if EPILOGUE == "silu_mul":
            up_sum += tl.sum(up.to(tl.float32) * x, axis=3)
    # [BLOCK_N, BLOCK_B]
    total = tl.sum(w_sum, axis=2)
    if NORM:
        scale = tl.rsqrt(tl.sum(squares, axis=2) / IN + epsilon)
        total *= scale
    offs_row = (first + tl.arange(0, BLOCK_N))[:, None]
    offs_seq = tl.arange(0, BLOCK_B)[None, :]
    out_tile = out_ptr + offs_seq * rows + offs_row
    mask_out = (offs_row < rows) & (offs_seq < batch)
    if EPILOGUE == "silu_mul":
        up_total = tl.sum(up_sum, axis=2)
        if NORM:
            up_total *= scale
        total = total / (1 + tl.exp(-total)) * up_total
    elif EPILOGUE == "bias":
        total += tl.load(bias_ptr + offs_row, mask=offs_row < rows, other=0.0).to(tl.float32)
    elif EPILOGUE == "add":
        total += tl.load(out_tile, mask=mask_out, other=0.0).to(tl.float32)
    tl.store(out_tile, total.to(out_ptr.dtype.element_ty), mask=mask_out)


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
    two = epilogue == "silu_mul"
    block_b = triton.next_power_of_2(batch)
    block_n = (4 if two else 8) if block_b < 4 else (2 if two else 4)
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
        BLOCK_B=block_b,
        BLOCK_N=block_n,
        BLOCK_V=128,
        NORM=gain is not None,
        EPILOGUE=epilogue,
        PDL=pdl,
        num_warps=4,
        launch_pdl=pdl,
    )
