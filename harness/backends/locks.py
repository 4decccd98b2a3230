"""LOCKS: append, finalise, score, select and attend, all inside the timed step."""

from __future__ import annotations

from functools import partial
from typing import Any, ClassVar

from harness.backend import Check, Launch
from harness.backends.sparse import STARTS_EARLY, SparseStep
from harness.case import Case
from harness.memory import local_shape
from harness.verify_selection import check_summaries, check_tables
from harness.workload import Workload
from locks_kernels.cache import PagedCache
from locks_kernels.cost import locks_bytes, locks_stage_bytes
from locks_kernels.decode import WHOLE_STEP, LocksDecoder, stages_class
from locks_kernels.shapes import ShapeError


class Locks(SparseStep):
    """The best kernels that this device runs; on a CPU the plain-torch reference."""

    name = "locks"
    kernels: ClassVar[str] = "auto"

    def __init__(self) -> None:
        super().__init__()
        self._decoders: list[LocksDecoder] = []

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
            starts_early=STARTS_EARLY,
        )
        if copy < workload.plan.copies:
            decoder.prefill()
        self._decoders.append(decoder)
        out = self._add(workload, copy, decoder.stages)
        return partial(decoder.step, workload.queries[copy], workload.new_keys[copy], workload.new_values[copy], out)

    def check(self, workload: Workload, copy: int) -> list[Check]:
        tables = check_tables(workload, copy, self._decoders[copy].tables, workload.case.select)
        return [*tables, check_summaries(workload, copy)]

    def stage_bytes(self, case: Case) -> dict[str, int]:
        parts = locks_stage_bytes(local_shape(case), case.select, case.ctx, case.batch)
        whole = bool(self._decoders) and self._decoders[0].launches == [WHOLE_STEP]
        return {WHOLE_STEP: sum(parts.values())} if whole else parts

    def bytes(self, case: Case) -> dict[str, int]:
        return locks_bytes(local_shape(case), case.select, case.ctx, case.batch)

    def resolved(self) -> dict[str, Any]:
        if not self._decoders:
            return {}
        decoder = self._decoders[0]
        return {
            "kernels": decoder.kernels,
            "launches": decoder.launches,
        }


class LocksCuda(Locks):
    name = "locks-cuda"
    kernels = "cuda"


class LocksTriton(Locks):
    name = "locks-triton"
    kernels = "triton"
