"""Scores of page_tokens, and the row of a new token, on a GPU: kernels, then their launchers.

The rows of BLOCK_P pages are one matrix; its product with the group's queries gives all logits of these pages at once, whose
log-sum-exps are the scores.  The block table is read one block ahead.

A product has at least 16 channels and 8 columns.  Where rows are narrow, PACK tokens lie side by side in one row of the matrix,
and the queries are a block diagonal: neither a load nor an exponential is spent on padding.
"""

# The bodies of kernels are not Python to a type checker.
# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

import torch
import triton
import triton.language as tl

from locks_kernels.attend import TRITON_DTYPE
from locks_kernels.build import append
from locks_kernels.cache import PagedCache, Sequences
from locks_kernels.page_tokens import PageTokens
from locks_kernels.shapes import DecodeShape

LOG2E = tl.constexpr(1.4426950408889634)
BLOCK_BYTES = 1 << 14  # of rows, STAGES of them in flight in each of about four programs of a multiprocessor
MAX_BLOCK_P = 32
LEAST_WIDTH, LEAST_COLUMNS = 16, 8  # of a matrix product
NARROW = 32  # channels of a row up to which two tokens share one
WARPS = 4
STAGES = 3
PROGRAMS = 2048  # four waves of four programs on each of 132 multiprocessors
MAX_BLOCKS = 16  # blocks per program, which share the preparation of the query


