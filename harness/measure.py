"""One case: workload -> prepare -> gate -> rounds -> records, one per backend whatever happens to it."""

from __future__ import annotations

import gc
import itertools
import random
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from typing import Any

import torch

from harness import contents, workload
from harness.backend import Backend
from harness.case import Case
from harness.contestant import Contestant, prepare
from harness.memory import MemoryPlan
from harness.meters.session import ABSENT, CaseMeters, Meters
from harness.outcome import fail, judge
from harness.record import Outcome, Record
from harness.stopping import StoppingRule
from harness.timer import Timer


def device_lost() -> bool:
    """Whether the CUDA context can do no more work, as after an illegal access."""
    if not torch.cuda.is_available():
        return False
    try:
        torch.cuda.synchronize()
    except RuntimeError:
        return True
    return False


@dataclass(frozen=True)
class Bench:
    """What all cases of a run share.

    command  that repeats the run.  read_roof_tbps: measured at its start; None if it was not.
    """

    timer: Timer
    rule: StoppingRule
    environment: dict[str, Any]
    command: str
    read_roof_tbps: float | None = None
    clock_s: Callable[[], float] = time.perf_counter
    device_lost: Callable[[], bool] = device_lost
    meters: Meters = ABSENT


class DeviceLost(Exception):
    """A backend left the device unusable: only a fresh process can go on.  `.settled` are the records it could not harm, its
    own among them; the other backends are to be measured again.
    """

    def __init__(self, settled: list[Record]) -> None:
        super().__init__("the CUDA context is lost")
        self.settled = settled


def blank_record(case: Case, plan: MemoryPlan | None, name: str, backend: Backend, key: str, **run: Any) -> Record:
    """What is known of a row before anything runs.  `run`: the fields of a record that all rows of a run share."""
    return Record(
        key=key,
        time=time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        case=asdict(case) | {"contents": contents.NAME},
        backend=name,
        outcome=Outcome.SKIPPED,
        backend_version=backend.version(),
        resolved={"dense": backend.dense},
        **_memory(case, plan, backend),
        **run,
    )


def _memory(case: Case, plan: MemoryPlan | None, backend: Backend) -> dict[str, Any]:
    """Fields `kv` and `cache_state`: the plan's, unless the backend reads so little that its own data may stay in L2."""
    if plan is None:
        return {"kv": None, "cache_state": None}
    kv, state = plan.record(), plan.cache_state
    if case.level == "attention":  # at level token weights are read between two layers
        try:
            distinct = backend.distinct_bytes(case, plan.copies, plan.launches)
        except Exception:  # it cannot run, or cannot count its bytes: its own row will tell
            distinct = None
        if distinct is not None and (state := plan.state_of(distinct)) != plan.cache_state:
            kv["note"] += f"; {backend.name} reads only {distinct / 1e6:.3g} MB, which may stay there"
    return {"kv": kv, "cache_state": state}


def measure_case(
    case: Case,
    plan: MemoryPlan,
    backends: Mapping[str, Backend],
    keys: Mapping[str, str],
    bench: Bench,
    on_backend: Callable[[str], None],
) -> list[Record]:
    """Records of all `backends` (by the name a user types), in their order.  `keys`: their resume keys.  on_backend: told
    whose turn it is, so that somebody else knows who took the process along.

    A failure of one backend is its record's outcome; only DeviceLost is raised.
    """
    run = _CaseRun(case, plan, backends, keys, bench, on_backend)
    threads = torch.get_num_threads()
    if case.device == "cpu":
        torch.set_num_threads(1)  # several threads wait for each other whenever anybody else uses the machine
    try:
        run.measure()
    finally:
        torch.set_num_threads(threads)
        run.running.clear()
    return list(run.records.values())


