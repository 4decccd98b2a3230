"""Exact selection of the best pages: kernels, then their launcher.

Three launches, whatever the data.  `_normalise_kernel`: maximum and sum of every slice of CHUNK pages of a query head.
`_shortlist_kernel`: the combined score of a chunk and its best pages, in ascending order.  `_merge_kernel`: the best of
all shortlists, plus sink and recent pages.  The best k of all pages are among the best k of every chunk, and as each
list keeps the lowest pages of a tie, so does the merge.  A score is not negative, so its float bits order as integers
and the k-th largest is found bit by bit.  Nothing needs a reset between steps.
"""

# The bodies of kernels are not Python to a type checker.
# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from locks_kernels.cache import Sequences
from locks_kernels.shapes import DecodeShape, SelectOptions

CHUNK_PAGES = 2048
MERGE_BLOCK = 8192  # candidates that the merge holds in registers; further ones are read again for every bit
WARPS = 8


@dataclass
class SelectWorkspace:
    """Scratch of one selection; every entry that is read was written by the same step.

    partial     fp32   [B, HQ, chunks, 2]   maximum and sum of exp(S - maximum)
    shortlist   int32  [B, H, chunks * listed, 2]   score bits (-1 behind the last) and page
    """

    partial: torch.Tensor
    shortlist: torch.Tensor
    chunk: int
    listed: int

    @classmethod
    def allocate(
        cls, shape: DecodeShape, options: SelectOptions, sequences: Sequences, chunk: int = CHUNK_PAGES
    ) -> SelectWorkspace:
        device = sequences.seq_lens.device
        chunk = max(16, min(chunk, triton.next_power_of_2(sequences.max_pages)))
        chunks = triton.cdiv(sequences.max_pages, chunk)
        ranked = options.kept_pages(shape.page_size) - options.sink_pages - options.recent_pages
        listed = min(ranked, chunk)
        partial = torch.empty(sequences.batch, shape.query_heads, chunks, 2, dtype=torch.float32, device=device)
        size = (sequences.batch, shape.kv_heads, chunks * listed, 2)
        return cls(partial, torch.empty(size, dtype=torch.int32, device=device), chunk, listed)


@triton.jit
def _normalise_kernel(
    score_ptr,
    seq_lens_ptr,
    partial_ptr,
    stride_sb,
    stride_sh,
    chunks,
    query_heads,
    PAGE: tl.constexpr,
    RECENT: tl.constexpr,
    DENSE: tl.constexpr,
    CHUNK: tl.constexpr,
):
    c = tl.program_id(0)
    q = tl.program_id(1)
    b = tl.program_id(2).to(tl.int64)
    pages = tl.cdiv(tl.load(seq_lens_ptr + b), PAGE)
    scored = pages - RECENT
    if (pages <= DENSE) | (c * CHUNK >= scored):
        return
    offs_p = c * CHUNK + tl.arange(0, CHUNK)
    s = tl.load(score_ptr + b * stride_sb + q * stride_sh + offs_p, mask=offs_p < scored, other=float("-inf"))
    top = tl.max(s, 0)
    total = tl.sum(tl.where(s == float("-inf"), 0.0, tl.exp(s - top)), 0)
    at = ((b * query_heads + q) * chunks + c) * 2
    tl.store(partial_ptr + at, top)
    tl.store(partial_ptr + at + 1, total)


@triton.jit
def _kth_largest(key_ptr, key, count, wanted, BLOCK: tl.constexpr):
    """The largest T such that at least `wanted` of the non-negative keys are >= T, and how many are > T.

    `key` [BLOCK] holds the first keys (-1 where there is none), `key_ptr` (stride 2) those from BLOCK to `count`.
    """
    threshold = 0
    for step in range(31):
        trial = threshold | (1 << (30 - step))
        reached = tl.sum((key >= trial).to(tl.int32), 0)
        for start in range(BLOCK, count, BLOCK):
            offs = start + tl.arange(0, BLOCK)
            more = tl.load(key_ptr + 2 * offs, mask=offs < count, other=-1)
            reached += tl.sum((more >= trial).to(tl.int32), 0)
        threshold = tl.where(reached >= wanted, trial, threshold)
    above = tl.sum((key > threshold).to(tl.int32), 0)
    for start in range(BLOCK, count, BLOCK):
        offs = start + tl.arange(0, BLOCK)
        above += tl.sum((tl.load(key_ptr + 2 * offs, mask=offs < count, other=-1) > threshold).to(tl.int32), 0)
    return threshold, above


