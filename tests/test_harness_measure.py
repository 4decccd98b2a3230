"""One case with backends and timers that misbehave: every failure is one row, and no time is made up."""

from __future__ import annotations

import itertools
import json
import time
from functools import partial
from typing import Any

import pytest
import torch
from harness_fakes import (
    CrashesLater,
    FakeTimer,
    NotInstalled,
    OutOfMemory,
    Zeros,
    bench,
    tiny_case,
    tiny_plan,
)

from harness import memory
from harness.backend import Backend, Launch
from harness.backends.locks import Locks
from harness.backends.sdpa import Sdpa
from harness.case import Case, Model
from harness.level import LevelLaunch
from harness.measure import DeviceLost, measure_case
from harness.outcome import judge
from harness.record import Outcome, Record
from harness.stats import drift, half_width, median_interval
from harness.stopping import MOST_ROUNDS, StoppingRule, warm_up
from harness.timer import WallTimer
from harness.workload import Workload
from locks_kernels.shapes import SelectOptions


def measure(backends: dict[str, Backend], case: Case | None = None, **changes: Any) -> dict[str, Record]:
    case = case or tiny_case()
    keys = {name: f"key of {name}" for name in backends}
    records = measure_case(case, tiny_plan(case), backends, keys, bench(**changes), lambda name: None)
    for record in records:
        json.loads(record.to_json())
    return {record.backend: record for record in records}


def timed(**changes: Any) -> Record:
    values: dict[str, Any] = {
        "key": "k",
        "time": "",
        "command": "",
        "case": {"device": "cuda"},
        "backend": "it",
        "outcome": Outcome.SKIPPED,
        "rounds_ns": [[1e6] * 4] * 10,
        "bytes": {"kv": 4 * 10**9},
        "read_roof_tbps": 4.5,
    }
    return Record(**(values | changes))


# --- outcomes


def test_each_failure_is_one_row_and_the_others_are_timed() -> None:
    records = measure(
        {
            "oom": OutOfMemory(),
            "zeros": Zeros(),
            "sdpa": Sdpa(),
            "missing": NotInstalled(),
            "locks": Locks(),
            "crashes": CrashesLater(),
        }
    )
    assert {name: record.outcome for name, record in records.items()} == {
        "oom": Outcome.OOM,
        "zeros": Outcome.INCORRECT,
        "sdpa": Outcome.OK,
        "missing": Outcome.SKIPPED,
        "locks": Outcome.OK,
        "crashes": Outcome.CRASHED,
    }
    for name, record in records.items():
        if record.outcome is Outcome.OK:
            assert record.reason is None and median_interval(record.rounds_ns or [])[0] > 0
        else:
            assert record.reason and record.rounds_ns is None, name
    assert "pip install" in (records["missing"].reason or "")
    assert "illegal memory access" in (records["crashes"].reason or "")
    assert "\n" not in (records["crashes"].reason or "")


def test_a_case_that_does_not_fit_after_all_is_oom_for_all(monkeypatch: pytest.MonkeyPatch) -> None:
    def build(*_: object) -> Workload:
        raise torch.OutOfMemoryError("no")

    monkeypatch.setattr("harness.workload.build", build)
    assert {record.outcome for record in measure({"a": Sdpa(), "b": Locks()}).values()} == {Outcome.OOM}


def test_a_backend_without_use_for_pooled_pages_is_skipped() -> None:
    case = tiny_case(325, batch=4, kv="pooled")
    plan = memory.plan_memory(case, memory.DeviceMemory(8 << 30, 1 << 20))
    backends: dict[str, Backend] = {"sdpa": Sdpa(), "locks": Locks()}
    records = measure_case(case, plan, backends, {"sdpa": "1", "locks": "2"}, bench(), lambda name: None)
    assert [record.outcome for record in records] == [Outcome.SKIPPED, Outcome.OK]
    assert "one piece" in (records[0].reason or "")


def test_a_level_that_a_model_does_not_have() -> None:
    model = Model("shape", 2, 4, 2, 64, 64, 0, 0, unsupported=(("token", "no weights here"),))
    record = measure({"sdpa": Sdpa()}, Case("token", model, 320, 1, SelectOptions(64), device="cpu"))["sdpa"]
    assert (record.outcome, record.reason) == (Outcome.SKIPPED, "no weights here")