class _CaseRun:
    def __init__(
        self,
        case: Case,
        plan: MemoryPlan,
        backends: Mapping[str, Backend],
        keys: Mapping[str, str],
        bench: Bench,
        on_backend: Callable[[str], None],
    ) -> None:
        self.case, self.plan, self.bench, self.backends, self.on_backend = case, plan, bench, backends, on_backend
        run = {"command": bench.command, "environment": bench.environment, "timer": bench.timer.label}
        roof = bench.read_roof_tbps
        self.records = {
            name: blank_record(case, plan, name, backend, keys[name], read_roof_tbps=roof, **run)
            for name, backend in backends.items()
        }
        self.running: dict[str, Contestant] = {}
        self.settled: set[str] = set()

    def measure(self) -> None:
        able = [name for name in self.backends if self._able(name)]
        if not able:
            return
        try:
            data = workload.build(self.case, self.plan, self.case.device)
        except Exception as error:
            for name in able:
                self._settle(name, error, "while the caches were filled")
            return
        for name in able:
            self.on_backend(name)
            self._prepare(name, data)
        with self.bench.meters.case() as meters:
            self._rounds(meters)
        for name, contestant in self.running.items():
            self.on_backend(name)
            try:
                contestant.finish(self.records[name], self.bench.timer)
                meters.fill(self.records[name], contestant)
                judge(self.records[name])
            except Exception as error:
                self._settle(name, error, "after it was timed")

    def _able(self, name: str) -> bool:
        """Whether the backend can run the case; if not, its record says why."""
        backend = self.backends[name]
        try:
            unsupported = dict(self.case.model.unsupported).get(self.case.level)
            self.records[name].reason = reason = unsupported or backend.unavailable() or backend.supports(self.case)
        except Exception as error:
            self._settle(name, error, "when asked whether it can run")
            return False
        if reason is not None:
            self.settled.add(name)
        return reason is None

    def _prepare(self, name: str, data: workload.Workload) -> None:
        bench = self.bench
        try:
            self.running[name] = prepare(
                self.case, data, self.backends[name], bench.timer, bench.rule, self.records[name], bench.clock_s
            )
        except Exception as error:
            self._settle(name, error, "before timing")

    def _rounds(self, meters: CaseMeters) -> None:
        """Rounds until every backend has a reason to stop; for a while the others go on with it, so that rounds pair."""
        rule, shuffle, before = self.bench.rule, random.Random(self.case.seed), None
        for number in itertools.count():
            if all(contestant.stop_reason for contestant in self.running.values()):
                return
            for name in _order([name for name, one in self.running.items() if not self._left(one)], number, shuffle):
                self.on_backend(name)
                try:
                    self.running[name].round(rule, self.bench.clock_s, disturbed=name != before)
                    meters.round(name)
                except Exception as error:
                    del self.running[name]
                    self._settle(name, error, "while it was timed")
                before = name

    def _left(self, contestant: Contestant) -> bool:
        return contestant.stop_reason is not None and self.bench.rule.leaves(len(contestant.rounds), contestant.spent_s)

    def _settle(self, name: str, error: Exception, when: str) -> None:
        fail(self.records[name], error, when)
        self.settled.add(name)
        if self.case.device == "cuda" and self.bench.device_lost():
            raise DeviceLost([record for other, record in self.records.items() if other in self.settled]) from error


def _order(names: list[str], number: int, shuffle: random.Random) -> list[str]:
    """Of round `number`: shuffled; two take turns at being first (ABBA), which cancels a steady drift."""
    if len(names) == 2:
        return names[::-1] if number % 2 else names
    shuffle.shuffle(names)
    return names


def free_memory(case: Case) -> None:
    """Give back what a case held, for the memory plan of the next, which is made in another process.  Its backends must be
    gone by now: they hold its caches.
    """
    if case.level == "token":
        from harness.token_level import release_weights

        release_weights()
    gc.collect()
    if case.device == "cuda":
        try:
            torch.cuda.empty_cache()
        except RuntimeError:  # a lost context frees nothing; DeviceLost is on its way
            return
