"""Rival page selectors, timed: the step of LOCKS with another summary and another score.

All run with one table per KV head by share, sink and recent pages inside the budget and no dense layers, so that they differ
from LOCKS in their summary alone.  What each keeps is measured by `locks-bench fidelity` under the same name.
"""

from __future__ import annotations

from functools import partial
from typing import Any, ClassVar

import torch

from harness.backend import Check, Launch
from harness.backends.sparse import SparseStep
from harness.case import Case
from harness.memory import local_shape
from harness.verify_selection import SUMMARY_PAGES, check_tables, checked_sequences
from harness.workload import Workload
from locks_kernels import page_tokens, page_vectors
from locks_kernels.cache import PagedCache
from locks_kernels.cost import SCORE_BYTES, TABLE_ENTRY_BYTES
from locks_kernels.decode import stages_class
from locks_kernels.selector_cost import page_selector_bytes
from locks_kernels.selector_stages import SelectorStages, TokenStages
from locks_kernels.shapes import DecodeShape, ShapeError

SUMMARY_TOLERANCE = 0.02  # of a vector's length: two roundings of bfloat16, and sums in another order


class PageScores(SparseStep):
    """`form` says which summary and score (locks_kernels.page_vectors)."""

    form: ClassVar[str]
    label: ClassVar[str] = "adapted"
    stages_type: ClassVar[type[SelectorStages]] = SelectorStages

    def __init__(self) -> None:
        super().__init__()
        self._selectors: list[SelectorStages] = []

    def supports(self, case: Case) -> str | None:
        if case.device == "cpu":
            return None
        try:
            stages_class("triton", PagedCache.allocate(local_shape(case), 1, case.device))
        except ShapeError as error:
            return str(error)
        return None

    def prepare(self, workload: Workload, copy: int) -> Launch:
        pool = copy % workload.plan.copies
        stages = self.stages_type(
            self.form,
            workload.caches[copy],
            workload.sequences,
            workload.case.select,
            "reference" if workload.device.type == "cpu" else "triton",
            share=self._selectors[0] if self._selectors else None,
            summaries=self._selectors[pool].summaries if pool < copy else None,
        )
        if pool == copy:
            stages.prefill()
            self._forget(stages.summaries, *workload.new_token_slots())
        self._selectors.append(stages)
        out = self._add(workload, copy, stages)
        return partial(stages.step, workload.queries[copy], workload.new_keys[copy], workload.new_values[copy], out)

    def _forget(self, summaries: Any, pages: torch.Tensor, slots: torch.Tensor) -> None:
        """Overwrite what the steps have to summarise themselves."""
        summaries.vectors[pages] = float("nan")

    def check(self, workload: Workload, copy: int) -> list[Check]:
        stages, options = self._selectors[copy], workload.case.select

        def score(query: torch.Tensor, sequences: Any) -> torch.Tensor:
            return stages.plain.score(query, workload.shape, stages.summaries, sequences, options.recent_pages)

        return [*check_tables(workload, copy, stages.tables, options, score=score), self._summaries(workload, copy)]

    def _summaries(self, workload: Workload, copy: int) -> Check:
        """A seeded sample of summaries, and the newest one, against those made of the same keys in plain torch."""
        sequences, cache = checked_sequences(workload), workload.caches[copy]
        complete = int(sequences.seq_lens.min()) // workload.shape.page_size
        generator = torch.Generator().manual_seed(workload.case.seed)
        logical = torch.cat((torch.randperm(complete, generator=generator)[:SUMMARY_PAGES], torch.tensor([complete - 1])))
        ids = sequences.block_table[0][logical.to(workload.device)].long()
        found, wanted = self._summary_pair(cache, self._selectors[copy].summaries, ids)
        away = (found - wanted).norm(dim=-1) / wanted.norm(dim=-1).clamp_min(1e-6)
        error = float(away.nan_to_num(torch.inf).max())
        return Check("summary_error", error <= SUMMARY_TOLERANCE, error)

    def _summary_pair(self, cache: PagedCache, summaries: Any, ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """What stands there for the pages `ids`, and what should."""
        return summaries.vectors[ids].float(), page_vectors.summarise(self.form, cache.keys[ids])[0]

    def page_bytes(self, shape: DecodeShape) -> int:
        """Read of a scored page and KV head."""
        return page_vectors.page_bytes(self.form, shape)

    def side_bytes(self, case: Case) -> int:
        shape = local_shape(case)
        return shape.kv_heads * self.page_bytes(shape)

    def bytes(self, case: Case) -> dict[str, int]:
        shape, options = local_shape(case), case.select
        parts = page_selector_bytes(shape, options, case.ctx, case.batch, self.page_bytes(shape))
        scored = self._scored(case)
        kept = min(options.kept_pages(shape.page_size), shape.pages(case.ctx))
        parts["scores"] = 2 * case.batch * shape.query_heads * scored * SCORE_BYTES
        parts["page_table"] = case.batch * (scored + 2 * shape.kv_heads * kept) * TABLE_ENTRY_BYTES
        return parts

    def stage_bytes(self, case: Case) -> dict[str, int]:
        """As cost.locks_stage_bytes."""
        parts = self.bytes(case)
        entries = case.batch * self._scored(case) * TABLE_ENTRY_BYTES
        kept_table = (parts["page_table"] - entries) // 2
        return {
            "score": parts["summary"] + parts["scores"] // 2 + entries,
            "select": parts["scores"] // 2 + kept_table,
            "attend": parts["selected_kv"] + kept_table,
        }

    def _scored(self, case: Case) -> int:
        shape = local_shape(case)
        pages = shape.pages(case.ctx)
        return pages - case.select.recent_pages if pages > case.select.kept_pages(shape.page_size) else 0

    def resolved(self) -> dict[str, Any]:
        if not self._selectors:
            return {}
        return {"kernels": self._selectors[0].kernels, "selection": self._selectors[0].selection, "label": self.label}


class QuestGroup(PageScores):
    name = "quest-group"
    form = "min-max"


class CuboidMean(PageScores):
    name = "cuboid-mean"
    form = "cuboid-mean"


class MeanStdVector(PageScores):
    name = "mean-std-vector"
    form = "mean-std"


class MeanStdScalar(PageScores):
    name = "mean-std-scalar"
    form = "mean-spread"


class Centroid(PageScores):
    name = "centroid"
    form = "centroid"


class TokenScores(PageScores):
    """The same with a row per token (locks_kernels.page_tokens)."""

    stages_type = TokenStages

    def _forget(self, summaries: Any, pages: torch.Tensor, slots: torch.Tensor) -> None:
        if summaries.axes is not None:
            summaries.rows[pages, :, slots] = float("nan")

    def _summary_pair(self, cache: PagedCache, summaries: Any, ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        wanted = cache.keys[ids] if summaries.axes is None else page_tokens.project(summaries, cache.keys[ids])
        return summaries.rows[ids].float(), wanted.float()

    def page_bytes(self, shape: DecodeShape) -> int:
        return page_tokens.page_bytes(self.form, shape)


class Oracle(TokenScores):
    """Exact mass of every page: what a choice costs that stores nothing and reads every key."""

    name = "oracle"
    form = "keys"
    label = "reference"

    def side_bytes(self, case: Case) -> int:
        return 0


class SharedSvd8(TokenScores):
    name = "shared-svd-r8"
    form = "axes-8"


class SharedSvd32(TokenScores):
    name = "shared-svd-r32"
    form = "axes-32"
