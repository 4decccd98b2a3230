"""Whether a LOCKS backend kept the right pages and summarised them well: judged by the plain-torch reference, in parts that
stay true for any tie or rounding.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from harness.backend import Check
from harness.workload import Workload
from locks_kernels import reference
from locks_kernels.cache import Sequences
from locks_kernels.shapes import SelectOptions
from locks_kernels.summary import RecordLayout, unpack

MASS_TOLERANCE = 1e-3  # of the best possible attention mass among the estimated one
SCORE_TOLERANCE = 0.05  # relative: a page this close to the last kept one may take its place (0.05 nats)
SUMMARY_TOLERANCE = 0.02  # relative: reconstruction error against that of the reference's own summaries
SUMMARY_PAGES = 256


# scores fp32 [B, HQ, P] of queries [B, HQ, D] for sequences, -inf where a page is not scored
Score = Callable[[torch.Tensor, Sequences], torch.Tensor]


def check_tables(
    workload: Workload,
    copy: int,
    tables: torch.Tensor,
    options: SelectOptions,
    score_tolerance: float = SCORE_TOLERANCE,
    score: Score | None = None,
) -> list[Check]:
    """The page tables int32 [B, H, K] of the launch just made, for the sequences `workload.checked`.

    score: the method's own in plain torch; LOCKS' unless given.
    """
    rows = workload.checked
    sequences = checked_sequences(workload)
    query, cache, shape = workload.queries[copy][rows], workload.caches[copy], workload.shape
    kept = options.kept_pages(shape.page_size)
    sound, worst_mass, worst_score = True, 1.0, 1.0
    for row, b in enumerate(rows):
        one = Sequences(sequences.block_table[row : row + 1], sequences.seq_lens[row : row + 1])
        pages = shape.pages(int(one.seq_lens))
        count = min(pages, kept)
        table = tables[b, :, :count].long()
        sound &= _sound(tables[b], count, pages, options)
        if not sound or pages <= kept:
            continue
        own = query[row : row + 1]
        scores = score(own, one) if score else reference.score(own, cache, one, options.recent_pages)
        combined = reference.combine(scores, shape.kv_heads, options.combine)
        best = reference.select(combined, one, shape, options)[0].long()
        combined = combined[0]
        wanted, found = combined.gather(1, best), combined.gather(1, table)
        worst_mass = min(worst_mass, float((found.sum(-1) / wanted.sum(-1)).min()))
        ranked = slice(options.sink_pages, count - options.recent_pages)
        worst_score = min(worst_score, float((found[:, ranked].amin(-1) / wanted[:, ranked].amin(-1)).min()))
    return [
        Check("tables_sound", sound, sound),
        Check("kept_mass_of_best", worst_mass >= 1 - MASS_TOLERANCE, worst_mass),
        Check("lowest_kept_score_of_threshold", worst_score >= 1 - score_tolerance, worst_score),
    ]


def _sound(table: torch.Tensor, count: int, pages: int, options: SelectOptions) -> bool:
    """[H, K]: `count` ascending unique page numbers in range, -1 behind them, sink and recent pages among them."""
    ids, tail = table[:, :count], table[:, count:]
    ascending = bool((ids[:, 1:] > ids[:, :-1]).all()) and bool((ids[:, 0] >= 0).all()) and bool((ids[:, -1] < pages).all())
    forced = [p for p in (*range(options.sink_pages), *range(pages - options.recent_pages, pages)) if 0 <= p < pages]
    has_forced = all(bool((ids == page).any(-1).all()) for page in forced)
    return ascending and bool((tail == -1).all()) and has_forced


def check_summaries(workload: Workload, copy: int) -> Check:
    """A seeded sample of summaries, and the newest one, against the keys they stand for: as close as the reference's own."""
    cache, sequences = workload.caches[copy], checked_sequences(workload)
    complete = int(sequences.seq_lens.min()) // workload.shape.page_size
    generator = torch.Generator().manual_seed(workload.case.seed)
    logical = torch.cat((torch.randperm(complete, generator=generator)[:SUMMARY_PAGES], torch.tensor([complete - 1])))
    ids = sequences.block_table[0][logical.to(workload.device)].long()
    keys = cache.keys[ids].float()
    spread = keys - keys.mean(-2, keepdim=True)
    ours = unpack(cache.summaries[ids], RecordLayout.of(cache.shape)).reconstruct()
    best = reference.summarise(keys, cache.shape.rank).reconstruct()
    error, least = (float((found - keys).norm() / spread.norm()) for found in (ours, best))
    return Check("summary_error", error <= least * (1 + SUMMARY_TOLERANCE) + 1e-4, {"error": error, "reference": least})


def checked_sequences(workload: Workload) -> Sequences:
    """The sequences `workload.checked` by themselves."""
    return Sequences(workload.sequences.block_table[workload.checked], workload.sequences.seq_lens[workload.checked])
