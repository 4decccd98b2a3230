"""Launches of projection.cu: a matrix times one vector, with the small work around it, on compute capability 9.0 and newer."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache

import torch

from locks_kernels.cuda.inputs import check_tensor
from locks_kernels.cuda.program import Kernel, unavailable
from locks_kernels.layer_ops import NORM_EPSILON, NewToken

EPILOGUES = {"none": 0, "bias": 1, "add": 2, "silu_mul": 3, "qkv": 4, "qkv_bias": 5}
TWO_ROWS = ("silu_mul", "qkv", "qkv_bias")  # of the matrix for one unit of the result
WARPS, MOST_ROWS = 8, 256  # of a block, as in projection.cu
LONGEST_PIECE = 2048  # columns of a warp, where the warps of a block are enough
CHUNK_BYTES = 4096  # of one copy, at most
RING_BYTES = 65536  # of a block: some kernels ahead share an SM, each with its first ring on the way


def unsupported(width: int, device: torch.device) -> str | None:
    """Why vectors of `width` channels cannot be multiplied on `device`; None if they can."""
    if reason := unavailable(device, (9, 0), "bulk copies"):
        return reason
    if width % (8 * WARPS):
        return f"{width} channels do not divide into {WARPS} runs of 16-byte loads"
    return None


def macros(width: int, epilogue: str, norm: bool, dtype: torch.dtype, head_dim: int = 2) -> dict[str, object]:
    """Compile-time parameters; `head_dim` matters to queries, keys and values only."""
    split = next(split for split in (1, 2, 4, 8) if width <= split * LONGEST_PIECE or split == WARPS)
    loads = width // split // 8
    chunks = -(-loads * 16 // CHUNK_BYTES)
    return {
        "IN": width,
        "SPLIT": split,
        "CHUNK": -(-loads // (chunks * 32)) * 32,
        "EPILOGUE": EPILOGUES[epilogue],
        "NORM": int(norm),
        "EPSILON": f"{NORM_EPSILON!r}f",
        "RING_BYTES": RING_BYTES,
        "FP16": int(dtype == torch.float16),
        "D": head_dim,
    }


@cache
def _kernel(name: str, defined: tuple[tuple[str, object], ...], device: torch.device) -> Kernel:
    return Kernel("projection", name, dict(defined), device, 32 * WARPS, RING_BYTES)


def _launch_shape(units: int, rows_of_unit: int, device: torch.device) -> tuple[int, int]:
    """Blocks, and units of each: as equal as can be, in whole waves of the device."""
    sm_count = torch.cuda.get_device_properties(device).multi_processor_count
    waves = -(-units * rows_of_unit // (sm_count * MOST_ROWS))
    each = -(-units // (sm_count * waves))
    return -(-units // each), each


def _run(name: str, defined: Mapping[str, object], units: int, rows_of_unit: int, tensors: tuple, rest: tuple) -> None:
    x, gain, weight, *_ = tensors
    device = x.device
    for what, tensor in (("x", x), ("gain", gain), ("weight", weight)):
        check_tensor(what, tensor, tuple(tensor.shape), x.dtype, device)
    blocks, each = _launch_shape(units, rows_of_unit, device)
    _kernel(name, tuple(sorted(defined.items())), device).launch((blocks, 1, 1), (*tensors, units, each, *rest))


def gemv(
    x: torch.Tensor,
    weight: torch.Tensor,
    out: torch.Tensor,
    gain: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    epilogue: str = "none",
) -> None:
    """out [1, OUT] from x [1, IN] and weight [rows, IN]; contiguous, of one 16-bit type; arguments as of `gemv.gemv`."""
    defined = macros(x.shape[1], epilogue, gain is not None, x.dtype)
    tensors = (x, x if gain is None else gain, weight, x if bias is None else bias, out)
    _run("gemv", defined, out.shape[1], 1 + (epilogue in TWO_ROWS), tensors, ())


def qkv(
    x: torch.Tensor,
    gain: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    table: torch.Tensor,
    token: NewToken,
) -> None:
    """`layer_ops.norm_qkv` without norms per head, for one sequence."""
    _, query_heads, head_dim = token.queries.shape
    defined = macros(x.shape[1], "qkv" if bias is None else "qkv_bias", True, x.dtype, head_dim)
    cache_keys, cache_values, block_table, seq_lens, _, *strides, page_size = token.append_arguments
    tensors = (
        x,
        gain,
        weight,
        x if bias is None else bias,
        table,
        token.queries,
        token.keys,
        token.values,
        cache_keys,
        cache_values,
        block_table,
        seq_lens,
    )
    heads = (query_heads, token.keys.shape[1], int(token.append is not None), page_size)
    _run("qkv", defined, len(weight) // 2, 2, tensors, (*heads, *((stride,) for stride in strides)))
