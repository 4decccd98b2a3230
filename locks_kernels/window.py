"""The table of a sliding window: sink pages and the latest ones.  Kernel, then its launcher."""

# The bodies of kernels are not Python to a type checker.
# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

import torch
import triton
import triton.language as tl

from locks_kernels.cache import Sequences
from locks_kernels.shapes import DecodeShape, SelectOptions


@triton.jit
def _window_kernel(seq_lens_ptr, tables_ptr, kept, PAGE: tl.constexpr, SINK: tl.constexpr, BLOCK_K: tl.constexpr):
    h = tl.program_id(0)
    b = tl.program_id(1).to(tl.int64)
    pages = tl.cdiv(tl.load(seq_lens_ptr + b), PAGE)
    offs_k = tl.arange(0, BLOCK_K)
    skipped = tl.maximum(pages - kept, 0)
    page = tl.where(offs_k < SINK, offs_k, offs_k + skipped)
    row_ptr = tables_ptr + (b * tl.num_programs(0) + h) * kept
    tl.store(row_ptr + offs_k, tl.where(page < pages, page, -1), mask=offs_k < kept)


def window(tables: torch.Tensor, sequences: Sequences, shape: DecodeShape, options: SelectOptions) -> None:
    """Fill int32 [B, H, K] with the pages that a window of the same budget keeps, ascending, -1 behind the last."""
    kept = tables.shape[2]
    _window_kernel[(shape.kv_heads, sequences.batch)](
        sequences.seq_lens,
        tables,
        kept,
        PAGE=shape.page_size,
        SINK=options.sink_pages,
        BLOCK_K=triton.next_power_of_2(kept),
        num_warps=4,
    )
