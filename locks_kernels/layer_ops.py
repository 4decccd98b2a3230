"""What a transformer layer does around its attention when one token per sequence is decoded, in plain torch.

The reference for `layer_triton`, which has the same functions under the same signatures, and what runs on a CPU.  Every
function writes into buffers that the caller owns, so that a captured step keeps its addresses.  Weights are [out, in].
"""

from __future__ import annotations

import math

import torch

from locks_kernels import reference
from locks_kernels.cache import PagedCache, Sequences

NORM_EPSILON = 1e-5
ROPE_BASE = 500_000.0  # Llama 3; a preset with another base reads and computes the same amount


def norm_linear(
    x: torch.Tensor, gain: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, out: torch.Tensor
) -> None:
    """out [B, OUT] = rms_norm(x [B, IN]) * gain [IN] @ weight [OUT, IN]^T + bias [OUT]."""
    out.copy_(torch.nn.functional.linear(_rms_norm(x, gain), weight, bias))


def norm_gate_up(x: torch.Tensor, gain: torch.Tensor, weight: torch.Tensor, out: torch.Tensor) -> None:
    """out [B, M] = silu(gate) * up, both from rms_norm(x [B, IN]) * gain and weight [2 M, IN], the M gate rows first."""
    gate, up = torch.nn.functional.linear(_rms_norm(x, gain), weight).chunk(2, -1)
    out.copy_(torch.nn.functional.silu(gate.float()) * up.float())


def linear_add(x: torch.Tensor, weight: torch.Tensor, hidden: torch.Tensor) -> None:
    """hidden [B, OUT] += x [B, IN] @ weight [OUT, IN]^T, in place: a projection and the residual it ends in."""
    torch.addmm(hidden, x, weight.mT, out=hidden)


def rope_table(seq_lens: torch.Tensor, table: torch.Tensor) -> None:
    """table fp32 [B, D]: cosines, then sines, of the D/2 rotary angles at position seq_lens - 1 (int32 [B], on the device).

    Angles in double precision: at a million tokens a single-precision one is off by up to 0.06 rad.
    """
    half = table.shape[1] // 2
    channel = torch.arange(half, device=table.device, dtype=torch.float64)
    angle = (seq_lens - 1).double()[:, None] * torch.exp(channel * (-math.log(ROPE_BASE) / half))
    table.copy_(torch.cat((angle.cos(), angle.sin()), -1))


def rotate_and_place(
    qkv: torch.Tensor,
    table: torch.Tensor,
    query_gain: torch.Tensor | None,
    key_gain: torch.Tensor | None,
    queries: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    append: tuple[PagedCache, Sequences] | None,
) -> None:
    """Split qkv [B, (HQ + 2 H) D] into queries [B, HQ, D], keys and values [B, H, D], all contiguous.

    Queries and keys are RMS-normed per head where a gain [D] is given, then rotated by `table` (halves paired, as in
    Llama).  `append`: also write the new keys and values into this cache at position seq_lens - 1.
    """
    batch, query_heads, head_dim = queries.shape
    heads = qkv.view(batch, -1, head_dim)
    query, key, value = heads.split((query_heads, keys.shape[1], keys.shape[1]), 1)
    queries.copy_(_rotate(query if query_gain is None else _rms_norm(query, query_gain), table))
    keys.copy_(_rotate(key if key_gain is None else _rms_norm(key, key_gain), table))
    values.copy_(value)
    if append is not None:
        reference.append(*append, keys, values)


def _rms_norm(x: torch.Tensor, gain: torch.Tensor) -> torch.Tensor:
    wide = x.float()
    return (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + NORM_EPSILON) * gain.float()).to(x.dtype)


def _rotate(x: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
    cosine, sine = table[:, None].chunk(2, -1)
    low, high = x.float().chunk(2, -1)
    return torch.cat((low * cosine - high * sine, high * cosine + low * sine), -1)
