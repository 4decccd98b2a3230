"""A sweep: what is stored, what is not measured again, and what happens when a process dies."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path

import pytest
from harness_fakes import OutOfMemory, Zeros, bench, tiny_case, tiny_plan

from harness import backends, run
from harness.backend import Backend
from harness.backends.locks import Locks
from harness.backends.sdpa import Sdpa
from harness.case import Case
from harness.errors import UserError
from harness.record import Outcome, Record
from harness.run import BackendStarted, CaseStarted, Event, LeftOut, Measurer, RecordDone, RunOptions, run_sweep
from harness.stats import median_interval
from harness.store import Store, load
from harness.worker import InProcess, Job, Settings, Worker, WorkerDied, serve

FAKES: dict[str, type[Backend]] = {"sdpa": Sdpa, "locks": Locks, "zeros": Zeros, "oom": OutOfMemory}


@pytest.fixture(autouse=True)
def fakes(monkeypatch: pytest.MonkeyPatch) -> None:
    def load_fake(name: str) -> type[Backend]:
        if name not in FAKES:
            raise UserError(f"backend {name!r} cannot be loaded")
        return FAKES[name]

    monkeypatch.setattr(backends, "load", load_fake)


class Counting(InProcess):
    """In this process; `jobs` are the backends asked for, job by job."""

    jobs: list[list[str]] = []  # noqa: RUF012  reset by `sweep`

    def measure(self, job: Job, on_backend: Callable[[str], None]) -> list[Record]:
        self.jobs.append(list(job.keys))
        return super().measure(job, on_backend)


def sweep(store: Store, cases: list[Case], names: list[str], **options: object) -> tuple[list[Record], list[Event]]:
    events: list[Event] = []
    Counting.jobs = []
    chosen = RunOptions(command="locks-bench latency", **options)  # type: ignore[arg-type]
    records = run_sweep(cases, names, store, chosen, events.append, lambda settings: Counting(bench()))
    return records, events


def test_a_second_run_measures_nothing(tmp_path: Path) -> None:
    cases = [tiny_case(320), tiny_case(325)]
    first, events = sweep(Store(tmp_path), cases, ["sdpa", "locks", "zeros"])
    assert [record.outcome for record in first] == [Outcome.OK, Outcome.OK, Outcome.INCORRECT] * 2
    assert [type(event) for event in events[:3]] == [CaseStarted, BackendStarted, BackendStarted]
    again, events = sweep(Store(tmp_path), cases, ["sdpa", "locks", "zeros"])
    assert Counting.jobs == []
    assert [record.to_json() for record in again] == [record.to_json() for record in first]
    assert all(event.reused for event in events if isinstance(event, RecordDone))
    assert len(load([tmp_path])) == 6


def test_only_what_is_missing_is_measured(tmp_path: Path) -> None:
    sweep(Store(tmp_path), [tiny_case()], ["sdpa"])
    records, _ = sweep(Store(tmp_path), [tiny_case()], ["locks", "sdpa"])
    assert Counting.jobs == [["locks"]]
    assert [record.backend for record in records] == ["locks", "sdpa"]
    sweep(Store(tmp_path), [tiny_case(seed=1)], ["sdpa"])
    assert Counting.jobs == [["sdpa"]], "another seed is another measurement"


def test_what_may_go_better_is_tried_again(tmp_path: Path) -> None:
    sweep(Store(tmp_path), [tiny_case()], ["oom", "sdpa"])
    records, _ = sweep(Store(tmp_path), [tiny_case()], ["oom", "sdpa"])
    assert Counting.jobs == [["oom"]]
    assert records[0].outcome is Outcome.OOM


def test_a_throttled_row_is_measured_again_as_its_reason_asks(tmp_path: Path) -> None:
    (record,), _ = sweep(Store(tmp_path), [tiny_case()], ["sdpa"])
    record.outcome, record.reason = Outcome.THROTTLED, "let the GPU cool and repeat"
    Store(tmp_path).append(record)
    (again,), _ = sweep(Store(tmp_path), [tiny_case()], ["sdpa"])
    assert Counting.jobs == [["sdpa"]] and again.outcome is Outcome.OK


def test_every_case_is_on_disk_before_the_next(tmp_path: Path) -> None:
    store, cases = Store(tmp_path), [tiny_case(320), tiny_case(325)]
    stored: list[int] = []

    def on_event(event: Event) -> None:
        if isinstance(event, CaseStarted):
            stored.append(len(load([tmp_path])) if stored else 0)

    run_sweep(cases, ["sdpa"], store, RunOptions("c"), on_event, lambda settings: Counting(bench()))
    assert stored == [0, 1]


def test_past_the_time_budget_cases_are_left_out(tmp_path: Path) -> None:
    sweep(Store(tmp_path), [tiny_case(325)], ["sdpa"])
    cases = [tiny_case(320), tiny_case(325), tiny_case(330)]
    records, events = sweep(Store(tmp_path), cases, ["sdpa"], time_budget_s=-1.0)
    assert [event.case.ctx for event in events if isinstance(event, LeftOut)] == [320, 330]
    assert [record.case["ctx"] for record in records] == [325], "what the store has costs no time"
    assert len(load([tmp_path])) == 1


def test_a_plan_that_cannot_be_is_a_row(tmp_path: Path) -> None:
    cases = [tiny_case(1 << 24, kv="resident"), tiny_case()]
    records, events = sweep(Store(tmp_path), cases, ["sdpa"])
    assert [record.outcome for record in records] == [Outcome.SKIPPED, Outcome.OK]
    assert "needs" in (records[0].reason or "") and records[0].kv is None
    assert "needs" in next(event.plan_text for event in events if isinstance(event, CaseStarted))


def test_a_backend_that_cannot_be_loaded_is_a_row(tmp_path: Path) -> None:
    records, _ = sweep(Store(tmp_path), [tiny_case()], ["broken", "sdpa"])
    assert [record.outcome for record in records] == [Outcome.SKIPPED, Outcome.OK]
    assert "cannot be loaded" in (records[0].reason or "")


def test_sdpa_and_locks_end_to_end_on_a_cpu(tmp_path: Path) -> None:
    """No fakes: the real bench, the real store."""
    case = tiny_case(512, batch=1)
    records = run_sweep([case], ["sdpa", "locks"], Store(tmp_path), RunOptions("locks-bench latency"), lambda event: None)
    for record in records:
        assert record.outcome is Outcome.OK, record.reason
        assert record.timer == "wall" and record.cache_state == "warm"
        assert record.gate and record.gate["relative_error"] < 1e-2
        assert record.read_roof_tbps and record.environment["device"] == "cpu"
        assert record.stop_reason and record.bytes and record.kv and record.command == "locks-bench latency"
        low, high = median_interval(record.rounds_ns or [])[1]
        assert 0 < low <= high
    assert records[1].resolved == {"dense": False, "kernels": "reference"} | records[1].resolved
    assert records[0].resolved["dense"] is True


# --- processes


def dies(pipe: Connection, settings: Settings) -> None:
    """A worker that dies while it prepares `oom`, and answers for anything else."""
    while True:
        try:
            job = pipe.recv()
        except EOFError:
            return
        pipe.send(("backend", next(iter(job.keys))))
        if "oom" in job.keys:
            pipe.send(("backend", "oom"))
            os._exit(11)
        records = [
            Record(key=key, time="", command="", case={}, backend=name, outcome=Outcome.OK, read_roof_tbps=1.5)
            for name, key in job.keys.items()
        ]
        pipe.send(("records", (records, True)))


def hangs(pipe: Connection, settings: Settings) -> None:
    pipe.recv()
    time.sleep(600)


def broken_at_start(pipe: Connection, settings: Settings) -> None:
    os._exit(3)


def through(target: Callable[[Connection, Settings], None], timeout_s: float = 60.0) -> Callable[[Settings], Measurer]:
    return lambda settings: Worker(settings, timeout_s, target)


def test_a_crash_costs_one_row(tmp_path: Path) -> None:
    names = ["sdpa", "oom", "locks"]
    records = run_sweep([tiny_case()], names, Store(tmp_path), RunOptions("c"), lambda event: None, through(dies))
    assert [record.outcome for record in records] == [Outcome.OK, Outcome.CRASHED, Outcome.OK]
    assert "exit code 11" in (records[1].reason or "")


def test_a_hang_costs_its_rows_and_ends(tmp_path: Path) -> None:
    start = time.monotonic()
    records = run_sweep([tiny_case()], ["sdpa"], Store(tmp_path), RunOptions("c"), lambda event: None, through(hangs, 2.0))
    assert [record.outcome for record in records] == [Outcome.TIMEOUT]
    assert "within 2 s" in (records[0].reason or "") and time.monotonic() - start < 60


def test_a_worker_that_cannot_start_is_reported(tmp_path: Path) -> None:
    names = ["sdpa", "locks"]
    records = run_sweep([tiny_case()], names, Store(tmp_path), RunOptions("c"), lambda event: None, through(broken_at_start))
    assert [record.outcome for record in records] == [Outcome.CRASHED] * 2


def test_a_real_worker_measures_and_keeps_its_roof() -> None:
    case = tiny_case()
    worker = Worker(Settings("cpu", {}, "c", read_roof_tbps=0.5), 120.0, serve)
    try:
        records = worker.measure(Job(case, tiny_plan(case), {"no-such-backend": "key"}), lambda name: None)
    finally:
        worker.close()
    assert [(record.outcome, record.key, record.read_roof_tbps) for record in records] == [(Outcome.SKIPPED, "key", 0.5)]


def test_a_dead_worker_names_the_backend() -> None:
    worker = Worker(Settings("cpu", {}, "c"), 60.0, dies)
    with pytest.raises(WorkerDied) as death:
        worker.measure(Job(tiny_case(), tiny_plan(tiny_case()), {"sdpa": "1", "oom": "2"}), lambda name: None)
    assert death.value.backend == "oom"
    worker.close()


# --- names


class Point:
    def __init__(self, name: str) -> None:
        self.name, self.value = name, "nowhere:Nothing"

    def load(self) -> type[Backend]:
        raise ImportError("no module named nowhere")


def test_names(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        backends, "entry_points", lambda group: [Point(name) for name in ("fa3", "flashinfer", "locks", "sdpa")]
    )
    assert backends.names() == ["fa3", "flashinfer", "locks", "sdpa"]
    assert backends.resolve("default", "cpu") == ["sdpa", "locks"]
    assert backends.resolve("default", "cuda") == ["fa3", "flashinfer", "locks"]
    assert backends.resolve("locks,sdpa,locks", "cpu") == ["locks", "sdpa"]
    assert backends.resolve(["all"], "cuda") == backends.names()
    with pytest.raises(UserError, match="did you mean 'flashinfer'"):
        backends.resolve("flashinfre", "cuda")


def test_nothing_installed_says_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(backends, "entry_points", lambda group: [])
    with pytest.raises(UserError, match="pip install"):
        backends.names()


def test_listing_backends_imports_no_torch() -> None:
    code = "import sys; from harness import backends; backends.GROUP; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True, cwd=Path(run.__file__).parents[1])
