"""Exact attention over a table of pages, split and merged: kernels, then their launcher.

A program reads PER_SPLIT pages of one KV head for all its query heads; a second kernel merges the splits by their natural
log-sum-exp.  How many splits there are follows from shapes alone, so that a captured launch stays right.
"""

# The bodies of kernels are not Python to a type checker.
# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from locks_kernels.cache import PagedCache, Sequences
from locks_kernels.shapes import DecodeShape

LOG2E = tl.constexpr(1.4426950408889634)
LN2 = tl.constexpr(0.6931471805599453)
PROGRAMS = 264  # two for each of 132 multiprocessors: a batch of one is spread at least this far where pages allow it
TRITON_DTYPE = {"bfloat16": tl.bfloat16, "float16": tl.float16}
BLOCK_TOKENS = 64  # tokens a program has in hand at once, at least one page of every size


@dataclass
class AttendWorkspace:
    """Partial results of the splits.

    out  fp32  [B, HQ, splits, D]
    lse  fp32  [B, HQ, splits]    natural log, -inf for a split that has nothing to attend
    """

    out: torch.Tensor
    lse: torch.Tensor

    @classmethod
    def allocate(cls, shape: DecodeShape, batch: int, pages: int, device: torch.device) -> AttendWorkspace:
        """For tables of `pages` entries per sequence and KV head."""
        blocks = triton.cdiv(pages * shape.page_size, BLOCK_TOKENS)
        splits = max(1, min(blocks, triton.cdiv(PROGRAMS, batch * shape.kv_heads)))
        size = (batch, shape.query_heads, splits)
        out = torch.empty(*size, shape.head_dim, dtype=torch.float32, device=device)
        return cls(out, torch.empty(size, dtype=torch.float32, device=device))


