"""Run by test_cuda_sanitizer.py under compute-sanitizer: every CUDA kernel on small shapes, ragged and odd ones; or, with a
folder and a name as arguments, racy.cu in there with a kernel of that name.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

import torch
from kernel_cases import DEVICE, make, make_query, randn

from locks_kernels.cuda import program, projection
from locks_kernels.cuda.stages import CudaStages
from locks_kernels.shapes import DecodeShape, SelectOptions

SHAPES = [
    DecodeShape(8, 2),
    DecodeShape(8, 1, dtype="float16"),
    DecodeShape(9, 3, 64, 32, 2),
    DecodeShape(16, 1, 256, 16, 4),
    DecodeShape(5, 1, 128, 64, 8),
]


def main() -> None:
    for shape in SHAPES:
        page = shape.page_size
        cache, sequences = make(shape, (0, 1, page, 3 * page, 40 * page - 1, 200 * page))
        stages = CudaStages(cache, sequences, SelectOptions(8 * page, dense_tokens=10 * page))
        query, heads = make_query(shape, sequences.batch), shape.kv_heads
        token = randn(sequences.batch, heads, shape.head_dim).to(query.dtype)
        stages.build(sequences.block_table[5, :200])
        stages.finalise_slots(torch.arange(-3, 5 * page, device=DEVICE))
        for _ in range(2):
            stages.append_finalise(token, token)
            stages.score(query)
            stages.select()
            stages.attend(query, torch.empty_like(query))
        if stages.append_score:
            stages.append_score(query, token, token, starts_early=True)
    if torch.cuda.get_device_capability(DEVICE) >= (9, 0):
        for shape in (DecodeShape(8, 2), DecodeShape(9, 3, 64, 16, 2)):
            for tokens in ((0, 1, 16 * 40), (16 * 640 - 1,)):  # within the budget, and two groups of pages for a warp
                one_launch(shape, tokens)
    for width, rows in ((576, 131), (4096, 300)):
        x = randn(1, width).bfloat16()
        projection.gemv(x, randn(rows, width).bfloat16(), x.new_empty(1, rows), x[0])
    torch.cuda.synchronize()


def one_launch(shape: DecodeShape, tokens: tuple[int, ...]) -> None:
    cache, sequences = make(shape, tokens)
    stages = CudaStages(cache, sequences, SelectOptions(2048))  # two tiles a warp
    assert stages.whole_step is not None
    query = make_query(shape, sequences.batch)
    token = randn(sequences.batch, shape.kv_heads, shape.head_dim).to(query.dtype)
    for starts_early in (False, True):
        stages.whole_step(query, token, token, torch.empty_like(query), starts_early)


def racy(folder: Path, name: str) -> None:
    program.SOURCES, os.environ["LOCKS_KERNEL_CACHE"] = folder, str(folder)
    kernel = program.Kernel("racy", name, {"NAME": name}, torch.device(DEVICE), 64)
    kernel.launch((1, 1, 1), (torch.zeros(64, dtype=torch.int32, device=DEVICE),))
    torch.cuda.synchronize()


if __name__ == "__main__":
    racy(Path(sys.argv[1]), sys.argv[2]) if len(sys.argv) > 1 else main()
