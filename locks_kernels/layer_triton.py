"""The functions of `layer_ops` in few launches: Triton for small batches, torch's matrix products above `GEMV_BATCH`."""

from __future__ import annotations

from functools import cache

import torch

from locks_kernels import elementwise
from locks_kernels.gemv import gemv, qkv
from locks_kernels.layer_ops import NewToken

# Llama-3.1-8B's projections and MLP on an H200: 4.1 ms a token at batch 1, 7.3 and 8.2 ms at batch 2 and 4 (with 8 rows a
# program), where cuBLAS takes 4.4 ms at batch 16.  The kernels themselves take up to 4.
GEMV_BATCH = 1


@cache
def early_launch(device: torch.device) -> bool:
    """Whether the device knows programmatic dependent launch (compute capability 9.0 and newer)."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= (9, 0)


def norm_linear(x: torch.Tensor, gain: torch.Tensor, weight: torch.Tensor, out: torch.Tensor) -> None:
    """See `layer_ops.norm_linear`; one launch up to GEMV_BATCH, two above."""
    if len(x) <= GEMV_BATCH:
        gemv(x, weight, out, gain, pdl=early_launch(x.device))
    else:
        torch.mm(_normed(x, gain), weight.mT, out=out)


def norm_gate_up(x: torch.Tensor, gain: torch.Tensor, weight: torch.Tensor, out: torch.Tensor) -> None:
    """See `layer_ops.norm_gate_up`; one launch up to GEMV_BATCH, three above."""
    pdl = early_launch(x.device)
    if len(x) <= GEMV_BATCH:
        gemv(x, weight, out, gain, epilogue="silu_mul", pdl=pdl)
    else:
        elementwise.silu_mul(torch.mm(_normed(x, gain), weight.mT), out, pdl)


def linear_add(x: torch.Tensor, weight: torch.Tensor, hidden: torch.Tensor) -> None:
    """See `layer_ops.linear_add`; one launch."""
    if len(x) <= GEMV_BATCH:
        gemv(x, weight, hidden, epilogue="add", pdl=early_launch(x.device))
    else:
        torch.addmm(hidden, x, weight.mT, out=hidden)


def rope_table(seq_lens: torch.Tensor, table: torch.Tensor) -> None:
    """See `layer_ops.rope_table`; one launch."""
    elementwise.rope_table(seq_lens, table, early_launch(table.device))


def norm_qkv(
    x: torch.Tensor,
    gain: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    table: torch.Tensor,
    head_gains: tuple[torch.Tensor, torch.Tensor] | None,
    token: NewToken,
) -> None:
    """See `layer_ops.norm_qkv`; one launch up to GEMV_BATCH, two with norms per head (they need whole heads), three above."""
    pdl = early_launch(x.device)
    if len(x) <= GEMV_BATCH and head_gains is None:
        qkv(x, gain, weight, bias, table, token, pdl)
        return
    projected = x.new_empty(len(x), len(weight))
    if len(x) <= GEMV_BATCH:
        gemv(x, weight, projected, gain, bias, "none" if bias is None else "bias", pdl)
    elif bias is None:
        torch.mm(_normed(x, gain), weight.mT, out=projected)
    else:
        torch.addmm(bias, _normed(x, gain), weight.mT, out=projected)
    elementwise.rotate_and_place(projected, table, head_gains, token, pdl)


def _normed(x: torch.Tensor, gain: torch.Tensor) -> torch.Tensor:
    normed = torch.empty_like(x)
    elementwise.rms_norm(x, gain, normed, early_launch(x.device))
    return normed
