"""A sliding window, timed: LOCKS' step without summaries, scores and choice.  What is left of a step when nothing is decided.

Also the time of a method that evicts to the budget once and then attends what it retained (KVzip, pair-uniform, at a ratio of
budget / context).
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from functools import partial
from typing import Any

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


class SlidingWindow(SparseStep):
    name = "sliding-window"

    def __init__(self) -> None:
        super().__init__()
        self._inner: list[Stages] = []
        self._kernels: str | None = None

    def prepare(self, workload: Workload, copy: int) -> Launch:
        on_cpu = workload.device.type == "cpu"
        self._kernels, stages = stages_class("reference" if on_cpu else "auto", workload.caches[copy])
        share = self._inner[0] if self._inner else None
        self._inner.append(stages(workload.caches[copy], workload.sequences, workload.case.select, share))
        out = self._add(workload, copy, self._inner[copy])
        parts = self.stages(workload, copy)

        def launch() -> torch.Tensor:
            for part in parts.values():
                part()
            return out

        return launch

    def stages(self, workload: Workload, copy: int) -> dict[str, Callable[[], object]]:
        stages, shape, options = self._inner[copy], workload.shape, workload.case.select
        keys, values = workload.new_keys[copy], workload.new_values[copy]
        if workload.device.type == "cpu":

            def select() -> None:
                stages.tables = _window(workload)

            append = partial(reference.append, workload.caches[copy], workload.sequences, keys, values)
        else:
            kernels = importlib.import_module("locks_kernels.window")
            select = partial(kernels.window, stages.tables, workload.sequences, shape, options)
            append = importlib.import_module("locks_kernels.build").append
            append = partial(append, workload.caches[copy], workload.sequences, keys, values)
        attend = partial(stages.attend, workload.queries[copy], self._outputs[copy])
        return {"append": append, "select": select, "attend": attend}

    def check(self, workload: Workload, copy: int) -> list[Check]:
        same = torch.equal(self._inner[copy].tables, _window(workload))
        return [Check("tables_are_the_window", same, same)]

    def bytes(self, case: Case) -> dict[str, int]:
        shape = local_shape(case)
        kept = min(case.select.kept_pages(shape.page_size), shape.pages(case.ctx))
        table = 2 * case.batch * shape.kv_heads * kept * TABLE_ENTRY_BYTES
        return {**page_selector_bytes(shape, case.select, case.ctx, case.batch, 0), "page_table": table}

    def stage_bytes(self, case: Case) -> dict[str, int]:
        parts = self.bytes(case)
        half = parts["page_table"] // 2
        return {"select": half, "attend": parts["selected_kv"] + half}

    def resolved(self) -> dict[str, Any]:
        return {"kernels": self._kernels, "label": "floor"} if self._kernels else {}


def _window(workload: Workload) -> torch.Tensor:
    """The tables in plain torch, int32 [B, H, K]: later pages score higher."""
    shape, sequences, options = workload.shape, workload.sequences, workload.case.select
    score = torch.arange(sequences.max_pages, dtype=torch.float32, device=workload.device)
    return reference.select(score.expand(sequences.batch, shape.kv_heads, -1), sequences, shape, options)
