"""Rival page selectors, timed: the step of LOCKS with another summary and another score.

All are adapted: one table per KV head by share, sink and recent pages inside the budget, no dense layers, so that they differ
from LOCKS in their summary alone.  What each keeps is measured by `locks-bench fidelity` under the same name.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, ClassVar

import torch

from harness.backend import Backend, Check, Launch
from harness.case import Case
from harness.environment import version
from harness.memory import local_shape
from harness.verify_selection import SUMMARY_PAGES, check_tables, checked_sequences
from harness.workload import Workload
from locks_kernels import page_vectors, reference
from locks_kernels.cache import PagedCache
from locks_kernels.cost import SCORE_BYTES, TABLE_ENTRY_BYTES
from locks_kernels.decode import STAGE_NAMES, stages_class
from locks_kernels.selector_cost import page_selector_bytes
from locks_kernels.selector_stages import SelectorStages
from locks_kernels.shapes import ShapeError

SUMMARY_TOLERANCE = 0.02  # of a vector's length: two roundings of bfloat16, and sums in another order


class PageScores(Backend):
    """`form` says which summary and score (locks_kernels.page_vectors)."""

    form: ClassVar[str]
    writes_cache = True

    def __init__(self) -> None:
        self._stages: list[SelectorStages] = []
        self._outputs: list[torch.Tensor] = []

    def version(self) -> str | None:
        return version("locks-bench")

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
        stages = SelectorStages(
            self.form,
            workload.caches[copy],
            workload.sequences,
            workload.case.select,
            "reference" if workload.device.type == "cpu" else "triton",
            share=self._stages[0] if self._stages else None,
            summaries=self._stages[pool].summaries if pool < copy else None,
        )
        if pool == copy:
            stages.prefill()
            stages.summaries.vectors[workload.new_token_slots()[0]] = float("nan")  # the step has to summarise these itself
        self._stages.append(stages)
        query, keys, values = workload.queries[copy], workload.new_keys[copy], workload.new_values[copy]
        self._outputs.append(torch.empty_like(query))
        return partial(stages.step, query, keys, values, self._outputs[copy])

    def expected(self, workload: Workload, copy: int) -> torch.Tensor:
        """Exact attention over the pages that the step itself kept; whether they are the right ones is `check`."""
        rows = workload.checked
        query = workload.queries[copy][rows].float()
        return reference.attend(query, workload.caches[copy], checked_sequences(workload), self._stages[copy].tables[rows])[0]

    def check(self, workload: Workload, copy: int) -> list[Check]:
        stages, options = self._stages[copy], workload.case.select

        def score(query: torch.Tensor, sequences: Any) -> torch.Tensor:
            return page_vectors.score(query, workload.shape, stages.summaries, sequences, options.recent_pages)

        return [*check_tables(workload, copy, stages.tables, options, score=score), self._summaries(workload, copy)]

    def _summaries(self, workload: Workload, copy: int) -> Check:
        """A seeded sample of summaries, and the newest one, against those made of the same keys in plain torch."""
        sequences, cache = checked_sequences(workload), workload.caches[copy]
        complete = int(sequences.seq_lens.min()) // workload.shape.page_size
        generator = torch.Generator().manual_seed(workload.case.seed)
        logical = torch.cat((torch.randperm(complete, generator=generator)[:SUMMARY_PAGES], torch.tensor([complete - 1])))
        ids = sequences.block_table[0][logical.to(workload.device)].long()
        wanted, _ = page_vectors.summarise(self.form, cache.keys[ids])
        found = self._stages[copy].summaries.vectors[ids].float()
        away = (found - wanted).norm(dim=-1) / wanted.norm(dim=-1).clamp_min(1e-6)
        error = float(away.nan_to_num(torch.inf).max())
        return Check("summary_error", error <= SUMMARY_TOLERANCE, error)

    def stages(self, workload: Workload, copy: int) -> dict[str, Callable[[], object]]:
        stages, query = self._stages[copy], workload.queries[copy]
        parts: tuple[Callable[[], object], ...] = (
            partial(stages.append_finalise, workload.new_keys[copy], workload.new_values[copy]),
            partial(stages.score, query),
            stages.select,
            partial(stages.attend, query, self._outputs[copy]),
        )
        return dict(zip(STAGE_NAMES, parts, strict=True))

    def bytes(self, case: Case) -> dict[str, int]:
        shape, options = local_shape(case), case.select
        parts = page_selector_bytes(shape, options, case.ctx, case.batch, page_vectors.page_bytes(self.form, shape))
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
        if not self._stages:
            return {}
        return {"kernels": self._stages[0].kernels, "selection": self._stages[0].selection, "label": "adapted"}


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