@triton.jit
def _attend_kernel(
    query_ptr,
    key_ptr,
    value_ptr,
    tables_ptr,
    block_table_ptr,
    seq_lens_ptr,
    partial_ptr,
    lse_ptr,
    stride_qb,
    stride_qh,
    stride_kp,
    stride_kh,
    stride_ks,
    stride_tb,
    stride_th,
    stride_bb,
    softmax_scale,
    table_pages,
    splits,
    kv_heads,
    GROUP: tl.constexpr,
    GROUP_PAD: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    PAGE: tl.constexpr,
    OPERAND: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCKS: tl.constexpr,
):
    split = tl.program_id(0)
    h = tl.program_id(1)
    b = tl.program_id(2).to(tl.int64)
    tokens = tl.load(seq_lens_ptr + b)

    # query [GROUP_PAD, HEAD_DIM]
    offs_g = tl.arange(0, GROUP_PAD)
    offs_d = tl.arange(0, HEAD_DIM)
    mask_g = (offs_g < GROUP)[:, None]
    query_ptr += b * stride_qb + h * GROUP * stride_qh
    q = tl.load(query_ptr + offs_g[:, None] * stride_qh + offs_d[None, :], mask=mask_g, other=0.0).to(OPERAND)

    top = tl.full((GROUP_PAD,), float("-inf"), tl.float32)
    total = tl.zeros((GROUP_PAD,), tl.float32)
    acc = tl.zeros((GROUP_PAD, HEAD_DIM), tl.float32)
    offs_n = tl.arange(0, BLOCK_N)
    for block in range(BLOCKS):
        offs_k = (split * BLOCKS + block) * (BLOCK_N // PAGE) + offs_n // PAGE
        logical = tl.load(tables_ptr + b * stride_tb + h * stride_th + offs_k, mask=offs_k < table_pages, other=-1)
        mask_n = (logical >= 0) & (logical * PAGE + offs_n % PAGE < tokens)
        physical = tl.load(block_table_ptr + b * stride_bb + logical, mask=mask_n, other=0).to(tl.int64)
        row = physical * stride_kp + h.to(tl.int64) * stride_kh + (offs_n % PAGE) * stride_ks  # [BLOCK_N]

        # slots behind the end may hold anything: masked, they are never read
        k = tl.load(key_ptr + row[None, :] + offs_d[:, None], mask=mask_n[None, :], other=0.0)  # [HEAD_DIM, BLOCK_N]
        logits = tl.dot(q, k.to(OPERAND)) * (softmax_scale * LOG2E)
        logits = tl.where(mask_n[None, :], logits, float("-inf"))
        new_top = tl.maximum(top, tl.max(logits, 1))
        base = tl.where(new_top == float("-inf"), 0.0, new_top)
        p = tl.exp2(logits - base[:, None])
        decay = tl.exp2(top - base)
        total = total * decay + tl.sum(p, 1)
        v = tl.load(value_ptr + row[:, None] + offs_d[None, :], mask=mask_n[:, None], other=0.0)  # [BLOCK_N, HEAD_DIM]
        acc = tl.dot(p.to(OPERAND), v.to(OPERAND), acc=acc * decay[:, None])
        top = new_top

    empty = total == 0.0
    total = tl.where(empty, 1.0, total)
    acc = acc / total[:, None]
    lse = tl.where(empty, float("-inf"), (top + tl.log2(total)) * LN2)
    at = ((b * kv_heads + h) * GROUP + offs_g) * splits + split
    tl.store(partial_ptr + at[:, None] * HEAD_DIM + offs_d[None, :], acc, mask=mask_g)
    tl.store(lse_ptr + at, lse, mask=offs_g < GROUP)


@triton.jit
def _merge_kernel(
    partial_ptr,
    lse_ptr,
    out_ptr,
    out_lse_ptr,
    stride_ob,
    stride_oh,
    splits,
    query_heads,
    HEAD_DIM: tl.constexpr,
    SPLITS_PAD: tl.constexpr,
):
    q = tl.program_id(0)
    b = tl.program_id(1).to(tl.int64)
    at = b * query_heads + q
    offs_s = tl.arange(0, SPLITS_PAD)
    offs_d = tl.arange(0, HEAD_DIM)
    lse = tl.load(lse_ptr + at * splits + offs_s, mask=offs_s < splits, other=float("-inf"))
    top = tl.max(lse, 0)
    base = tl.where(top == float("-inf"), 0.0, top)
    weight = tl.exp(lse - base)
    total = tl.sum(weight, 0)
    partial_at = (at * splits + offs_s)[:, None] * HEAD_DIM + offs_d[None, :]
    partial = tl.load(partial_ptr + partial_at, mask=(offs_s < splits)[:, None], other=0.0)  # [SPLITS_PAD, HEAD_DIM]
    empty = total == 0.0
    total = tl.where(empty, 1.0, total)
    merged = tl.sum(partial * weight[:, None], 0) / total
    tl.store(out_ptr + b * stride_ob + q * stride_oh + offs_d, merged.to(out_ptr.dtype.element_ty))
    tl.store(out_lse_ptr + at, tl.where(empty, float("-inf"), base + tl.log(total)))


def attend(
    query: torch.Tensor,
    cache: PagedCache,
    sequences: Sequences,
    tables: torch.Tensor,
    out: torch.Tensor | None = None,
    lse: torch.Tensor | None = None,
    workspace: AttendWorkspace | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """`reference.attend` into `out` (like query) and `lse` (fp32 [B, HQ], contiguous, natural log)."""
    shape = cache.shape
    batch, kv_heads, table_pages = tables.shape
    out = torch.empty_like(query) if out is None else out
    if lse is None:
        lse = torch.empty(batch, shape.query_heads, dtype=torch.float32, device=query.device)
    work = workspace or AttendWorkspace.allocate(shape, batch, table_pages, query.device)
    splits = work.lse.shape[2]
    blocks = triton.cdiv(table_pages * shape.page_size, BLOCK_TOKENS)
    _attend_kernel[(splits, kv_heads, batch)](
        query,
        cache.keys,
        cache.values,
        tables,
        sequences.block_table,
        sequences.seq_lens,
        work.out,
        work.lse,
        query.stride(0),
        query.stride(1),
        cache.keys.stride(0),
        cache.keys.stride(1),
        cache.keys.stride(2),
        tables.stride(0),
        tables.stride(1),
        sequences.block_table.stride(0),
        shape.softmax_scale,
        table_pages,
        splits,
        kv_heads,
        GROUP=shape.group,
        GROUP_PAD=16,
        HEAD_DIM=shape.head_dim,
        PAGE=shape.page_size,
        OPERAND=tl.float32 if triton.knobs.runtime.interpret else TRITON_DTYPE[shape.dtype],  # it cannot multiply bfloat16
        BLOCK_N=BLOCK_TOKENS,
        BLOCKS=triton.cdiv(blocks, splits),
        num_warps=4,
        num_stages=2,
    )
    _merge_kernel[(shape.query_heads, batch)](
        work.out,
        work.lse,
        out,
        lse,
        out.stride(0),
        out.stride(1),
        splits,
        shape.query_heads,
        HEAD_DIM=shape.head_dim,
        SPLITS_PAD=triton.next_power_of_2(splits),
        num_warps=4,
    )
    return out, lse