@triton.jit
def _keep(key, threshold, ties_left):
    """Which keys [BLOCK] are kept (all above the threshold, the first `ties_left` on it), and the ties seen."""
    tie = (key == threshold).to(tl.int32)
    keep = (key > threshold) | ((tie > 0) & (tl.cumsum(tie, 0) <= ties_left))
    return keep, tl.sum(tie, 0)


@triton.jit
def _shortlist_kernel(
    score_ptr,
    seq_lens_ptr,
    partial_ptr,
    shortlist_ptr,
    stride_sb,
    stride_sh,
    chunks,
    kv_heads,
    GROUP: tl.constexpr,
    SHARE: tl.constexpr,
    PAGE: tl.constexpr,
    SINK: tl.constexpr,
    RECENT: tl.constexpr,
    DENSE: tl.constexpr,
    CHUNK: tl.constexpr,
    CHUNKS_PAD: tl.constexpr,
    LISTED: tl.constexpr,
):
    c = tl.program_id(0)
    h = tl.program_id(1)
    b = tl.program_id(2).to(tl.int64)
    pages = tl.cdiv(tl.load(seq_lens_ptr + b), PAGE)
    scored = pages - RECENT
    if (pages <= DENSE) | (c * CHUNK >= scored):
        return

    # combined score of the chunk, [CHUNK]
    offs_p = c * CHUNK + tl.arange(0, CHUNK)
    offs_c = tl.arange(0, CHUNKS_PAD)
    mask_c = offs_c < tl.cdiv(scored, CHUNK)
    combined = tl.zeros((CHUNK,), tl.float32)
    for g in range(GROUP):
        q = h * GROUP + g
        at = ((b * kv_heads * GROUP + q) * chunks + offs_c) * 2
        tops = tl.load(partial_ptr + at, mask=mask_c, other=float("-inf"))
        totals = tl.load(partial_ptr + at + 1, mask=mask_c, other=0.0)
        top = tl.max(tops, 0)
        s = tl.load(score_ptr + b * stride_sb + q * stride_sh + offs_p, mask=offs_p < scored, other=float("-inf"))
        mass = tl.where(s == float("-inf"), 0.0, tl.exp(s - top))
        if SHARE:
            mass = mass / (GROUP * tl.sum(tl.where(totals > 0.0, totals * tl.exp(tops - top), 0.0), 0))
        combined += mass
    combined = tl.where(combined >= 0.0, combined, 0.0)  # not a number ranks last

    key = tl.where((offs_p >= SINK) & (offs_p < scored), combined.to(tl.int32, bitcast=True), -1)
    wanted = tl.minimum(LISTED, tl.sum((key >= 0).to(tl.int32), 0))
    threshold, above = _kth_largest(shortlist_ptr, key, 0, wanted, CHUNK)
    keep, _ = _keep(key, threshold, wanted - above)
    place = tl.cumsum(keep.to(tl.int32), 0) - 1
    list_ptr = shortlist_ptr + ((b * kv_heads + h) * chunks + c) * (2 * LISTED)
    tl.store(list_ptr + 2 * place, key, mask=keep)
    tl.store(list_ptr + 2 * place + 1, offs_p, mask=keep)
    # the places behind the last one: only a chunk that overlaps the sink or the end has any
    offs_l = tl.arange(0, CHUNK)
    tl.store(list_ptr + 2 * offs_l, -1, mask=(offs_l >= wanted) & (offs_l < LISTED))