class Uncapturable(Sdpa):
    name = "uncapturable"
    capturable = False


def test_capture_failure_is_typed_and_the_next_backend_runs() -> None:
    records = measure({"uncapturable": Uncapturable(), "sdpa": Sdpa()}, timer=FakeTimer())
    failed = records["uncapturable"]
    assert failed.outcome is Outcome.CAPTURE_FAILED
    assert failed.rounds_ns is None and failed.eager_ns and failed.resolved["eager_timer"] == "fake_eager"
    assert records["sdpa"].outcome is Outcome.OK


def test_a_timer_that_cannot_capture() -> None:
    record = measure({"sdpa": Sdpa()}, timer=FakeTimer(capturable=False))["sdpa"]
    assert record.outcome is Outcome.CAPTURE_FAILED and "stream is capturing" in (record.reason or "")


def test_a_lost_device_gives_back_what_it_could_not_harm() -> None:
    case = tiny_case(device="cuda")
    plan = tiny_plan(tiny_case())
    backends: dict[str, Backend] = {"missing": NotInstalled(), "crashes": OutOfMemory(), "sdpa": Sdpa()}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Sdpa, "supports", lambda self, case: None)
        patch.setattr("harness.workload.build", lambda case, plan, device: None)
        patch.setattr(torch.cuda, "empty_cache", lambda: None)
        with pytest.raises(DeviceLost) as lost:
            measure_case(case, plan, backends, dict.fromkeys(backends, "k"), bench(device_lost=lambda: True), lambda name: None)
    assert [record.backend for record in lost.value.settled] == ["missing", "crashes"]


# --- time


class PlansFor5ms(Sdpa):
    name = "plans"

    def plan(self) -> Any:
        return lambda: time.sleep(0.005)


def test_planning_is_a_column_of_its_own() -> None:
    plans, plain = (measure({"it": backend}, timer=FakeTimer())["it"] for backend in (PlansFor5ms(), Sdpa()))
    assert plans.plan_ns and min(plans.plan_ns) >= 5e6
    assert plans.rounds_ns == plain.rounds_ns
    assert plain.plan_ns is None


def test_only_locks_is_timed_over_a_page_of_lengths() -> None:
    timer = FakeTimer()
    measure({"sdpa": Sdpa(), "locks": Locks()}, timer=timer)
    cycles = {len(run.cycle.phases) for run in timer.runs}
    assert cycles == {1, 16}
    assert next(run for run in timer.runs if len(run.cycle.phases) == 16).cycle.phases == tuple(range(15, -1, -1))


def test_stage_times_are_marginal_and_add_up() -> None:
    times = itertools.chain([1000.0] * 100, itertools.repeat(1000.0))
    record = measure({"locks": Locks()}, timer=FakeTimer(lambda: next(times)))["locks"]
    assert record.stages_ns and list(record.stages_ns) == ["append_finalise", "score", "select", "attend"]
    assert record.resolved["launches"] == list(record.stages_ns)
    assert sum(samples[0] for samples in record.stages_ns.values()) == 1000.0


def test_zero_from_a_timer_is_finite_and_invalid() -> None:
    for value in (0.0, 1e-9):
        timer = FakeTimer(partial(float, value))
        record = measure({"sdpa": Sdpa()}, timer=timer)["sdpa"]
        assert sum(run.asked for run in timer.runs) < 10**6
        assert record.outcome is (Outcome.INVALID if value == 0 else Outcome.OK)
    assert StoppingRule().samples(0.0) == StoppingRule().samples_per_round
    assert StoppingRule().samples(1e9) == 1


def test_impossible_bandwidth_is_invalid() -> None:
    record = timed(rounds_ns=[[0.8e6] * 4] * 10)  # 5 TB/s
    judge(record)
    assert record.outcome is Outcome.INVALID and "5.00 TB/s is above the measured read roof of 4.50" in (record.reason or "")
    at_the_roof = timed(rounds_ns=[[4 / 4.52 * 1e6] * 4] * 10)
    judge(at_the_roof)
    assert at_the_roof.outcome is Outcome.OK


