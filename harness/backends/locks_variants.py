"""LOCKS at another rank, or with the other combination of a group, than the case asks for: its own kernels, other options.

A rank of its own has summaries of its own beside the workload's; everything else is the backend `locks` on the same keys.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, ClassVar

import torch

from harness.backend import Check, Launch
from harness.backends.locks import Locks
from harness.case import Case
from harness.memory import local_shape
from harness.workload import Workload
from locks_kernels.cache import PagedCache
from locks_kernels.shapes import Combine
from locks_kernels.summary import RecordLayout

UNBUILT = 0xFF  # not a number in any field


class LocksVariant(Locks):
    """Names are those of locks_kernels.selectors."""

    rank: ClassVar[int]
    combine: ClassVar[Combine] = "share"

    def __init__(self) -> None:
        super().__init__()
        self._own: Workload | None = None

    def supports(self, case: Case) -> str | None:
        other_rank, other_combine = case.rank != self.rank, case.select.combine != self.combine
        if not other_rank and not other_combine:
            return "not timed twice: in this case it is what `locks` is"
        if other_rank and other_combine:
            return f"not timed here: use --backends locks --rank {self.rank} --combine {self.combine}"
        return super().supports(self._case(case))

    def _case(self, case: Case) -> Case:
        return replace(case, rank=self.rank, select=replace(case.select, combine=self.combine))

    def _workload(self, workload: Workload) -> Workload:
        """The same data with summaries of this rank, allocated once."""
        if self._own is None:
            case = self._case(workload.case)
            caches = workload.caches
            if self.rank != workload.case.rank:
                shape = local_shape(case)
                pools = [_with_rank(cache, self.rank) for cache in caches[: workload.plan.copies]]
                caches = [pools[copy % len(pools)] for copy in range(len(caches))]
                self._own = replace(workload, case=case, shape=shape, caches=caches)
            else:
                self._own = replace(workload, case=case)
        return self._own

    def prepare(self, workload: Workload, copy: int) -> Launch:
        own = self._workload(workload)
        launch = super().prepare(own, copy)
        if copy < workload.plan.copies and self.rank != workload.case.rank:
            own.caches[copy].summaries[own.new_token_slots()[0]] = UNBUILT  # the step has to summarise these itself
        return launch

    def expected(self, workload: Workload, copy: int) -> torch.Tensor:
        return super().expected(self._workload(workload), copy)

    def check(self, workload: Workload, copy: int) -> list[Check]:
        return super().check(self._workload(workload), copy)

    def side_bytes(self, case: Case) -> int:
        if case.rank == self.rank or case.select.combine != self.combine:
            return 0
        shape = local_shape(self._case(case))
        return shape.kv_heads * RecordLayout.of(shape).record_bytes

    def stage_bytes(self, case: Case) -> dict[str, int]:
        return super().stage_bytes(self._case(case))

    def bytes(self, case: Case) -> dict[str, int]:
        return super().bytes(self._case(case))

    def resolved(self) -> dict[str, Any]:
        return {**super().resolved(), "rank": self.rank, "combine": self.combine, "label": "LOCKS"} if self._decoders else {}


def _with_rank(cache: PagedCache, rank: int) -> PagedCache:
    shape = replace(cache.shape, rank=rank)
    size = (cache.num_pages, shape.kv_heads, RecordLayout.of(shape).record_bytes)
    summaries = torch.full(size, UNBUILT, dtype=torch.uint8, device=cache.keys.device)
    return PagedCache(shape, cache.keys, cache.values, summaries)


class LocksR8(LocksVariant):
    name, rank = "locks-r8", 8


class LocksR4(LocksVariant):
    name, rank = "locks-r4", 4


class LocksR2(LocksVariant):
    name, rank = "locks-r2", 2


class LocksR8Peak(LocksVariant):
    name, rank, combine = "locks-r8-peak", 8, "peak"


class LocksR4Peak(LocksVariant):
    name, rank, combine = "locks-r4-peak", 4, "peak"


class LocksR2Peak(LocksVariant):
    name, rank, combine = "locks-r2-peak", 2, "peak"
