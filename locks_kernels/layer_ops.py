"""What a transformer layer does around its attention when one token per sequence is decoded, in plain torch.

The reference for `layer_triton`, which has the same functions under the same signatures, and what runs on a CPU.  Every
function writes into buffers that the caller owns, so that a captured step keeps its addresses.  Weights are [out, in].
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch

from locks_kernels import reference
from locks_kernels.cache import PagedCache, Sequences

NORM_EPSILON = 1e-5
ROPE_BASE = 500_000.0  # Llama 3; a preset with another base reads and computes the same amount


@dataclass(frozen=True)
class NewToken:
    """Where one layer's query, key and value of the token being decoded go.

    queries [B, HQ, D], keys and values [B, H, D]: contiguous.  append: write key and value also into this cache, at position
    seq_lens - 1 (nothing for a length of 0).
    """

    queries: torch.Tensor
    keys: torch.Tensor
    values: torch.Tensor
    append: tuple[PagedCache, Sequences] | None = None

    @cached_property
    def append_arguments(self) -> tuple[Any, ...]:
        """For kernels: cache keys and values, block table, lengths; strides of the table's row, and of the cache's page,
        head and token; page size.  Without `append` unused stand-ins."""
        if self.append is None:
            return (self.keys, self.values, self.keys, self.keys, 0, 0, 0, 0, 1)
        cache, sequences = self.append
        table = sequences.block_table
        strides = (table.stride(0), *cache.keys.stride()[:3])
        return (cache.keys, cache.values, table, sequences.seq_lens, *strides, cache.shape.page_size)


def norm_linear(x: torch.Tensor, gain: torch.Tensor, weight: torch.Tensor, out: torch.Tensor) -> None:
    """out [B, OUT] = rms_norm(x [B, IN]) * gain [IN] @ weight [OUT, IN]^T."""
    out.copy_(torch.nn.functional.linear(_rms_norm(x, gain), weight))


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


def norm_qkv(
    x: torch.Tensor,
    gain: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    table: torch.Tensor,
    head_gains: tuple[torch.Tensor, torch.Tensor] | None,
    token: NewToken,
) -> None:
    """From the residual x [B, IN] to the query, key and value of the new token, each in its place.

    RMS norm with `gain` [IN]; projection by weight [(HQ + 2 H) D, IN], query rows before key before value rows, and bias;
    RMS norm of each query and key head where `head_gains` (two of [D]) are given; rotation of queries and keys by `table`
    (fp32 [B, D], see `rope_table`; channels d and d + D/2 paired, as in Llama).
    """
    projected = torch.nn.functional.linear(_rms_norm(x, gain), weight, bias)
    rotate_and_place(projected, table, head_gains, token)


def rotate_and_place(
    projected: torch.Tensor, table: torch.Tensor, head_gains: tuple[torch.Tensor, torch.Tensor] | None, token: NewToken
) -> None:
    """The part of `norm_qkv` behind the projection; projected [B, (HQ + 2 H) D]."""
    batch, query_heads, head_dim = token.queries.shape
    kv_heads = token.keys.shape[1]
    query, key, value = projected.view(batch, -1, head_dim).split((query_heads, kv_heads, kv_heads), 1)
    if head_gains is not None:
        query, key = _rms_norm(query, head_gains[0]), _rms_norm(key, head_gains[1])
    token.queries.copy_(_rotate(query, table))
    token.keys.copy_(_rotate(key, table))
    token.values.copy_(value)
    if token.append is not None:
        reference.append(*token.append, token.keys, token.values)


def _rms_norm(x: torch.Tensor, gain: torch.Tensor) -> torch.Tensor:
    wide = x.float()
    return (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + NORM_EPSILON) * gain.float()).to(x.dtype)


def _rotate(x: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
    cosine, sine = table[:, None].chunk(2, -1)
    low, high = x.float().chunk(2, -1)
    return torch.cat((low * cosine - high * sine, high * cosine + low * sine), -1)
