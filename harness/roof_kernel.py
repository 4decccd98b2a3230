"""A streaming reduction in Triton: reads a buffer once, as fast as the memory gives it."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
import triton
import triton.language as tl

# Elements of a block, warps, programs per SM, stages.  Several, since a roof that is too low calls honest rows invalid.
SHAPES = ((8192, 8, 2, 4), (8192, 8, 8, 1), (4096, 8, 8, 2), (16384, 16, 4, 1), (2048, 4, 16, 2))


@triton.jit
def _reduce(x_ptr, out_ptr, blocks, BLOCK: tl.constexpr, STAGES: tl.constexpr):  # type: ignore[no-untyped-def]
    total = tl.zeros((BLOCK,), tl.int32)  # [BLOCK]
    offs = tl.arange(0, BLOCK)
    for block in tl.range(tl.program_id(0), blocks, tl.num_programs(0), num_stages=STAGES):
        total += tl.load(x_ptr + block * BLOCK + offs)
    tl.store(out_ptr + tl.program_id(0), tl.sum(total))


def reductions(data: torch.Tensor) -> list[Callable[[], object]]:
    """One launch per shape; data: int32 of any length on the current device, whose last partial block is left out."""
    sm_count = torch.cuda.get_device_properties(data.device).multi_processor_count
    launches: list[Callable[[], object]] = []
    for block, warps, per_sm, stages in SHAPES:
        programs = sm_count * per_sm
        out = torch.empty(programs, dtype=torch.int32, device=data.device)
        launch = partial(_reduce[(programs,)], data, out, data.numel() // block, BLOCK=block, STAGES=stages, num_warps=warps)
        launches.append(launch)
    return launches
