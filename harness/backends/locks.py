"""LOCKS: append, finalise, score, select and attend, all inside the timed step."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, ClassVar

import torch

from harness.backend import Backend, Check, Launch
from harness.case import Case
from harness.environment import version
from harness.memory import local_shape
from harness.verify_selection import check_summaries, check_tables, checked_sequences
from harness.workload import Workload
from locks_kernels import reference
from locks_kernels.cache import PagedCache
from locks_kernels.cost import locks_bytes, locks_stage_bytes
from locks_kernels.decode import STAGE_NAMES, LocksDecoder, stages_class
from locks_kernels.shapes import ShapeError


class Locks(Backend):
    """The best kernels that this device runs; on a CPU the plain-torch reference."""

    name = "locks"
    writes_cache = True
    kernels: ClassVar[str] = "auto"

    def __init__(self) -> None:
        self._decoders: list[LocksDecoder] = []
        self._outputs: list[torch.Tensor] = []

    def version(self) -> str | None:
        return version("locks-bench")

    def supports(self, case: Case) -> str | None:
        try:
            stages_class(self._kernels(case), PagedCache.allocate(local_shape(case), 1, case.device))
        except ShapeError as error:
            return str(error)
        return None

    def _kernels(self, case: Case) -> str:
        return "reference" if case.device == "cpu" and self.kernels == "auto" else self.kernels

    def prepare(self, workload: Workload, copy: int) -> Launch:
        decoder = LocksDecoder(
            workload.caches[copy],
            workload.sequences,
            workload.case.select,
            kernels=self._kernels(workload.case),
            share=self._decoders[0] if self._decoders else None,
        )
        if copy < workload.plan.copies:
            decoder.prefill()
        self._decoders.append(decoder)
        query, keys, values = workload.queries[copy], workload.new_keys[copy], workload.new_values[copy]
        self._outputs.append(torch.empty_like(query))
        return partial(decoder.step, query, keys, values, self._outputs[copy])

    def expected(self, workload: Workload, copy: int) -> torch.Tensor:
        """Exact attention over the pages that the step itself kept; whether they are the right ones is `check`."""
        rows = workload.checked
        tables = self._decoders[copy].tables[rows]
        query = workload.queries[copy][rows].float()
        return reference.attend(query, workload.caches[copy], checked_sequences(workload), tables)[0]

    def check(self, workload: Workload, copy: int) -> list[Check]:
        tables = check_tables(workload, copy, self._decoders[copy].tables, workload.case.select)
        return [*tables, check_summaries(workload, copy)]

    def stages(self, workload: Workload, copy: int) -> dict[str, Callable[[], object]]:
        stages, query, out = self._decoders[copy].stages, workload.queries[copy], self._outputs[copy]

        parts: tuple[Callable[[], object], ...] = (
            partial(stages.append_finalise, workload.new_keys[copy], workload.new_values[copy]),
            partial(stages.score, query),
            stages.select,
            partial(stages.attend, query, out),
        )
        return dict(zip(STAGE_NAMES, parts, strict=True))

    def stage_bytes(self, case: Case) -> dict[str, int]:
        return locks_stage_bytes(local_shape(case), case.select, case.ctx, case.batch)

    def bytes(self, case: Case) -> dict[str, int]:
        return locks_bytes(local_shape(case), case.select, case.ctx, case.batch)

    def resolved(self) -> dict[str, Any]:
        return {"kernels": self._decoders[0].kernels} if self._decoders else {}


class LocksCuda(Locks):
    name = "locks-cuda"
    kernels = "cuda"


class LocksTriton(Locks):
    name = "locks-triton"
    kernels = "triton"
