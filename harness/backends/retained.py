"""A table that was made once, timed: the step appends the new token and attends, nothing is scored or chosen.

That is all that is left of a step for a method that evicts after prefill and attends what survived (KVzip at a ratio of
budget / context, as many tokens in every head), and for the control that keeps pages at random.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from functools import partial
from typing import Any, ClassVar

import torch

from harness.backend import Check, Launch
from harness.backends.sparse import SparseStep
from harness.case import Case
from harness.memory import local_shape
from harness.workload import Workload
from locks_kernels import reference
from locks_kernels.cost import TABLE_ENTRY_BYTES
from locks_kernels.decode import Stages, stages_class
from locks_kernels.selector_cost import page_selector_bytes


class Retained(SparseStep):
    """Whole pages at random per sequence and KV head, sink and open page among them, as many as the budget holds.

    What survives an eviction depends on the model; how long it takes to attend does not.
    """

    label: ClassVar[str]

    def __init__(self) -> None:
        super().__init__()
        self._inner: list[Stages] = []
        self._kernels: str | None = None

    def supports(self, case: Case) -> str | None:
        if case.ctx % case.page_size:
            return f"timed at whole pages only, where its table stays the same: use a --ctx that {case.page_size} divides"
        return None

    def prepare(self, workload: Workload, copy: int) -> Launch:
        on_cpu = workload.device.type == "cpu"
        self._kernels, stages = stages_class("reference" if on_cpu else "auto", workload.caches[copy], workload.sequences)
        step = stages(workload.caches[copy], workload.sequences, workload.case.select, self._inner[0] if copy else None)
        tables = self._table(workload, copy)
        if on_cpu:
            step.tables = tables
        else:
            step.tables.copy_(tables)
        self._inner.append(step)
        out = self._add(workload, copy, step)
        append, attend = self.stages(workload, copy).values()

        def launch() -> torch.Tensor:
            append()
            attend()
            return out

        return launch

    def _table(self, workload: Workload, copy: int) -> torch.Tensor:
        """int32 [B, H, K], ascending; another one for every layer, sequence and KV head, the same in every run."""
        shape, sequences = workload.shape, workload.sequences
        generator = torch.Generator(workload.device).manual_seed(1000 * workload.case.seed + copy)
        size = (sequences.batch, shape.kv_heads, sequences.max_pages)
        score = torch.rand(size, generator=generator, device=workload.device)
        return reference.select(score, sequences, shape, workload.case.select)

    def stages(self, workload: Workload, copy: int) -> dict[str, Callable[[], object]]:
        on_cpu = workload.device.type == "cpu"
        append = reference.append if on_cpu else importlib.import_module("locks_kernels.build").append
        keys, values = workload.new_keys[copy], workload.new_values[copy]
        return {
            "append": partial(append, workload.caches[copy], workload.sequences, keys, values),
            "attend": partial(self._inner[copy].attend, workload.queries[copy], self._outputs[copy]),
        }

    def check(self, workload: Workload, copy: int) -> list[Check]:
        same = torch.equal(self._inner[copy].tables, self._table(workload, copy))
        return [Check("table_is_the_one_made", same, same)]

    def bytes(self, case: Case) -> dict[str, int]:
        shape = local_shape(case)
        kept = min(case.select.kept_pages(shape.page_size), shape.pages(case.ctx))
        table = case.batch * shape.kv_heads * kept * TABLE_ENTRY_BYTES
        return {**page_selector_bytes(shape, case.select, case.ctx, case.batch, 0), "page_table": table}

    def distinct_bytes(self, case: Case, copies: int, launches: int) -> int:
        return launches * sum(self.bytes(case).values())  # each has a table of its own

    def stage_bytes(self, case: Case) -> dict[str, int]:
        return {"attend": sum(self.bytes(case).values())}

    def resolved(self) -> dict[str, Any]:
        return {"kernels": self._kernels, "label": self.label} if self._kernels else {}


class RandomPages(Retained):
    name = "random-pages"
    label = "floor"


class KVzipPairUniform(Retained):
    name = "kvzip-pair-uniform"
    label = "as published"