@triton.jit
def _score_kernel(
    query_ptr,
    row_ptr,
    axes_ptr,
    table_ptr,
    seq_lens_ptr,
    out_ptr,
    partial_ptr,
    stride_qb,
    stride_qh,
    stride_rp,
    stride_rh,
    stride_rt,
    stride_tb,
    stride_ob,
    stride_oh,
    kv_heads,
    softmax_scale,
    GROUP: tl.constexpr,
    GROUP_PAD: tl.constexpr,
    OPERAND: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    WIDTH: tl.constexpr,
    PACK: tl.constexpr,
    PROJECT: tl.constexpr,
    PAGE: tl.constexpr,
    RECENT: tl.constexpr,
    KEPT: tl.constexpr,
    BLOCK_P: tl.constexpr,
    BLOCKS: tl.constexpr,
    PARTIAL: tl.constexpr,
):
    h = tl.program_id(0).to(tl.int64)
    b = tl.program_id(2).to(tl.int64)
    pages = tl.cdiv(tl.load(seq_lens_ptr + b), PAGE)
    scored = pages - RECENT
    first = tl.program_id(1) * (BLOCK_P * BLOCKS)
    if (first >= scored) | (pages <= KEPT):
        return

    # what a row is multiplied with, [PACK * WIDTH, PACK * GROUP_PAD]: the queries once for each token of a row
    offs_d = tl.arange(0, HEAD_DIM)
    offs_w = tl.arange(0, PACK * WIDTH)
    offs_n = tl.arange(0, PACK * GROUP_PAD)
    mask_n = offs_n % GROUP_PAD < GROUP
    from_d = offs_d if PROJECT else offs_w % WIDTH
    q_ptr = query_ptr + b * stride_qb + (h * GROUP + offs_n % GROUP_PAD)[:, None] * stride_qh + from_d[None, :]
    weight = tl.load(q_ptr, mask=mask_n[:, None], other=0.0).to(OPERAND)
    if PROJECT:
        # Queries first: with the axes first this is a product of 64 rows, which a warpgroup takes, as the one in the loop.  Of
        # two such in a row ptxas 12.8 (Triton 3.6) gave the second an operand from a register that nothing had set.
        a_ptr = axes_ptr + h * (HEAD_DIM * WIDTH) + offs_d[:, None] * WIDTH + (offs_w % WIDTH)[None, :]
        weight = tl.dot(weight, tl.load(a_ptr).to(OPERAND)).to(OPERAND)
    weight = tl.trans(weight)
    if PACK > 1:
        weight = tl.where((offs_w // WIDTH)[:, None] == (offs_n // GROUP_PAD)[None, :], weight, 0.0).to(OPERAND)

    offs_g = tl.arange(0, GROUP_PAD)
    mask_g = offs_g < GROUP
    o_ptr = out_ptr + b * stride_ob + (h * GROUP + offs_g)[None, :] * stride_oh
    entry_ptr = table_ptr + b * stride_tb
    offs_p = first + tl.arange(0, BLOCK_P)
    ROWS: tl.constexpr = PAGE // PACK
    offs_r = tl.arange(0, BLOCK_P * ROWS)
    page_r = first + offs_r // ROWS
    page = tl.load(entry_ptr + page_r, mask=page_r < scored, other=0)
    top = tl.full((GROUP_PAD,), float("-inf"), tl.float32)
    total = tl.zeros((GROUP_PAD,), tl.float32)
    for _ in range(BLOCKS):
        # Rows behind the last page are those of page 0 and are not stored.
        at = page.to(tl.int64) * stride_rp + h * stride_rh + (offs_r % ROWS) * (PACK * stride_rt)  # [BLOCK_P * ROWS]
        page_r += BLOCK_P
        page = tl.load(entry_ptr + page_r, mask=page_r < scored, other=0)
        rows = tl.load(row_ptr + at[:, None] + offs_w[None, :])
        logits = tl.dot(rows.to(OPERAND), weight) * (softmax_scale * LOG2E)
        by_page = tl.reshape(logits, (BLOCK_P, PAGE, GROUP_PAD))
        largest = tl.max(by_page, 1)  # [BLOCK_P, GROUP_PAD]
        mass = largest + tl.log2(tl.sum(tl.exp2(by_page - largest[:, None, :]), 1))
        tl.store(o_ptr + offs_p[:, None], mass / LOG2E, mask=(offs_p < scored)[:, None] & mask_g[None, :])
        if PARTIAL:
            mass = tl.where((offs_p < scored)[:, None], mass, float("-inf"))
            new_top = tl.maximum(top, tl.max(mass, 0))
            total = total * tl.exp2(top - new_top) + tl.sum(tl.exp2(mass - new_top[None, :]), 0)
            top = new_top
        offs_p += BLOCK_P
    if PARTIAL:
        at = ((b * kv_heads + h) * GROUP + offs_g) * tl.num_programs(1) + tl.program_id(1)
        tl.store(partial_ptr + 2 * at, top, mask=mask_g)
        tl.store(partial_ptr + 2 * at + 1, total, mask=mask_g)


@triton.jit
def _append_kernel(
    key_ptr,
    value_ptr,
    row_ptr,
    axes_ptr,
    new_key_ptr,
    new_value_ptr,
    table_ptr,
    seq_lens_ptr,
    stride_kp,
    stride_kh,
    stride_kt,
    stride_rp,
    stride_rh,
    stride_rt,
    stride_nb,
    stride_nh,
    stride_vb,
    stride_vh,
    stride_tb,
    HEAD_DIM: tl.constexpr,
    WIDTH: tl.constexpr,
    PAGE: tl.constexpr,
):
    h = tl.program_id(0).to(tl.int64)
    b = tl.program_id(1).to(tl.int64)
    tokens = tl.load(seq_lens_ptr + b)
    if tokens <= 0:
        return
    slot = (tokens - 1) % PAGE
    page = tl.load(table_ptr + b * stride_tb + (tokens - 1) // PAGE).to(tl.int64)
    offs_d = tl.arange(0, HEAD_DIM)
    offs_w = tl.arange(0, WIDTH)
    at = page * stride_kp + h * stride_kh + slot * stride_kt + offs_d
    new_key = tl.load(new_key_ptr + b * stride_nb + h * stride_nh + offs_d).to(key_ptr.dtype.element_ty)
    new_value = tl.load(new_value_ptr + b * stride_vb + h * stride_vh + offs_d).to(value_ptr.dtype.element_ty)
    tl.store(key_ptr + at, new_key)
    tl.store(value_ptr + at, new_value)
    axes = tl.load(axes_ptr + h * (HEAD_DIM * WIDTH) + offs_d[:, None] * WIDTH + offs_w[None, :]).to(tl.float32)
    row = tl.sum(new_key.to(tl.float32)[:, None] * axes, 0)
    tl.store(row_ptr + page * stride_rp + h * stride_rh + slot * stride_rt + offs_w, row)


def blocks_of(shape: DecodeShape, sequences: Sequences, width: int) -> tuple[int, int, int]:
    """Pages of a block, programs of the scorer per sequence and KV head, and the blocks that each of them takes."""
    pages = BLOCK_BYTES // (shape.page_size * width * shape.element_bytes)
    block = max(1, min(MAX_BLOCK_P, pages))
    blocks = triton.cdiv(sequences.max_pages, block)
    per_program = max(1, min(MAX_BLOCKS, sequences.batch * shape.kv_heads * blocks // PROGRAMS))
    return block, triton.cdiv(blocks, per_program), per_program


def score(
    query: torch.Tensor,
    shape: DecodeShape,
    tokens: PageTokens,
    sequences: Sequences,
    recent_pages: int,
    kept_pages: int,
    out: torch.Tensor,
    partial: torch.Tensor | None = None,
) -> None:
    """`page_tokens.score` into `out`; arguments as those of page_vectors_score.score, `programs` those of blocks_of."""
    width = tokens.rows.shape[-1]
    block, programs, per_program = blocks_of(shape, sequences, width)
    pack = max(2 if width <= NARROW else 1, LEAST_WIDTH // width)
    assert pack == 1 or tokens.rows.stride(2) == width, "tokens that share a row lie side by side"
    _score_kernel[(shape.kv_heads, programs, sequences.batch)](
        query,
        tokens.rows,
        tokens.rows if tokens.axes is None else tokens.axes,
        sequences.block_table,
        sequences.seq_lens,
        out,
        out if partial is None else partial,
        *query.stride()[:2],
        *tokens.rows.stride()[:3],
        sequences.block_table.stride(0),
        *out.stride()[:2],
        shape.kv_heads,
        shape.softmax_scale,
        GROUP=shape.group,
        GROUP_PAD=max(LEAST_COLUMNS // pack, triton.next_power_of_2(shape.group)),
        OPERAND=tl.float32 if triton.knobs.runtime.interpret else TRITON_DTYPE[shape.dtype],  # it cannot multiply bfloat16
        HEAD_DIM=shape.head_dim,
        WIDTH=width,
        PACK=pack,
        PROJECT=tokens.axes is not None,
        PAGE=shape.page_size,
        RECENT=recent_pages,
        KEPT=kept_pages,
        BLOCK_P=block,
        BLOCKS=per_program,
        PARTIAL=partial is not None,
        num_warps=WARPS,
        num_stages=STAGES,
    )


def append_finalise(
    cache: PagedCache, tokens: PageTokens, sequences: Sequences, keys: torch.Tensor, values: torch.Tensor
) -> None:
    """Write the token at `seq_lens - 1` (keys, values: [B, H, D]) and its row."""
    if tokens.axes is None:
        append(cache, sequences, keys, values)
        return
    shape = cache.shape
    _append_kernel[(shape.kv_heads, sequences.batch)](
        cache.keys,
        cache.values,
        tokens.rows,
        tokens.axes,
        keys,
        values,
        sequences.block_table,
        sequences.seq_lens,
        *cache.keys.stride()[:3],
        *tokens.rows.stride()[:3],
        *keys.stride()[:2],
        *values.stride()[:2],
        sequences.block_table.stride(0),
        HEAD_DIM=shape.head_dim,
        WIDTH=tokens.rows.shape[-1],
        PAGE=shape.page_size,
        num_warps=4,
    )