@triton.jit
def _merge_kernel(
    seq_lens_ptr,
    shortlist_ptr,
    tables_ptr,
    chunks,
    kv_heads,
    PAGE: tl.constexpr,
    SINK: tl.constexpr,
    RECENT: tl.constexpr,
    DENSE: tl.constexpr,
    KEPT: tl.constexpr,
    CHUNK: tl.constexpr,
    LISTED: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    h = tl.program_id(0)
    b = tl.program_id(1).to(tl.int64)
    pages = tl.cdiv(tl.load(seq_lens_ptr + b), PAGE)
    unit = b * kv_heads + h
    table_ptr = tables_ptr + unit * DENSE
    if pages <= DENSE:
        for start in range(0, DENSE, BLOCK_K):
            offs_k = start + tl.arange(0, BLOCK_K)
            tl.store(table_ptr + offs_k, tl.where(offs_k < pages, offs_k, -1), mask=offs_k < DENSE)
        return

    for start in range(0, SINK, BLOCK_K):
        offs_k = start + tl.arange(0, BLOCK_K)
        tl.store(table_ptr + offs_k, offs_k, mask=offs_k < SINK)
    for start in range(0, RECENT, BLOCK_K):
        offs_k = start + tl.arange(0, BLOCK_K)
        tl.store(table_ptr + KEPT - RECENT + offs_k, pages - RECENT + offs_k, mask=offs_k < RECENT)
    for start in range(KEPT, DENSE, BLOCK_K):
        offs_k = start + tl.arange(0, BLOCK_K)
        tl.store(table_ptr + offs_k, -1, mask=offs_k < DENSE)

    count = tl.cdiv(pages - RECENT, CHUNK) * LISTED
    list_ptr = shortlist_ptr + unit * chunks * (2 * LISTED)
    wanted = KEPT - SINK - RECENT
    offs = tl.arange(0, BLOCK)
    key = tl.load(list_ptr + 2 * offs, mask=offs < count, other=-1)
    threshold, above = _kth_largest(list_ptr, key, count, wanted, BLOCK)
    ties_left = wanted - above
    filled = SINK
    for start in range(0, count, BLOCK):
        offs = start + tl.arange(0, BLOCK)
        key = tl.load(list_ptr + 2 * offs, mask=offs < count, other=-1)
        page = tl.load(list_ptr + 2 * offs + 1, mask=offs < count, other=-1)
        keep, ties = _keep(key, threshold, ties_left)
        kept = keep.to(tl.int32)
        tl.store(table_ptr + filled + tl.cumsum(kept, 0) - 1, page, mask=keep)
        filled += tl.sum(kept, 0)
        ties_left -= tl.minimum(ties_left, ties)


def select(
    scores: torch.Tensor,
    sequences: Sequences,
    shape: DecodeShape,
    options: SelectOptions,
    tables: torch.Tensor | None = None,
    workspace: SelectWorkspace | None = None,
) -> torch.Tensor:
    """`reference.combine`, then `reference.select`: int32 [B, H, K] into `tables` (contiguous) from scores fp32 [B, HQ, P].

    Only scores of pages that `reference.scored_pages` counts are read, and none of a sequence of at most K pages.
    """
    dense = options.table_pages(shape.page_size)
    if tables is None:
        tables = torch.empty(sequences.batch, shape.kv_heads, dense, dtype=torch.int32, device=scores.device)
    work = workspace or SelectWorkspace.allocate(shape, options, sequences)
    chunks = work.partial.shape[2]
    common = {"PAGE": shape.page_size, "RECENT": options.recent_pages, "DENSE": dense, "CHUNK": work.chunk}
    _normalise_kernel[(chunks, shape.query_heads, sequences.batch)](
        scores,
        sequences.seq_lens,
        work.partial,
        scores.stride(0),
        scores.stride(1),
        chunks,
        shape.query_heads,
        **common,
        num_warps=WARPS,
    )
    _shortlist_kernel[(chunks, shape.kv_heads, sequences.batch)](
        scores,
        sequences.seq_lens,
        work.partial,
        work.shortlist,
        scores.stride(0),
        scores.stride(1),
        chunks,
        shape.kv_heads,
        GROUP=shape.group,
        SHARE=options.combine == "share",
        SINK=options.sink_pages,
        CHUNKS_PAD=triton.next_power_of_2(chunks),
        LISTED=work.listed,
        **common,
        num_warps=WARPS,
    )
    _merge_kernel[(shape.kv_heads, sequences.batch)](
        sequences.seq_lens,
        work.shortlist,
        tables,
        chunks,
        shape.kv_heads,
        SINK=options.sink_pages,
        LISTED=work.listed,
        KEPT=options.kept_pages(shape.page_size),
        BLOCK=max(16, min(MERGE_BLOCK, triton.next_power_of_2(chunks * work.listed))),
        BLOCK_K=256,
        **common,
        num_warps=WARPS,
    )
    return tables
