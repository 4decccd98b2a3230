"""The gate: no time before these checks are green.  A backend that fails one gets INCORRECT and is not timed."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch

from harness.backend import Backend, Check, Launch

if TYPE_CHECKING:
    from harness.case import Level
    from harness.timer import Cycle, Run
    from harness.workload import Workload

ERROR_TOLERANCE = 1e-2  # of the worst head: distance to the expected output over its length
REPEAT_TOLERANCE = 1e-3  # same, between two runs: kernels with atomics may differ in the last bits ...
# ... and through all layers of a model these grow; a stale length or a dropped layer moves logits by their own size.
GRAPH_TOLERANCE = {"attention": REPEAT_TOLERANCE, "token": 3e-2}


class Incorrect(Exception):
    """A check failed; `.gate` holds everything that was looked at."""

    def __init__(self, reason: str, gate: Gate) -> None:
        super().__init__(reason)
        self.gate = gate


class Gate:
    """Collects checks and turns them into the `gate` field of a record."""

    def __init__(self, workload: Workload) -> None:
        self.checks: list[Check] = []
        self.error = 0.0
        self.checked = f"{len(workload.checked)} of {workload.case.batch}"

    def add(self, *checks: Check) -> None:
        """Keep the checks; Incorrect at the first one that failed."""
        for check in checks:
            self.checks.append(check)
            if not check.passed:
                raise Incorrect(f"check {check.name} failed: {check.value}", self)

    def compare(self, name: str, output: torch.Tensor, expected: torch.Tensor, tolerance: float = ERROR_TOLERANCE) -> None:
        """Relative error of the worst head of [..., D] tensors."""
        error = relative_error(output, expected)
        self.error = max(self.error, error) if name == "relative_error" else self.error
        self.checks.append(Check(name, error <= tolerance, error))
        if output.shape != expected.shape:
            raise Incorrect(f"check {name} failed: shape {tuple(output.shape)}, it must be {tuple(expected.shape)}", self)
        if not error <= tolerance:
            raise Incorrect(f"check {name} failed: {error:.4g}, at most {tolerance:g} is right", self)

    def record(self) -> dict[str, Any]:
        return {
            "relative_error": _plain(self.error),
            "tolerance": ERROR_TOLERANCE,
            "sequences": self.checked,
            "checks": {check.name: _plain(check.value) for check in self.checks},
        }


def relative_error(output: torch.Tensor, expected: torch.Tensor) -> float:
    """Largest ||output - expected|| / ||expected|| over the last axis; NaN or a wrong shape gives infinity."""
    if output.shape != expected.shape:
        return math.inf
    expected = expected.float()
    error = (output.float() - expected).norm(dim=-1) / expected.norm(dim=-1).clamp_min(1e-30)
    return float(error.nan_to_num(math.inf).max())


def check_eager(gate: Gate, workload: Workload, backend: Backend, launches: Sequence[Launch], cycle: Cycle) -> None:
    """Reference error, finite everywhere, same result twice; with unused slots and what is about to be written poisoned."""
    workload.restore_new_tokens()
    try:
        if backend.writes_cache:
            workload.poison_new_tokens()
        looked_at = {(cycle.phases[0], 0), (cycle.phases[-1], len(launches) - 1)}  # phase and copy: as far apart as can be
        for phase in cycle.phases:
            workload.set_phase(phase)
            _check_phase(gate, workload, backend, launches, [copy for at, copy in looked_at if at == phase])
        if backend.writes_cache:
            intact = workload.new_tokens_intact()
            gate.add(Check("new_tokens_written", intact, intact))
    finally:
        workload.restore_new_tokens()


def _check_phase(gate: Gate, workload: Workload, backend: Backend, launches: Sequence[Launch], closely: list[int]) -> None:
    finite = []
    for copy, launch in enumerate(launches):
        output = launch()
        finite.append(output.isfinite().all())
        if copy in closely:
            first = output.clone()
            gate.compare("relative_error", first[workload.checked], backend.expected(workload, copy))
            gate.add(*backend.check(workload, copy))
            second = launch()
            gate.add(Check("bitwise_repeatable", True, torch.equal(first, second)))
            gate.compare("repeat_error", second, first, REPEAT_TOLERANCE)
    whole = bool(torch.stack(finite).all())
    gate.add(Check("finite", whole, whole))


def check_graph(gate: Gate, run: Run, eager: Run, cycle: Cycle, level: Level) -> None:
    """The captured graph gives what the same launches give without it, also at a length it was not captured at."""
    for phase in dict.fromkeys((cycle.phases[0], cycle.phases[-1])):
        expected = [output.clone() for output in eager.once(phase)]
        for output in run.once(phase):
            output.fill_(math.nan)  # what the graph does not write again was launched outside of it
        found = run.once(phase)
        same = all(bool(output.isfinite().all()) for output in found)
        gate.add(Check("graph_finite", same, same))
        errors = [relative_error(output, want) for output, want in zip(found, expected, strict=True)]
        gate.add(Check("graph_equals_eager", max(errors) <= GRAPH_TOLERANCE[level], max(errors)))


def _plain(value: Any) -> Any:
    """Numbers that JSON can hold: what is not finite is said in words."""
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    return value
