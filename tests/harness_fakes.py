"""Small cases, and backends and timers that misbehave in one known way."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import torch

from harness.backend import Backend, Launch
from harness.backends.sdpa import Sdpa
from harness.case import Case, Model
from harness.level import LevelLaunch
from harness.measure import Bench
from harness.memory import DeviceMemory, MemoryPlan, plan_memory
from harness.stopping import StoppingRule
from harness.timer import CaptureError, Cycle, WallTimer
from harness.workload import Workload, build
from locks_kernels.shapes import SelectOptions

TINY = Model("tiny", layers=2, query_heads=4, kv_heads=2, head_dim=64, hidden=64, mlp=64, vocabulary=64)
MEMORY = DeviceMemory(free_bytes=64 << 30, l2_bytes=50 << 20)
QUICK = StoppingRule(rounds=3, timed_s=0.0, limit_s=0.2, round_s=0.0, warm_s=0.0)


def tiny_case(ctx: int = 320, batch: int = 2, **changes: Any) -> Case:
    values: dict[str, Any] = {"level": "attention", "model": TINY, "select": SelectOptions(64), "device": "cpu"}
    return Case(ctx=ctx, batch=batch, **(values | changes))


def tiny_plan(case: Case, copies: int = 2) -> MemoryPlan:
    return plan_memory(Case(**(vars(case) | {"kv": f"layers={copies}"})), MEMORY)


def tiny_workload(case: Case | None = None, copies: int = 2) -> Workload:
    case = case or tiny_case()
    return build(case, tiny_plan(case, copies), "cpu")


def bench(timer: Any = None, **changes: Any) -> Bench:
    values: dict[str, Any] = {"rule": QUICK, "environment": {}, "command": "test", "device_lost": lambda: False}
    return Bench(timer=timer or WallTimer(), **(values | changes))


CALLS = itertools.count()


class FakeRun:
    def __init__(self, level: LevelLaunch, cycle: Cycle, sample: Callable[[], float]) -> None:
        self.level, self.cycle, self.sample = level, cycle, sample
        self.asked = 0
        self.called_at: list[int] = []

    def once(self, phase: int) -> list[torch.Tensor]:
        self.cycle.set_phase(phase)
        outputs = self.level.launch()
        return [outputs] if isinstance(outputs, torch.Tensor) else list(outputs)

    def samples(self, count: int) -> list[float]:
        self.asked += count
        self.called_at.append(next(CALLS))
        return [self.sample() for _ in range(count)]


class FakeTimer:
    """A graph timer whose samples are scripted."""

    label = "fake_graph"
    eager_label: str | None = "fake_eager"

    def __init__(self, sample: Callable[[], float] = lambda: 1000.0, capturable: bool = True) -> None:
        self.sample, self.capturable = sample, capturable
        self.runs: list[FakeRun] = []

    def capture(self, level: LevelLaunch, cycle: Cycle) -> FakeRun:
        if not self.capturable:
            raise CaptureError("operation not permitted when stream is capturing")
        return self.eager(level, cycle)

    def eager(self, level: LevelLaunch, cycle: Cycle) -> FakeRun:
        self.runs.append(FakeRun(level, cycle, self.sample))
        return self.runs[-1]


class Zeros(Sdpa):
    """Returns zeros, fast."""

    name = "zeros"

    def prepare(self, workload: Workload, copy: int) -> Launch:
        out = torch.zeros_like(workload.queries[copy])
        return lambda: out


class OneWrongHead(Sdpa):
    name = "one-wrong-head"

    def prepare(self, workload: Workload, copy: int) -> Launch:
        launch = super().prepare(workload, copy)

        def wrong() -> torch.Tensor:
            out = launch().clone()
            out[-1, -1] = out[-1, 0]
            return out

        return wrong


class Drifting(Sdpa):
    """Right at first, then a little different at each call."""

    name = "drifting"

    def prepare(self, workload: Workload, copy: int) -> Launch:
        launch, calls = super().prepare(workload, copy), iter(range(1000))
        return lambda: launch() * (1 + 0.004 * next(calls))


class OutOfMemory(Sdpa):
    name = "oom"

    def prepare(self, workload: Workload, copy: int) -> Launch:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20 GiB")


class CrashesLater(Sdpa):
    """Passes its gate and dies in the rounds."""

    name = "crashes"

    def prepare(self, workload: Workload, copy: int) -> Launch:
        launch, calls = super().prepare(workload, copy), iter(range(12))

        def sometimes() -> torch.Tensor:
            if next(calls, None) is None:
                raise RuntimeError("CUDA error: an illegal memory access was encountered\nlong explanation")
            return launch()

        return sometimes


class NotInstalled(Backend):
    name = "missing"

    def unavailable(self) -> str:
        return "not here: pip install something"
