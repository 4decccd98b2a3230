"""A process that measures cases for another one, so that a crash costs a row and not the sweep."""

from __future__ import annotations

import ctypes
import multiprocessing
import os
import signal
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any

from harness import backends
from harness.case import Case
from harness.measure import Bench, DeviceLost, free_memory, measure_case
from harness.memory import MemoryPlan
from harness.meters.session import open_meters
from harness.record import Record
from harness.roof import read_roof_tbps
from harness.stopping import CPU_RULE, StoppingRule
from harness.timer import GraphTimer, Timer, WallTimer

STOP_SECONDS = 3
PR_SET_PDEATHSIG = 1


@dataclass(frozen=True)
class Settings:
    """What a worker needs to know once.  read_roof_tbps: None lets it measure."""

    device: str
    environment: dict[str, Any]
    command: str
    read_roof_tbps: float | None = None


@dataclass(frozen=True)
class Job:
    """One case for the backends named in `keys` (name -> resume key)."""

    case: Case
    plan: MemoryPlan
    keys: Mapping[str, str]


class WorkerDied(Exception):
    """The process ended or hung inside a job; `backend` is the one it was preparing last, None if it had not begun."""

    def __init__(self, reason: str, backend: str | None, timed_out: bool) -> None:
        super().__init__(reason)
        self.backend, self.timed_out = backend, timed_out


def timer(device: str) -> Timer:
    return GraphTimer() if device == "cuda" else WallTimer()


def make_bench(settings: Settings) -> Bench:
    """The measuring side of a run, with its read roof."""
    meters = open_meters(settings.device)  # before the roof: nothing has made the device warm yet
    roof = settings.read_roof_tbps
    return Bench(
        timer=timer(settings.device),
        rule=StoppingRule() if settings.device == "cuda" else CPU_RULE,
        environment=settings.environment,
        command=settings.command,
        read_roof_tbps=read_roof_tbps(settings.device) if roof is None else roof,
        meters=meters,
    )


class InProcess:
    """Measures in this process: for a CPU, and for tests, which bring their own bench and backends."""

    def __init__(self, bench: Bench, make: Callable[[str], backends.Backend] = backends.make) -> None:
        self._bench, self._make = bench, make

    def measure(self, job: Job, on_backend: Callable[[str], None]) -> list[Record]:
        """Records of all backends of the job, or of those that are settled when the device is lost."""
        made = {name: self._make(name) for name in job.keys}
        try:
            return measure_case(job.case, job.plan, made, job.keys, self._bench, on_backend)
        except DeviceLost as lost:
            return lost.settled
        finally:
            made.clear()
            free_memory(job.case)

    def close(self) -> None:
        pass


class Worker:
    """Measures in a process of its own, started at the first job and again after it died."""

    def __init__(self, settings: Settings, timeout_s: float, target: Callable[[Connection, Settings], None]) -> None:
        """target: what the process runs, `serve`; timeout_s: of its silence."""
        self._settings, self._timeout_s, self._target = settings, timeout_s, target
        self._process: Any = None
        self._pipe: Any = None

    def measure(self, job: Job, on_backend: Callable[[str], None]) -> list[Record]:
        """As InProcess.measure; WorkerDied if the process did not live to tell."""
        if self._process is None:
            self._start()
        backend = None
        try:
            self._pipe.send(job)
            while True:
                if not self._pipe.poll(self._timeout_s):
                    self._end()
                    raise WorkerDied(f"no answer within {self._timeout_s:g} s", backend, timed_out=True)
                kind, content = self._pipe.recv()
                if kind == "backend":
                    backend = content
                    on_backend(backend)
                else:
                    records, alive = content
                    self._keep_roof(records)
                    if not alive:
                        self._end()
                    return records
        except (EOFError, ConnectionError) as error:
            code = self._end()
            raise WorkerDied(f"its process ended with exit code {code}", backend, timed_out=False) from error

    def close(self) -> None:
        """Let the process end; killed if it does not."""
        if self._process is not None:
            self._pipe.close()
            self._process.join(STOP_SECONDS)
            self._end()

    def _start(self) -> None:
        context = multiprocessing.get_context("spawn")
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(target=self._target, args=(theirs, self._settings), daemon=True)
        self._process.start()
        theirs.close()  # so that the end of the process ends the pipe

    def _end(self) -> int | None:
        if self._process.is_alive():
            self._process.join(1)
        if self._process.is_alive():
            self._process.kill()
            self._process.join()
        code = self._process.exitcode
        self._process = self._pipe = None
        return code

    def _keep_roof(self, records: list[Record]) -> None:
        if records and self._settings.read_roof_tbps is None:
            self._settings = Settings(**(vars(self._settings) | {"read_roof_tbps": records[0].read_roof_tbps}))


def serve(pipe: Connection, settings: Settings) -> None:
    """The worker's side: jobs in; backend names as they begin and the records out."""
    _die_with_parent()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent hears it too, and ends this process
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())  # libraries that print must not spoil the parent's JSON
    local = InProcess(make_bench(settings))
    while True:
        try:
            job = pipe.recv()
        except EOFError:
            return
        records = local.measure(job, lambda name: pipe.send(("backend", name)))
        alive = len(records) == len(job.keys)
        pipe.send(("records", (records, alive)))
        if not alive:
            return


def _die_with_parent() -> None:
    """A sweep that was killed leaves nobody behind on the GPU, who would disturb the one that goes on."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
