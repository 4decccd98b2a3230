"""One backend in one case: prepared, checked, captured, then timed round by round beside its rivals."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field

import torch

from harness.backend import Backend, Launch
from harness.case import Case
from harness.level import LevelLaunch, level_launch
from harness.record import Record
from harness.stopping import StoppingRule, warm_up
from harness.timer import CaptureError, Cycle, Run, Timer, first_line
from harness.verify import Gate, check_eager, check_graph
from harness.workload import Workload

EAGER_SAMPLES = 5
PLAN_CALLS = 5
STAGE_SAMPLES = 5


@dataclass
class Contestant:
    """`rounds` holds samples in time order, one list per round; `count` samples are taken in each, after `settling` untimed
    ones."""

    case: Case
    data: Workload
    backend: Backend
    level: LevelLaunch
    cycle: Cycle
    run: Run
    count: int
    settling: int
    rounds: list[list[float]] = field(default_factory=list)
    timed_s: float = 0.0
    spent_s: float = 0.0
    stop_reason: str | None = None

    @property
    def steps(self) -> int:
        """Steps of one sample."""
        return self.level.steps * len(self.cycle.phases)

    def round(self, rule: StoppingRule, clock_s: Callable[[], float], disturbed: bool) -> None:
        """Take the samples of one round; the latest reason to stop stays.  disturbed: another backend ran last."""
        start = clock_s()
        if disturbed and self.settling:
            self.run.samples(self.settling)
        samples = self.run.samples(self.count)
        self.spent_s += clock_s() - start
        self.timed_s += sum(samples) * self.steps * 1e-9
        self.rounds.append(samples)
        self.stop_reason = rule.reason(self.rounds, self.timed_s, self.spent_s) or self.stop_reason

    def finish(self, record: Record, timer: Timer) -> None:
        """Fill in what only a timed backend has."""
        record.rounds_ns, record.stop_reason = self.rounds, self.stop_reason
        record.bytes = level_bytes(self.case, self.backend, self.level)
        if self.case.level == "attention" and timer.eager_label is not None:  # eager stages on a CPU tell nothing
            try:
                record.stages_ns = stage_times(self.data, self.backend, self.cycle, timer)
                record.stage_bytes = self.backend.stage_bytes(self.case) if record.stages_ns else None
            except Exception as error:  # a by-product: the headline stands without it
                record.resolved["stages"] = f"not timed: {first_line(error)}"


def prepare(
    case: Case,
    data: Workload,
    backend: Backend,
    timer: Timer,
    rule: StoppingRule,
    record: Record,
    clock_s: Callable[[], float],
) -> Contestant:
    """Everything before the rounds.  Fills the record as it goes, so that a failure keeps what was learnt before it."""
    data.set_phase(0)  # a backend that failed may have left another length
    launches: list[Launch] = [backend.prepare(data, copy) for copy in range(data.plan.launches)]
    record.resolved = {"dense": backend.dense} | backend.resolved()
    cycle = Cycle(data.set_phase, tuple(data.phases) if backend.writes_cache else (0,))
    gate = Gate(data)
    check_eager(gate, data, backend, launches, cycle)
    record.gate = gate.record()
    record.plan_ns = _plan_times(backend)
    level = level_launch(case, data, backend, launches)
    eager = timer.eager(level, cycle)
    if timer.eager_label is not None:
        record.resolved["eager_timer"] = timer.eager_label
        record.eager_ns = eager.samples(EAGER_SAMPLES)
        if not backend.capturable:
            raise CaptureError("its launches look at device values from the host")
    run = timer.capture(level, cycle)
    check_graph(gate, run, eager, cycle, case.level)
    record.gate = gate.record()
    steps = level.steps * len(cycle.phases)
    sample_s = warm_up(run.samples, rule, steps, clock_s)
    return Contestant(case, data, backend, level, cycle, run, rule.samples(sample_s), rule.settling(sample_s))


def level_bytes(case: Case, backend: Backend, level: LevelLaunch) -> dict[str, int]:
    """Analytic bytes of one step of the level: one layer, or all layers and the weights."""
    parts = backend.bytes(case)
    if case.level == "attention":
        return parts
    return {name: size * case.model.layers for name, size in parts.items()} | {"weights": level.weight_bytes}


def stage_times(data: Workload, backend: Backend, cycle: Cycle, timer: Timer) -> dict[str, list[float]] | None:
    """What each stage adds to the step: the launches up to and including it, less those before it, both over all copies.

    A stage by itself would find the few bytes it reads in L2, since only the stages before it sweep the cache; so these
    times add up to the step, and a stage that overlaps with the one before costs less than alone.
    """
    by_copy = [list(backend.stages(data, copy).items()) for copy in range(data.plan.launches)]
    times: dict[str, list[float]] = {}
    before = [0.0] * STAGE_SAMPLES
    for index, (name, _) in enumerate(by_copy[0]):
        parts = [[launch for _, launch in stages[: index + 1]] for stages in by_copy]
        run = timer.capture(LevelLaunch(_prefix(parts), len(parts)), cycle)
        run.samples(1)
        upto = run.samples(STAGE_SAMPLES)
        times[name] = [after - earlier for after, earlier in zip(upto, before, strict=True)]
        before = upto
    return times or None


def _prefix(parts: list[list[Callable[[], object]]]) -> Callable[[], list[torch.Tensor]]:
    def launch() -> list[torch.Tensor]:
        for stages in parts:
            for stage in stages:
                stage()
        return []

    return launch


def _plan_times(backend: Backend) -> list[float] | None:
    """Host time of the planning call; no time before it is counted, since nothing is in flight."""
    plan = backend.plan()
    if plan is None:
        return None
    times = []
    for _ in range(PLAN_CALLS):
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        start = time.perf_counter_ns()
        plan()
        times.append(float(time.perf_counter_ns() - start))
    return times
