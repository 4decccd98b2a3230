"""The functions of `layer_ops` in few launches: Triton for small batches, torch's matrix products above `MAX_BATCH`."""

from __future__ import annotations

from functools import cache

import torch

from locks_kernels import elementwise
from locks_kernels.cache import PagedCache, Sequences
from locks_kernels.gemv import MAX_BATCH, gemv


@cache
def early_launch(device: torch.device) -> bool:
    """Whether the device knows programmatic dependent launch (compute capability 9.0 and newer)."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= (9, 0)


def norm_linear(
    x: torch.Tensor, gain: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, out: torch.Tensor
) -> None:
    """See `layer_ops.norm_linear`; one launch up to batch 4, two above."""
    pdl = early_launch(x.device)
    if len(x) <= MAX_BATCH:
        gemv(x, weight, out, gain, bias, "none" if bias is None else "bias", pdl)
        return
    normed = torch.empty_like(x)
    elementwise.rms_norm(x, gain, normed, pdl)
    if bias is None:
        torch.mm(normed, weight.mT, out=out)
    else:
        torch.addmm(bias, normed, weight.mT, out=out)


def norm_gate_up(x: torch.Tensor, gain: torch.Tensor, weight: torch.Tensor, out: torch.Tensor) -> None:
    """See `layer_ops.norm_gate_up`; one launch up to batch 4, three above."""
    pdl = early_launch(x.device)
    if len(x) <= MAX_BATCH:
        gemv(x, weight, out, gain, epilogue="silu_mul", pdl=pdl)
        return
    normed = torch.empty_like(x)
    elementwise.rms_norm(x, gain, normed, pdl)
    elementwise.silu_mul(torch.mm(normed, weight.mT), out, pdl)


def linear_add(x: torch.Tensor, weight: torch.Tensor, hidden: torch.Tensor) -> None:
    """See `layer_ops.linear_add`; one launch."""
    if len(x) <= MAX_BATCH:
        gemv(x, weight, hidden, epilogue="add", pdl=early_launch(x.device))
    else:
        torch.addmm(hidden, x, weight.mT, out=hidden)


def rope_table(seq_lens: torch.Tensor, table: torch.Tensor) -> None:
    """See `layer_ops.rope_table`."""
    elementwise.rope_table(seq_lens, table, early_launch(table.device))


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
    """See `layer_ops.rotate_and_place`."""
    pdl = early_launch(qkv.device)
    elementwise.rotate_and_place(qkv, table, query_gain, key_gain, queries, keys, values, append, pdl)
