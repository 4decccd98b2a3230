"""The functions of `layer_ops` in few launches: CUDA C++ (cuda/projection.cu) or Triton for one sequence, torch's matrix
products above `GEMV_BATCH`.
"""

from __future__ import annotations

from functools import cache

import torch

from locks_kernels import elementwise, gemv
from locks_kernels.cuda import projection
from locks_kernels.layer_ops import NewToken

# Llama-3.1-8B's projections and MLP on an H200: 4.1 ms a token at batch 1, 7.3 and 8.2 ms at batch 2 and 4 (with 8 rows a
# program), where cuBLAS takes 4.4 ms at batch 16.  The kernels themselves take up to 4.
GEMV_BATCH = 1


@cache
def early_launch(device: torch.device) -> bool:
    """Whether the device knows programmatic dependent launch (compute capability 9.0 and newer)."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= (9, 0)


def _in_cuda(x: torch.Tensor) -> bool:
    """Whether the CUDA kernels take x [B, IN]; the portable ones take the rest."""
    return len(x) == 1 and projection.unsupported(x.shape[1], x.device) is None


def _gemv(
    x: torch.Tensor,
    weight: torch.Tensor,
    out: torch.Tensor,
    gain: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    epilogue: str = "none",
) -> None:
    if _in_cuda(x):
        projection.gemv(x, weight, out, gain, bias, epilogue)
    else:
        gemv.gemv(x, weight, out, gain, bias, epilogue, early_launch(x.device))


def norm_linear(x: torch.Tensor, gain: torch.Tensor, weight: torch.Tensor, out: torch.Tensor) -> None:
    """See `layer_ops.norm_linear`; one launch up to GEMV_BATCH, two above."""
    if len(x) <= GEMV_BATCH:
        _gemv(x, weight, out, gain)
    else:
        torch.mm(_normed(x, gain), weight.mT, out=out)


def norm_gate_up(x: torch.Tensor, gain: torch.Tensor, weight: torch.Tensor, out: torch.Tensor) -> None:
    """See `layer_ops.norm_gate_up`; one launch up to GEMV_BATCH, three above."""
    if len(x) <= GEMV_BATCH:
        _gemv(x, weight, out, gain, epilogue="silu_mul")
    else:
        elementwise.silu_mul(torch.mm(_normed(x, gain), weight.mT), out, early_launch(x.device))


def linear_add(x: torch.Tensor, weight: torch.Tensor, hidden: torch.Tensor) -> None:
    """See `layer_ops.linear_add`; one launch."""
    if len(x) <= GEMV_BATCH:
        _gemv(x, weight, hidden, epilogue="add")
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
        if _in_cuda(x):
            projection.qkv(x, gain, weight, bias, table, token)
        else:
            gemv.qkv(x, gain, weight, bias, table, token, pdl)
        return
    projected = x.new_empty(len(x), len(weight))
    if len(x) <= GEMV_BATCH:
        _gemv(x, weight, projected, gain, bias, "none" if bias is None else "bias")
    elif bias is None:
        torch.mm(_normed(x, gain), weight.mT, out=projected)
    else:
        torch.addmm(bias, _normed(x, gain), weight.mT, out=projected)
    elementwise.rotate_and_place(projected, table, head_gains, token, pdl)


def _normed(x: torch.Tensor, gain: torch.Tensor) -> torch.Tensor:
    normed = torch.empty_like(x)
    elementwise.rms_norm(x, gain, normed, early_launch(x.device))
    return normed
