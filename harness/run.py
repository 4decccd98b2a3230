"""A sweep: cases one after the other, each record stored as soon as its case ends, nothing measured twice."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

from harness import backends as known_backends
from harness import environment
from harness.backend import Backend
from harness.case import Case
from harness.errors import UserError
from harness.measure import blank_record
from harness.memory import DeviceMemory, MemoryPlan, SideMemory, plan_memory, tensor_parallel
from harness.record import Outcome, Record
from harness.store import resume_key
from harness.weights import resident_weight_bytes
from harness.worker import InProcess, Job, Settings, Worker, WorkerDied, make_bench, serve, timer

# What may go better next time is tried again; everything else in a store counts as measured.
RETRIED = (Outcome.OOM, Outcome.TIMEOUT, Outcome.CRASHED, Outcome.THROTTLED)


@dataclass(frozen=True)
class RunOptions:
    """time_budget_s: no case begins after it.  case_timeout_s: a worker that is silent for so long is given up."""

    command: str
    time_budget_s: float | None = None
    case_timeout_s: float = 600.0


@dataclass(frozen=True)
class CaseStarted:
    case: Case
    index: int
    total: int
    plan_text: str


@dataclass(frozen=True)
class BackendStarted:
    case: Case
    backend: str


@dataclass(frozen=True)
class RecordDone:
    record: Record
    reused: bool


@dataclass(frozen=True)
class LeftOut:
    """A case that the time budget did not reach; nothing is stored for it."""

    case: Case


Event = CaseStarted | BackendStarted | RecordDone | LeftOut


class RecordStore(Protocol):
    def find(self, key: str) -> Record | None: ...
    def append(self, record: Record) -> None: ...


class Measurer(Protocol):
    def measure(self, job: Job, on_backend: Callable[[str], None]) -> list[Record]: ...
    def close(self) -> None: ...


def run_sweep(
    cases: Sequence[Case],
    backends: Sequence[str] | Callable[[Case], Sequence[str]],
    store: RecordStore,
    options: RunOptions,
    on_event: Callable[[Event], None],
    make_measurer: Callable[[Settings], Measurer] | None = None,
) -> list[Record]:
    """Measure every case with every backend, unless `store` holds the record already.  All cases are of one device.

    backends: of all cases, or of one where it is a function.
    Returns the records of all cases that were reached, measured or found, in the order of the cases.
    """
    if not cases:
        return []
    device = cases[0].device
    settings = Settings(device, environment.capture(device), options.command)
    named = {name for case in cases for name in (backends(case) if callable(backends) else backends)}
    sweep = _Sweep(store, on_event, settings, make_measurer or _measurer(options, named))
    start = time.monotonic()
    try:
        for index, case in enumerate(cases, start=1):
            late = options.time_budget_s is not None and time.monotonic() - start > options.time_budget_s
            sweep.case(case, backends(case) if callable(backends) else backends, index, len(cases), late)
    finally:
        sweep.close()
    return sweep.records


def _measurer(options: RunOptions, named: Iterable[str]) -> Callable[[Settings], Measurer]:
    """A process of its own, which may die or hang, but for our own backends on a CPU: they start faster without."""
    foreign = any(known_backends.foreign_source(name) for name in named)

    def make(settings: Settings) -> Measurer:
        if settings.device == "cuda" or foreign:
            return Worker(settings, options.case_timeout_s, serve)
        return InProcess(make_bench(settings))

    return make


class _Sweep:
    def __init__(
        self,
        store: RecordStore,
        on_event: Callable[[Event], None],
        settings: Settings,
        make_measurer: Callable[[Settings], Measurer],
    ) -> None:
        self.store, self.on_event, self.settings, self.make_measurer = store, on_event, settings, make_measurer
        self.measurer: Measurer | None = None
        self.records: list[Record] = []

    def case(self, case: Case, names: Sequence[str], index: int, total: int, late: bool) -> None:
        """One case; `late` leaves it out unless the store has all of it."""
        made = {name: known_backends.make(name) for name in names}
        plan = _plan(case, made.values())
        keys = {name: self._key(case, name, backend, plan) for name, backend in made.items()}
        found = {name: record for name in names if (record := self.store.find(keys[name])) and record.outcome not in RETRIED}
        missing = {name: keys[name] for name in names if name not in found}
        if missing and late:
            self.on_event(LeftOut(case))
            return
        note = plan if isinstance(plan, str) else plan.note
        self.on_event(CaseStarted(case, index, total, note if missing else "found in the store"))
        fresh = self._measure(case, plan, missing)
        for name in names:
            record = found.get(name) or fresh[name]
            if name in fresh:
                self.store.append(record)
            self.records.append(record)
            self.on_event(RecordDone(record, reused=name in found))

    def close(self) -> None:
        if self.measurer is not None:
            self.measurer.close()

    def _key(self, case: Case, name: str, backend: Backend, plan: MemoryPlan | str) -> str:
        state = None if isinstance(plan, str) else plan.cache_state
        version = "+".join(filter(None, (backend.version(), known_backends.foreign_source(name)))) or None
        return resume_key(case, name, version, self.settings.environment, timer(case.device).label, state)

    def _measure(self, case: Case, plan: MemoryPlan | str, keys: dict[str, str]) -> dict[str, Record]:
        """Records by name.  A backend that takes the process with it is left behind, the others get a new one."""
        if isinstance(plan, str):
            return {name: self._without_data(case, None, name, key, Outcome.SKIPPED, plan) for name, key in keys.items()}
        waiting, done = dict(keys), {}
        while waiting:
            if self.measurer is None:
                self.measurer = self.make_measurer(self.settings)
            try:
                records = self.measurer.measure(
                    Job(case, plan, waiting), lambda name: self.on_event(BackendStarted(case, name))
                )
            except WorkerDied as death:
                guilty = [death.backend] if death.backend else list(waiting)
                outcome = Outcome.TIMEOUT if death.timed_out else Outcome.CRASHED
                records = [self._without_data(case, plan, name, waiting[name], outcome, str(death)) for name in guilty]
            for record in records:
                done[record.backend] = record
                del waiting[record.backend]
        return done

    def _without_data(self, case: Case, plan: MemoryPlan | None, name: str, key: str, outcome: Outcome, reason: str) -> Record:
        blank = blank_record(
            case,
            plan,
            name,
            known_backends.make(name),
            key,
            command=self.settings.command,
            environment=self.settings.environment,
            timer=timer(case.device).label,
        )
        blank.outcome, blank.reason = outcome, reason
        return blank


def _plan(case: Case, backends: Iterable[Backend]) -> MemoryPlan | str:
    """The memory plan that holds all of the backends, or why there is none."""
    weighs = case.level == "token" and "token" not in dict(case.model.unsupported)
    try:
        weights = resident_weight_bytes(case.model, tensor_parallel(case), case.dtype) if weighs else 0
        return plan_memory(case, DeviceMemory.now(case.device), weights, SideMemory.of(case, backends))
    except UserError as error:
        return str(error)
