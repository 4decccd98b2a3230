"""Scores of page_vectors on a GPU: kernels, then their launchers.

One matrix product per vector, pages x channels by channels x query heads, over BLOCK_P pages at a time whose vectors arrive as
whole rows; the block table is read one block ahead.
"""

# The bodies of kernels are not Python to a type checker.
# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

import torch
import triton
import triton.language as tl

from locks_kernels.attend import TRITON_DTYPE
from locks_kernels.cache import Sequences
from locks_kernels.page_vectors import FORMS, STD_WEIGHT, PageVectors
from locks_kernels.shapes import DecodeShape

CUBOID_MEAN = tl.constexpr(FORMS.index("cuboid-mean"))
MEAN_STD = tl.constexpr(FORMS.index("mean-std"))
MEAN_SPREAD = tl.constexpr(FORMS.index("mean-spread"))
WEIGHT = tl.constexpr(STD_WEIGHT)
LOG2E = tl.constexpr(1.4426950408889634)
BLOCK_P = 64
WARPS = 4
STAGES = 3
PROGRAMS = 2048  # four waves of four programs on each of 132 multiprocessors
MAX_BLOCKS = 8  # blocks per program, which share the preparation of the query


@triton.jit
def _score_kernel(
    query_ptr,
    vector_ptr,
    spread_ptr,
    table_ptr,
    seq_lens_ptr,
    out_ptr,
    partial_ptr,
    stride_qb,
    stride_qh,
    stride_tb,
    stride_ob,
    stride_oh,
    kv_heads,
    softmax_scale,
    FORM: tl.constexpr,
    GROUP: tl.constexpr,
    GROUP_PAD: tl.constexpr,
    OPERAND: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    PAGE: tl.constexpr,
    RECENT: tl.constexpr,
    KEPT: tl.constexpr,
    BLOCK_P: tl.constexpr,
    BLOCKS: tl.constexpr,
    PARTIAL: tl.constexpr,
):
    h = tl.program_id(0)
    b = tl.program_id(2).to(tl.int64)
    pages = tl.cdiv(tl.load(seq_lens_ptr + b), PAGE)
    scored = pages - RECENT
    first = tl.program_id(1) * (BLOCK_P * BLOCKS)
    if (first >= scored) | (pages <= KEPT):
        return

    # what a page's vectors are multiplied with, [HEAD_DIM, GROUP_PAD]
    VECTORS: tl.constexpr = 2 if FORM <= MEAN_STD else 1
    offs_d = tl.arange(0, HEAD_DIM)
    offs_g = tl.arange(0, GROUP_PAD)
    mask_g = offs_g < GROUP
    q_ptr = query_ptr + b * stride_qb + (h * GROUP + offs_g)[None, :] * stride_qh + offs_d[:, None]
    query = tl.load(q_ptr, mask=mask_g[None, :], other=0.0).to(OPERAND)
    wide = query.to(tl.float32)
    if FORM <= CUBOID_MEAN:
        first_weight = tl.minimum(wide, 0.0).to(OPERAND)
        second_weight = tl.maximum(wide, 0.0).to(OPERAND)
    else:
        first_weight = query
        second_weight = (tl.abs(wide) * WEIGHT).to(OPERAND)
    length_g = tl.sqrt(tl.sum(wide * wide, 0)) * WEIGHT

    o_ptr = out_ptr + b * stride_ob + (h * GROUP + offs_g)[None, :] * stride_oh
    entry_ptr = table_ptr + b * stride_tb
    offs_p = first + tl.arange(0, BLOCK_P)
    page = tl.load(entry_ptr + offs_p, mask=offs_p < scored, other=0)
    top = tl.full((GROUP_PAD,), float("-inf"), tl.float32)
    total = tl.zeros((GROUP_PAD,), tl.float32)
    for _ in range(BLOCKS):
        # Rows behind the last page read the summary of page 0 and are not stored.
        at = page.to(tl.int64) * kv_heads + h  # [BLOCK_P]
        page = tl.load(entry_ptr + offs_p + BLOCK_P, mask=offs_p + BLOCK_P < scored, other=0)
        row_ptr = vector_ptr + at[:, None] * (VECTORS * HEAD_DIM) + offs_d[None, :]
        acc = tl.dot(tl.load(row_ptr).to(OPERAND), first_weight)
        if VECTORS == 2:
            acc = tl.dot(tl.load(row_ptr + HEAD_DIM).to(OPERAND), second_weight, acc=acc)
        if FORM == MEAN_SPREAD:
            acc += tl.load(spread_ptr + at).to(tl.float32)[:, None] * length_g[None, :]
        acc = acc * softmax_scale
        tl.store(o_ptr + offs_p[:, None], acc, mask=(offs_p < scored)[:, None] & mask_g[None, :])
        if PARTIAL:
            logits = tl.where((offs_p < scored)[:, None], acc * LOG2E, float("-inf"))
            new_top = tl.maximum(top, tl.max(logits, 0))
            total = total * tl.exp2(top - new_top) + tl.sum(tl.exp2(logits - new_top[None, :]), 0)
            top = new_top
        offs_p += BLOCK_P
    if PARTIAL:
        at = ((b * kv_heads + h) * GROUP + offs_g) * tl.num_programs(1) + tl.program_id(1)
        tl.store(partial_ptr + 2 * at, top, mask=mask_g)
        tl.store(partial_ptr + 2 * at + 1, total, mask=mask_g)


