"""The contract a measured thing fulfils.  A user's own kernel is a class of ten lines and an entry point
`locks_bench.backends`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, ClassVar

if TYPE_CHECKING:
    import torch

    from harness.case import Case
    from harness.workload import Workload

Launch = Callable[[], "torch.Tensor"]


class Backend:
    """Base class with the answers that most backends share.

    One instance measures one workload copy (one layer): `prepare` is called once per copy and may share workspace between
    copies through `self`.
    """

    name: ClassVar[str]
    dense: ClassVar[bool] = False  # full attention: a rival for `speedup_vs_best_dense`
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
        [B, HQ, D] (the same tensor each time)."""
        raise NotImplementedError

    def expected(self, workload: Workload, copy: int) -> torch.Tensor:
        """What the output must be, computed in plain torch: full attention unless the method says otherwise."""
        raise NotImplementedError

    def bytes(self, case: Case) -> dict[str, int]:
        """Analytic bytes of one layer's step by part."""
        raise NotImplementedError

    def resolved(self) -> dict[str, Any]:
        """What really runs, after `prepare`: kernels, page size, splits, tensor cores."""
        return {}
