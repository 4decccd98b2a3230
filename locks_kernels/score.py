"""Page scores from packed summaries: kernel, then its launcher.

A block of BLOCK_P pages of one KV head is scored at once.  Every rank is one int8 matrix product, pages x channels by
channels x query heads, so a page stays in one row of registers and no later step reduces across lanes.  The nibbles cost
one instruction for four: the odd channel is the int8 16 * v as it lies there, the even one becomes v + 8.  The query is
split into a high and a low byte (columns 2g and 2g + 1), which makes it exact to 16 bits.
"""

# The bodies of kernels are not Python to a type checker.
# mypy: disable-error-code="no-untyped-def, assignment, misc"

from __future__ import annotations

import torch
import triton
import triton.language as tl

from locks_kernels.cache import PagedCache, Sequences
from locks_kernels.summary import RecordLayout

LOG2E = tl.constexpr(1.4426950408889634)
LN2 = tl.constexpr(0.6931471805599453)
QUERY_BOUND = tl.constexpr(32512.0)  # 127 * 256: the high byte stays inside int8 after rounding
WARPS = 4
BLOCK_P = 16 * WARPS  # one row of 16 pages per warp; more would make the loads of single words take a detour
PROGRAMS = 2048  # enough for four waves of four programs on each of 132 multiprocessors
STAGES = 2  # double-buffered records leave room for four programs per multiprocessor, which hide each other's latency
MAX_BLOCKS = 8  # blocks per program, which share the preparation of the query


@triton.jit
def _query_bytes(query_ptr, mask_n, scale_n, GROUP_PAD: tl.constexpr):
    """int8 [channels, 2 * GROUP_PAD]: byte n % 2 (0 high, 1 low) of query head n // 2, rounded to 16 bits."""
    part = tl.arange(0, 2 * GROUP_PAD) % 2
    q = tl.load(query_ptr, mask=mask_n, other=0.0).to(tl.float32)
    fixed = tl.floor(q * scale_n[None, :] + 0.5).to(tl.int32)
    high = (fixed + 128) >> 8
    return tl.where(part[None, :] == 0, high, fixed - high * 256).to(tl.int8)


@triton.jit
def _join_bytes(acc, BLOCK_P: tl.constexpr, GROUP_PAD: tl.constexpr):
    """fp32 [BLOCK_P, GROUP_PAD] from the int32 products with the high and the low bytes."""
    high, low = tl.split(tl.reshape(acc, (BLOCK_P, GROUP_PAD, 2)))
    return high.to(tl.float32) * 256.0 + low.to(tl.float32)