def test_clock_droop_is_throttled() -> None:
    record = timed(rounds_ns=[[1e6 + i] for i in range(5)] + [[1.18e6 + i] for i in range(5)])
    judge(record)
    assert record.outcome is Outcome.THROTTLED and "+18.0%" in (record.reason or "")
    assert record.rounds_ns


def test_cpu_rows_are_not_held_against_roof_or_clocks() -> None:
    record = timed(case={"device": "cpu"}, rounds_ns=[[1e3], [2e3], [3e3], [4e3]])
    judge(record)
    assert record.outcome is Outcome.OK


def test_noise_is_no_drift() -> None:
    assert drift([100, 103, 99, 104, 101, 98, 105, 100]) == 0.0
    assert drift([100, 101, 120, 121]) == pytest.approx(0.199, abs=0.01)
    assert drift([100, 120]) == 0.0


def test_one_fast_sample_does_not_make_a_round() -> None:
    low, (first, last) = median_interval([[100, 100, 100, 1]] * 5 + [[110, 110, 110, 1]] * 5)
    assert low == 105 and (first, last) == (100, 110)
    with pytest.raises(ValueError, match="no samples"):
        median_interval([])


# --- enough samples


def test_stops_at_the_interval() -> None:
    rule = StoppingRule()
    steady = [[100.0 + i % 2 * 0.1] for i in range(10)]
    assert "interval" in (rule.reason(steady, 0.6, 1.0) or "")
    assert rule.reason(steady[:9], 0.6, 1.0) is None, "ten rounds at least"
    assert rule.reason(steady, 0.4, 1.0) is None, "half a second of GPU time at least"


def test_stops_at_the_limit_whatever_the_noise() -> None:
    rule = StoppingRule()
    noisy = [[100.0 * (1 + i % 3)] for i in range(12)]
    assert rule.reason(noisy, 0.6, 14.9) is None
    assert "limit: 15.0 s" in (rule.reason(noisy, 0.6, 15.0) or "")
    assert "limit" in (rule.reason(noisy * 84, 0.0, 0.0) or "") and len(noisy * 84) >= MOST_ROUNDS


def test_half_width_needs_two_rounds() -> None:
    assert half_width([1.0]) == float("inf") and half_width([2.0, 2.0]) == 0.0


def test_warm_up_ends_when_windows_agree_or_time_is_over() -> None:
    rule, clock = StoppingRule(), itertools.count()
    falling = itertools.chain((2e6, 1.5e6, 1.2e6), itertools.repeat(1e6))
    calls: list[int] = []

    def samples(count: int) -> list[float]:
        calls.append(count)
        return [next(falling)] * count

    assert rule.samples(warm_up(samples, rule, 10, lambda: 0.0)) == 5  # 10 steps of 1 ms: five samples of a 50 ms round
    assert len(calls) == 5
    drifting = itertools.count(1e6, 1e5)
    assert warm_up(lambda count: [float(next(drifting))], rule, 1, lambda: next(clock) * 0.3) > 0
    assert next(clock) < 10
    forever = itertools.count(1e6, 1e5)
    assert warm_up(lambda count: [float(next(forever))], rule, 1, lambda: 0.0) > 0, "bounded though the clock stands still"


def test_wall_timer_is_headline_and_has_no_second_column() -> None:
    record = measure({"sdpa": Sdpa()}, timer=WallTimer())["sdpa"]
    assert record.timer == "wall" and record.eager_ns is None and record.stages_ns is None
    assert torch.get_num_threads() >= 1


# --- level token


def test_level_token_counts_all_layers_and_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    def token_launch(case: Case, workload: Workload, backend: Backend, launches: list[Launch]) -> LevelLaunch:
        return LevelLaunch(lambda: [launch() for launch in launches][-1], steps=1, weight_bytes=1000)

    monkeypatch.setattr("harness.token_level.token_launch", token_launch)
    record = measure({"sdpa": Sdpa()}, tiny_case(level="token"), timer=FakeTimer())["sdpa"]
    layer = Sdpa().bytes(tiny_case())
    assert record.bytes == {"kv": 2 * layer["kv"], "page_table": 2 * layer["page_table"], "weights": 1000}
    assert record.stages_ns is None