@triton.jit
def _share_out_kernel(
    partial_ptr,
    seq_lens_ptr,
    out_ptr,
    programs,
    parts,
    PAGE: tl.constexpr,
    RECENT: tl.constexpr,
    SPAN: tl.constexpr,
    PROGRAMS_PAD: tl.constexpr,
    PARTS_PAD: tl.constexpr,
):
    """The log-sum-exp of a query head's row, from the scorer's programs (SPAN pages each), into every part of `out`."""
    row = tl.program_id(1).to(tl.int64) * tl.num_programs(0) + tl.program_id(0)
    scored = tl.cdiv(tl.load(seq_lens_ptr + tl.program_id(1)), PAGE) - RECENT
    offs = tl.arange(0, PROGRAMS_PAD)
    live = offs < tl.cdiv(scored, SPAN)
    tops = tl.load(partial_ptr + 2 * (row * programs + offs), mask=live, other=float("-inf"))
    sums = tl.load(partial_ptr + 2 * (row * programs + offs) + 1, mask=live, other=0.0)
    top = tl.max(tops, 0)
    total = tl.sum(tl.where(live, sums * tl.exp2(tops - top), 0.0), 0)
    offs = tl.arange(0, PARTS_PAD)
    where = out_ptr + 4 * (row * parts + offs)
    tl.store(where, tl.zeros((PARTS_PAD,), tl.float32) + top, mask=offs < parts)
    tl.store(where + 1, tl.zeros((PARTS_PAD,), tl.float32) + total, mask=offs < parts)
    tl.store(where + 2, tl.full((PARTS_PAD,), float("-inf"), tl.float32), mask=offs < parts)


def programs_of(shape: DecodeShape, sequences: Sequences) -> tuple[int, int]:
    """Programs of the scorer per sequence and KV head, and the blocks of BLOCK_P pages that each takes."""
    blocks = triton.cdiv(sequences.max_pages, BLOCK_P)
    per_program = max(1, min(MAX_BLOCKS, sequences.batch * shape.kv_heads * blocks // PROGRAMS))
    return triton.cdiv(blocks, per_program), per_program


def score(
    query: torch.Tensor,
    shape: DecodeShape,
    summaries: PageVectors,
    sequences: Sequences,
    recent_pages: int,
    kept_pages: int,
    out: torch.Tensor,
    partial: torch.Tensor | None = None,
) -> None:
    """`page_vectors.score` into `out` (fp32 [B, HQ, >= P], last axis contiguous); other pages are left as they are in it.

    A sequence of at most `kept_pages` pages is not scored: selection keeps every page of it.
    partial: fp32 [B, HQ, programs, 2] (programs_of), gets the largest score and the sum of each program in powers of two.
    """
    programs, per_program = programs_of(shape, sequences)
    _score_kernel[(shape.kv_heads, programs, sequences.batch)](
        query,
        summaries.vectors,
        summaries.spread,
        sequences.block_table,
        sequences.seq_lens,
        out,
        out if partial is None else partial,
        *query.stride()[:2],
        sequences.block_table.stride(0),
        *out.stride()[:2],
        shape.kv_heads,
        shape.softmax_scale,
        FORM=FORMS.index(summaries.form),
        GROUP=shape.group,
        GROUP_PAD=max(8, triton.next_power_of_2(shape.group)),
        OPERAND=tl.float32 if triton.knobs.runtime.interpret else TRITON_DTYPE[shape.dtype],  # it cannot multiply bfloat16
        HEAD_DIM=shape.head_dim,
        PAGE=shape.page_size,
        RECENT=recent_pages,
        KEPT=kept_pages,
        BLOCK_P=BLOCK_P,
        BLOCKS=per_program,
        PARTIAL=partial is not None,
        num_warps=WARPS,
        num_stages=STAGES,
    )


def share_out(
    partial: torch.Tensor, shape: DecodeShape, sequences: Sequences, recent_pages: int, parts: torch.Tensor, span: int
) -> None:
    """Give the CUDA selection its `parts` [B, HQ, n, 4]: every part gets the whole row's log-sum-exp, and says nothing of the
    least score.  `partial` comes from a scorer whose programs take `span` pages each.

    The selection adds up those of a sequence, the same number for all its heads, which scales all shares alike and changes
    no order.
    """
    programs = partial.shape[2]
    _share_out_kernel[(shape.query_heads, sequences.batch)](
        partial,
        sequences.seq_lens,
        parts,
        programs,
        parts.shape[2],
        PAGE=shape.page_size,
        RECENT=recent_pages,
        SPAN=span,
        PROGRAMS_PAD=triton.next_power_of_2(programs),
        PARTS_PAD=triton.next_power_of_2(parts.shape[2]),
        num_warps=4,
    )
