"""The contract a measured thing fulfils.  A user's own kernel is a class of ten lines and an entry point
`locks_bench.backends`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

if TYPE_CHECKING:
    import torch

    from harness.case import Case
    from harness.workload import Workload

Launch = Callable[[], "torch.Tensor"]


@dataclass(frozen=True)
class Check:
    """One thing that a gate looked at; `value` is what it found, as plain data."""

    name: str
    passed: bool
    value: Any


class Backend:
    """Base class with the answers that most backends share.

    One instance measures one case: `prepare` is called once per copy (one layer) of its workload, in order, and may share
    workspace between copies through `self`.
    """

    name: ClassVar[str]
    dense: ClassVar[bool] = False  # full attention: a rival for `speedup_vs_best_dense`
    writes_cache: ClassVar[bool] = False  # appends the new token itself; timed over whole pages of growing length
    capturable: ClassVar[bool] = True

    def unavailable(self) -> str | None:
        """Why it cannot run on this machine at all (missing library: with the pip command that brings it), or None."""
        return None

    def supports(self, case: Case) -> str | None:
        """Why it cannot run this case, or None."""
        return None

    def version(self) -> str | None:
        """Version of the library behind it."""
        return None

    def prepare(self, workload: Workload, copy: int) -> Launch:
        """Allocate, plan and compile for copy `copy` of the workload; the result only launches, and returns the output
        [B, HQ, D].  UnsupportedWorkload says why this data cannot be used."""
        raise NotImplementedError

    def expected(self, workload: Workload, copy: int) -> torch.Tensor:
        """What the output of the copy launched last must be for the sequences `workload.checked`, fp32 [checked, HQ, D],
        in plain torch: full attention unless the method says otherwise."""
        from harness.expected import full_attention

        return full_attention(workload, copy)

    def check(self, workload: Workload, copy: int) -> list[Check]:
        """What else must hold after the launch of `copy`, for a method that does more than attend."""
        return []

    def plan(self) -> Callable[[], None] | None:
        """The library's planning call that an engine repeats for every step, after `prepare`; its host time is a column of
        its own.  None where there is none."""
        return None

    def stages(self, workload: Workload, copy: int) -> dict[str, Callable[[], object]]:
        """The parts of the launch of `copy`, in order, where their times are of interest."""
        return {}

    def stage_bytes(self, case: Case) -> dict[str, int]:
        """Analytic bytes of one layer by stage, for those of `stages` that have a floor."""
        return {}

    def bytes(self, case: Case) -> dict[str, int]:
        """Analytic bytes of one layer's step by part."""
        raise NotImplementedError

    def side_bytes(self, case: Case) -> int:
        """Memory that it keeps of every physical page of a layer, all KV heads, beside the workload's own cache."""
        return 0

    def distinct_bytes(self, case: Case, copies: int, launches: int) -> int:
        """Read from the first launch on until something is read again, of `launches` that rotate over `copies` of a layer."""
        return copies * sum(self.bytes(case).values())

    def resolved(self) -> dict[str, Any]:
        """What really runs, after `prepare`: kernels, page size, splits, tensor cores."""
        return {}


class UnsupportedWorkload(Exception):
    """A backend cannot use the data of this case as it lies in memory; the row is SKIPPED with this reason."""
