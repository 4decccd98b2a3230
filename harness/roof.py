"""The read roof: the fastest that this machine was seen to read memory, measured once per run.

A latency that needs more than this is no measurement, whatever the data sheet says.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import torch

GPU_BYTES = 4 << 30  # 2^30 elements: offsets fit in 32 bits
CPU_BYTES = 128 << 20
FREE_SHARE = 0.5
BLOCK = 1 << 16  # bytes; a whole number of any kernel's blocks
REPEATS = 10


def read_roof_tbps(device: str) -> float:
    """Bytes per second in units of 1e12, best of several streaming reductions of one buffer that no cache holds."""
    return _gpu_roof() if device == "cuda" else _cpu_roof()


def _gpu_roof() -> float:
    size = min(GPU_BYTES, int(FREE_SHARE * torch.cuda.mem_get_info()[0])) // BLOCK * BLOCK
    data = torch.ones(size // 4, dtype=torch.int32, device="cuda")
    best = 0.0
    for reduce in _reductions(data):
        reduce()
        for _ in range(REPEATS):
            start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            start.record()
            reduce()
            end.record()
            end.synchronize()
            best = max(best, data.nbytes / (start.elapsed_time(end) * 1e-3))
    del data
    torch.cuda.empty_cache()
    return best / 1e12


def _reductions(data: torch.Tensor) -> list[Callable[[], object]]:
    """Triton's streaming reduction at several shapes where Triton is installed, and torch's."""
    try:
        from harness.roof_kernel import reductions
    except ImportError:
        return [data.sum]
    return [data.sum, *reductions(data)]


def _cpu_roof() -> float:
    data = torch.ones(CPU_BYTES // 4, dtype=torch.float32)
    data.sum()
    best = 0.0
    for _ in range(REPEATS):
        start = time.perf_counter()
        data.sum()
        best = max(best, data.nbytes / max(time.perf_counter() - start, 1e-9))
    return best / 1e12
