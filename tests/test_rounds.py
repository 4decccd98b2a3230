"""Rounds: what one backend leaves behind for the next, whose turn it is, and when a slow one stops holding up the others."""

from __future__ import annotations

import math
import random
import weakref
from dataclasses import replace

import pytest
import torch
from harness_fakes import FakeRun, FakeTimer, Zeros, bench, tiny_case, tiny_plan

from harness import backends, measure, worker
from harness.backend import Backend, Launch
from harness.backends.locks import Locks
from harness.backends.sdpa import Sdpa
from harness.case import Case
from harness.level import LevelLaunch
from harness.measure import measure_case
from harness.record import Outcome, Record
from harness.stats import median_interval
from harness.stopping import CPU_RULE, LEAST_ROUNDS, StoppingRule
from harness.timer import Cycle
from harness.worker import InProcess, Job
from harness.workload import Workload

MS = 1e6  # ns
LAUNCHES = 2  # of the tiny plan: steps of one sample


class Hot(Sdpa):
    """Draws so much power that the clocks are low after it."""


class Card:
    """A clock that only launches move, and a GPU whose clocks recover within tens of ms after a hot backend."""

    def __init__(self) -> None:
        self.seconds, self.slow, self.noise = 0.0, 0.0, random.Random(1)
        self.turns: list[str] = []

    def sample(self, name: str, base_ns: float) -> float:
        taken = base_ns * (1 + self.slow) * self.noise.gauss(1.0, 0.2 if name == "noisy" else 0.001)
        self.seconds += taken * LAUNCHES * 1e-9
        self.slow = 0.1 if name == "hot" else self.slow * math.exp(-taken * LAUNCHES * 1e-9 / 0.03)
        return taken


class CardTimer(FakeTimer):
    """Each backend's own time on one card, known by the order in which backends are prepared."""

    def __init__(self, card: Card, times_ms: dict[str, float]) -> None:
        super().__init__()
        self.card, self.times_ms, self.waiting = card, times_ms, list(times_ms)

    def capture(self, level: LevelLaunch, cycle: Cycle) -> FakeRun:
        name, card = self.waiting.pop(0), self.card
        run = FakeRun(level, cycle, lambda: card.sample(name, self.times_ms[name] * MS))
        self.runs.append(run)
        plain = run.samples

        def samples(count: int) -> list[float]:
            card.turns.append(name)
            return plain(count)

        run.samples = samples  # type: ignore[method-assign]
        return run


def on_card(times_ms: dict[str, float], rule: StoppingRule) -> tuple[dict[str, Record], Card]:
    card, case = Card(), tiny_case()
    made: dict[str, Backend] = {name: Hot() if name == "hot" else Sdpa() for name in times_ms}
    shared = bench(CardTimer(card, times_ms), rule=rule, clock_s=lambda: card.seconds)
    records = measure_case(case, tiny_plan(case, LAUNCHES), made, dict.fromkeys(made, "k"), shared, lambda name: None)
    return {record.backend: record for record in records}, card


def test_a_backend_settles_before_it_is_timed_after_a_hot_one() -> None:
    times = {"hot": 0.5, "a": 1.0, "b": 2.0}
    settled, _ = on_card(times, StoppingRule())
    carried, _ = on_card(times, replace(StoppingRule(), settle_s=0.0))
    for name in ("a", "b"):
        rounds = settled[name].rounds_ns or []
        assert len(rounds) <= 20
        assert median_interval(rounds)[0] == pytest.approx(times[name] * MS, rel=0.004)
        assert max(map(min, rounds)) < times[name] * MS * 1.01, "no round is slow from beginning to end"
        assert max(map(min, carried[name].rounds_ns or [])) > times[name] * MS * 1.02
    assert len(carried["a"].rounds_ns or []) > 2 * len(settled["a"].rounds_ns or [])


def test_a_backend_that_follows_itself_has_nothing_to_settle() -> None:
    rule = StoppingRule()
    record, card = on_card({"alone": 1.0}, rule)
    rounds = record["alone"].rounds_ns or []
    assert len(rounds) == rule.rounds
    assert card.turns.count("alone") <= len(rounds) + 5, "its warm-up, one settling, its rounds"


def test_rounds_pair_the_backends_in_a_seeded_order() -> None:
    def orders(seed: int) -> list[list[int]]:
        timer, case = FakeTimer(), tiny_case(seed=seed)
        rule = StoppingRule(rounds=6, timed_s=0.0, round_s=0.0, settle_s=0.0, warm_s=0.0)
        made: dict[str, Backend] = {name: Sdpa() for name in "abc"}
        measure_case(case, tiny_plan(case), made, dict.fromkeys(made, "k"), bench(timer, rule=rule), lambda name: None)
        captured = timer.runs[1::2][:3]  # an eager run, then the captured one, for each backend
        calls = sorted((at, index) for index, run in enumerate(captured) for at in run.called_at[-6:])
        order = [index for _, index in calls]
        return [order[i : i + 3] for i in range(0, 18, 3)]

    first = orders(0)
    assert all(sorted(order) == [0, 1, 2] for order in first), "each round runs every backend once"
    assert len({tuple(order) for order in first}) > 1, "not always in the same order"
    assert orders(0) == first


class StopsAtAnotherLength(Sdpa):
    """Fails in its gate, halfway through the lengths."""

    writes_cache = True

    def prepare(self, workload: Workload, copy: int) -> Launch:
        workload.set_phase(7)
        raise RuntimeError("no")