@triton.jit
def _bf16_lane(word, LANE: tl.constexpr):
    """fp32 value of the bf16 number LANE (0 to 3) of an int64 word."""
    half = (word >> (32 * (LANE // 2))).to(tl.int32)
    bits = (half & -65536) if LANE % 2 else (half << 16)
    return bits.to(tl.float32, bitcast=True)


@triton.jit
def _int8_lane(word, LANE: tl.constexpr):
    """fp32 value of the signed byte LANE (0 to 7) of an int64 word."""
    half = (word >> (32 * (LANE // 4))).to(tl.int32)
    return ((half << (24 - 8 * (LANE % 4))) >> 24).to(tl.float32)


@triton.jit
def _score_kernel(
    query_ptr,
    summary_ptr,
    table_ptr,
    seq_lens_ptr,
    out_ptr,
    stride_qb,
    stride_qh,
    stride_sp,
    stride_sh,
    stride_tb,
    stride_ob,
    stride_oh,
    softmax_scale,
    GROUP: tl.constexpr,
    GROUP_PAD: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    PAGE: tl.constexpr,
    RANK: tl.constexpr,
    RECENT: tl.constexpr,
    KEPT: tl.constexpr,
    AT_COEFFICIENTS: tl.constexpr,
    AT_CENTROID: tl.constexpr,
    AT_COEFFICIENT_SCALE: tl.constexpr,
    AT_BASIS_SCALE: tl.constexpr,
    AT_CENTROID_SCALE: tl.constexpr,
    BLOCK_P: tl.constexpr,
    BLOCKS: tl.constexpr,
):
    h = tl.program_id(0)
    b = tl.program_id(2).to(tl.int64)
    pages = tl.cdiv(tl.load(seq_lens_ptr + b), PAGE)
    scored = pages - RECENT
    first = tl.program_id(1) * (BLOCK_P * BLOCKS)
    if (first >= scored) | (pages <= KEPT):
        return

    # query bytes [channels, 2 * GROUP_PAD]: each head is in two columns
    HALF: tl.constexpr = HEAD_DIM // 2
    offs_n = tl.arange(0, 2 * GROUP_PAD) // 2
    mask_n = (offs_n < GROUP)[None, :]
    q_ptr = query_ptr + b * stride_qb + (h * GROUP + offs_n)[None, :] * stride_qh
    offs_d = tl.arange(0, HEAD_DIM)
    offs_half = tl.arange(0, HALF)
    largest = tl.max(tl.abs(tl.load(q_ptr + offs_d[:, None], mask=mask_n, other=0.0).to(tl.float32)), 0)
    scale_n = QUERY_BOUND / tl.maximum(largest, 1e-30)
    query = _query_bytes(q_ptr + offs_d[:, None], mask_n, scale_n, GROUP_PAD)
    query_even = _query_bytes(q_ptr + 2 * offs_half[:, None], mask_n, scale_n, GROUP_PAD)
    query_odd = _query_bytes(q_ptr + 2 * offs_half[:, None] + 1, mask_n, scale_n, GROUP_PAD)
    excess_n = 128 * tl.sum(query_even.to(tl.int32), 0)[None, :]  # 16 times what v + 8 adds to a product
    largest_g, _ = tl.split(tl.reshape(largest, (GROUP_PAD, 2)))
    unit_g = (largest_g * (softmax_scale * LOG2E / QUERY_BOUND))[None, :]  # logits are in units of log 2

    offs_g = tl.arange(0, GROUP_PAD)
    o_ptr = out_ptr + b * stride_ob + (h * GROUP + offs_g)[None, :] * stride_oh
    entry_ptr = table_ptr + b * stride_tb
    offs_p = first + tl.arange(0, BLOCK_P)
    page = tl.load(entry_ptr + offs_p, mask=offs_p < scored, other=0)
    for _ in range(BLOCKS):
        # Rows behind the last page read the record of page 0 and are not stored.
        record_ptr = summary_ptr + page.to(tl.int64) * stride_sp + h * stride_sh  # [BLOCK_P]
        word_ptr = record_ptr.to(tl.pointer_type(tl.int64))
        page = tl.load(entry_ptr + offs_p + BLOCK_P, mask=offs_p + BLOCK_P < scored, other=0)

        centroid = tl.load(record_ptr[:, None] + (AT_CENTROID + offs_d)[None, :]).to(tl.int8, bitcast=True)
        centroid_scale = tl.load((record_ptr + AT_CENTROID_SCALE).to(tl.pointer_type(tl.bfloat16))).to(tl.float32)

        # projected: RANK tensors [BLOCK_P, GROUP_PAD]
        AHEAD: tl.constexpr = min(RANK, 1024 // HEAD_DIM)  # basis rows in flight; more would spill
        projected = ()
        for start in tl.static_range(0, RANK, AHEAD):
            rows = ()
            for r in tl.static_range(start, start + AHEAD):
                row = tl.load(record_ptr[:, None] + (r * HALF + offs_half)[None, :])
                rows += (row.to(tl.int8, bitcast=True),)
            for r in tl.static_range(start, start + AHEAD):
                if r % 4 == 0:
                    basis_scales = tl.load(word_ptr + (AT_BASIS_SCALE + 2 * r) // 8)
                acc = tl.dot((rows[r - start] & 15) ^ 8, query_even, out_dtype=tl.int32)
                acc = tl.dot(rows[r - start] & -16, query_odd, acc=acc * 16 - excess_n, out_dtype=tl.int32)
                scale_p = _bf16_lane(basis_scales, r % 4) * 0.0625
                projected += (_join_bytes(acc, BLOCK_P, GROUP_PAD) * (scale_p[:, None] * unit_g),)
        acc = tl.dot(centroid, query, out_dtype=tl.int32)
        middle = _join_bytes(acc, BLOCK_P, GROUP_PAD) * (centroid_scale[:, None] * unit_g)

        # running maximum and sum over the page's tokens, four at a time, [BLOCK_P, GROUP_PAD]
        top = tl.full((BLOCK_P, GROUP_PAD), float("-inf"), tl.float32)
        total = tl.zeros((BLOCK_P, GROUP_PAD), tl.float32)
        UNROLL: tl.constexpr = PAGE if PAGE < 64 else 16  # a whole page of 64 takes half a minute to compile
        for part in range(PAGE // UNROLL):
            for quarter in tl.static_range(UNROLL // 4):
                chunk = part * (UNROLL // 4) + quarter
                token_scales = tl.load(word_ptr + AT_COEFFICIENT_SCALE // 8 + chunk)
                logits = ()
                for t in tl.static_range(4):
                    logit = tl.zeros((BLOCK_P, GROUP_PAD), tl.float32)
                    for r in tl.static_range(RANK):
                        if (t * RANK + r) % 8 == 0:
                            word = AT_COEFFICIENTS // 8 + chunk * (RANK // 2) + (t * RANK + r) // 8
                            coefficients = tl.load(word_ptr + word)
                        logit += projected[r] * _int8_lane(coefficients, (t * RANK + r) % 8)[:, None]
                    logits += (logit * _bf16_lane(token_scales, t)[:, None],)
                new_top = tl.maximum(tl.maximum(logits[0], logits[1]), tl.maximum(logits[2], logits[3]))
                new_top = tl.maximum(top, new_top)
                total *= tl.exp2(top - new_top)
                for t in tl.static_range(4):
                    total += tl.exp2(logits[t] - new_top)
                top = new_top
        mass = (middle + top + tl.log2(total)) * LN2
        tl.store(o_ptr + offs_p[:, None], mass, mask=(offs_p < scored)[:, None] & (offs_g < GROUP)[None, :])
        offs_p += BLOCK_P


def score(
    query: torch.Tensor,
    cache: PagedCache,
    sequences: Sequences,
    recent_pages: int = 1,
    kept_pages: int = 0,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """`reference.score` into `out` (fp32 [B, HQ, P], last axis contiguous; made and filled with -inf when absent).

    Pages that are not scored are left as they are in `out`.  A sequence of at most `kept_pages` pages is not scored at
    all: selection keeps every page of it.
    """
    shape, batch = cache.shape, sequences.batch
    if out is None:
        size = (batch, shape.query_heads, sequences.max_pages)
        out = torch.full(size, float("-inf"), dtype=torch.float32, device=query.device)
    blocks = triton.cdiv(sequences.max_pages, BLOCK_P)
    per_program = max(1, min(MAX_BLOCKS, batch * shape.kv_heads * blocks // PROGRAMS))
    at = RecordLayout.of(shape).offsets
    _score_kernel[(shape.kv_heads, triton.cdiv(blocks, per_program), batch)](
        query,
        cache.summaries,
        sequences.block_table,
        sequences.seq_lens,
        out,
        query.stride(0),
        query.stride(1),
        cache.summaries.stride(0),
        cache.summaries.stride(1),
        sequences.block_table.stride(0),
        out.stride(0),
        out.stride(1),
        shape.softmax_scale,
        GROUP=shape.group,
        GROUP_PAD=max(4, triton.next_power_of_2(shape.group)),
        HEAD_DIM=shape.head_dim,
        PAGE=shape.page_size,
        RANK=shape.rank,
        RECENT=recent_pages,
        KEPT=kept_pages,
        AT_COEFFICIENTS=at["coefficients"],
        AT_CENTROID=at["centroid"],
        AT_COEFFICIENT_SCALE=at["coefficient_scale"],
        AT_BASIS_SCALE=at["basis_scale"],
        AT_CENTROID_SCALE=at["centroid_scale"],
        BLOCK_P=BLOCK_P,
        BLOCKS=per_program,
        num_warps=WARPS,
        num_stages=STAGES,
    )
    return out