def test_what_a_failed_backend_left_does_not_reach_the_next() -> None:
    case, lengths = tiny_case(), []

    class Looks(Sdpa):
        def prepare(self, workload: Workload, copy: int) -> Launch:
            lengths.append(workload.sequences.seq_lens.tolist())
            return super().prepare(workload, copy)

    made: dict[str, Backend] = {"stops": StopsAtAnotherLength(), "looks": Looks()}
    measure_case(case, tiny_plan(case), made, dict.fromkeys(made, "k"), bench(), lambda name: None)
    assert lengths and all(found == [case.ctx] * case.batch for found in lengths)


def test_two_backends_take_turns_at_being_first() -> None:
    _, card = on_card({"a": 1.0, "b": 1.0}, replace(StoppingRule(), settle_s=0.0))
    assert "".join(card.turns[-8:]) in ("abbaabba", "baabbaab")


def test_a_slow_backend_that_spent_its_time_does_not_run_on_with_the_others() -> None:
    rule = replace(StoppingRule(), limit_s=1.0, half_width=1e-9)  # no interval is so narrow
    records, _ = on_card({"quick": 1.0, "slow": 300.0}, rule)
    quick, slow = (records[name].rounds_ns or [] for name in ("quick", "slow"))
    assert len(slow) == LEAST_ROUNDS < len(quick)
    for name, rounds in (("quick", quick), ("slow", slow)):
        reason = records[name].stop_reason or ""
        assert reason.startswith("limit") and f"after {len(rounds)} rounds" in reason and "inf" not in reason


def test_a_noisy_backend_has_the_others_beside_it_for_a_while_only() -> None:
    rule = replace(StoppingRule(), settle_s=0.0)
    records, _ = on_card({"quick": 1.0, "noisy": 50.0}, rule)
    quick, noisy = (records[name].rounds_ns or [] for name in ("quick", "noisy"))
    assert len(quick) == rule.paired_rounds < len(noisy)
    assert (records["quick"].stop_reason or "").startswith("interval")
    assert (records["noisy"].stop_reason or "").startswith("limit: 15")


def test_the_reason_to_stop_speaks_of_all_rounds() -> None:
    records, _ = on_card({"hot": 1.0, "a": 1.0, "b": 3.0}, replace(StoppingRule(), settle_s=0.0))
    for record in records.values():
        assert f"after {len(record.rounds_ns or [])} rounds" in (record.stop_reason or "")
    assert len(records["hot"].rounds_ns or []) > 10, "it went on beside the others"


def test_whose_turn_it_is_is_told_before_every_round() -> None:
    """What kills the process in a round is blamed on the backend that ran, not on the one prepared last."""
    told: list[str] = []
    during: list[tuple[str, str]] = []
    case = tiny_case()

    class Named(Sdpa):
        def __init__(self, own: str) -> None:
            self.own = own

        def prepare(self, workload: Workload, copy: int) -> Launch:
            launch = super().prepare(workload, copy)

            def noted() -> torch.Tensor:
                during.append((self.own, told[-1]))
                return launch()

            return noted

    made: dict[str, Backend] = {name: Named(name) for name in "abc"}
    measure_case(case, tiny_plan(case), made, dict.fromkeys("abc", "k"), bench(), told.append)
    assert len(during) > 30 and all(own == said for own, said in during)


class NoBytes(Sdpa):
    """A plug-in that forgot to say what it reads."""

    def bytes(self, case: Case) -> dict[str, int]:
        raise NotImplementedError


def test_what_fails_after_the_rounds_is_a_row_too() -> None:
    case = tiny_case()
    made: dict[str, Backend] = {"no-bytes": NoBytes(), "sdpa": Sdpa()}
    failed, fine = measure_case(case, tiny_plan(case), made, dict.fromkeys(made, "k"), bench(), lambda name: None)
    assert (failed.outcome, failed.reason) == (Outcome.CRASHED, "after it was timed: NotImplementedError")
    assert failed.rounds_ns is None and fine.outcome is Outcome.OK


class CannotBeMade(Sdpa):
    def __init__(self) -> None:
        raise RuntimeError("no such device")


class HasNoVersion(Sdpa):
    def version(self) -> str:
        raise ImportError("libsomething.so")


@pytest.mark.parametrize(("broken", "why"), [(CannotBeMade, "no such device"), (HasNoVersion, "libsomething.so")])
def test_a_plug_in_that_cannot_be_made_is_unavailable(monkeypatch: pytest.MonkeyPatch, broken: type[Backend], why: str) -> None:
    monkeypatch.setattr(backends, "load", lambda name: broken)
    made = backends.make("mine")
    assert made.version() is None and why in (made.unavailable() or "")


def test_settling_is_bounded_and_none_on_a_cpu() -> None:
    rule = StoppingRule()
    assert rule.settling(0.0) == rule.settling(1e-12) == 1000
    assert (rule.settling(0.03), rule.settling(5.0)) == (4, 1)
    assert CPU_RULE.settling(0.01) == 0


def test_backends_are_gone_before_memory_is_given_back(monkeypatch: pytest.MonkeyPatch) -> None:
    """They hold the caches: what is freed while they live stays allocated, and the next case is planned for a full GPU."""
    alive: list[weakref.ref[Backend]] = []
    found: list[int] = []

    def make(name: str) -> Backend:
        backend = {"sdpa": Sdpa, "locks": Locks, "zeros": Zeros}[name]()
        alive.append(weakref.ref(backend))
        return backend

    def collected() -> int:
        found.append(sum(one() is not None for one in alive))
        return 0

    case = tiny_case()
    with monkeypatch.context() as patch:
        patch.setattr(measure.gc, "collect", collected)
        InProcess(bench(), make).measure(
            Job(case, tiny_plan(case), dict.fromkeys(("sdpa", "locks", "zeros"), "k")), lambda name: None
        )
    assert len(alive) == 3 and found[-1] == 0
    assert worker.free_memory is measure.free_memory and torch.get_num_threads() >= 1
