"""The gate: everything that a fast but wrong backend could get away with."""

from __future__ import annotations

import re
from collections.abc import Callable

import pytest
import torch
from harness_fakes import Drifting, OneWrongHead, Zeros, bench, tiny_case, tiny_plan, tiny_workload

from harness.backend import Backend, Launch
from harness.backends.locks import Locks
from harness.backends.sdpa import Sdpa
from harness.case import Case
from harness.measure import measure_case
from harness.record import Outcome, Record
from harness.timer import Cycle, WallTimer
from harness.verify import Gate, Incorrect, check_eager, check_graph, relative_error
from harness.verify_selection import check_tables
from harness.workload import Workload
from locks_kernels import reference
from locks_kernels.decode import LocksDecoder


def gated(backend: Backend, case: Case | None = None) -> Gate:
    workload = tiny_workload(case)
    launches = [backend.prepare(workload, copy) for copy in range(workload.plan.launches)]
    gate = Gate(workload)
    cycle = Cycle(workload.set_phase, tuple(workload.phases) if backend.writes_cache else (0,))
    check_eager(gate, workload, backend, launches, cycle)
    return gate


def measured(backend: Backend) -> Record:
    case = tiny_case()
    return measure_case(case, tiny_plan(case), {"it": backend}, {"it": "key"}, bench(), lambda name: None)[0]


@pytest.mark.parametrize("ctx", [320, 325, 327, 64, 65])
@pytest.mark.parametrize("backend", [Sdpa, Locks])
def test_honest_backends_pass(backend: Callable[[], Backend], ctx: int) -> None:
    record = gated(backend(), tiny_case(ctx)).record()
    assert 0 < record["relative_error"] < 1e-2
    assert record["sequences"] == "2 of 2"
    assert record["checks"]["finite"] is True


def test_locks_gate_looks_at_selection_and_cache() -> None:
    checks = gated(Locks()).record()["checks"]
    assert {"tables_sound", "kept_mass_of_best", "summary_error", "new_tokens_written"} <= set(checks)


@pytest.mark.parametrize("backend", [Zeros, OneWrongHead, Drifting])
def test_wrong_backends_get_no_time(backend: Callable[[], Backend]) -> None:
    record = measured(backend())
    assert record.outcome is Outcome.INCORRECT
    assert record.rounds_ns is None and record.eager_ns is None and record.stages_ns is None and record.plan_ns is None
    assert record.reason and "error" in record.reason and record.gate
    record.to_json()


class _Changed(Locks):
    """LOCKS with one thing replaced after it was built."""

    def change(self, decoder: LocksDecoder) -> None:
        raise NotImplementedError

    def prepare(self, workload: Workload, copy: int) -> Launch:
        launch = super().prepare(workload, copy)
        self.change(self._decoders[copy])
        return launch


class NeverAppends(_Changed):
    def change(self, decoder: LocksDecoder) -> None:
        decoder.stages.append_finalise = lambda keys, values: None  # type: ignore[method-assign]


class NeverFinalises(_Changed):
    def change(self, decoder: LocksDecoder) -> None:
        decoder.stages.append_finalise = lambda keys, values: reference.append(  # type: ignore[method-assign]
            decoder.cache, decoder.sequences, keys, values
        )


class KeepsTheFirstPages(_Changed):
    def change(self, decoder: LocksDecoder) -> None:
        def select() -> None:
            scores = torch.zeros(2, 2, decoder.sequences.max_pages)
            decoder.stages.tables = reference.select(scores, decoder.sequences, decoder.cache.shape, decoder.options)

        decoder.stages.select = select  # type: ignore[method-assign]


class ForgetsRecent(_Changed):
    def change(self, decoder: LocksDecoder) -> None:
        honest = decoder.stages.select

        def select() -> None:
            honest()
            decoder.stages.tables[:, :, -1] = -1

        decoder.stages.select = select  # type: ignore[method-assign]


class ReadsBehindTheEnd(_Changed):
    """Attends the whole last page, whatever the length."""

    def change(self, decoder: LocksDecoder) -> None:
        honest = decoder.stages.attend

        def attend(query: torch.Tensor, out: torch.Tensor) -> None:
            lengths = decoder.sequences.seq_lens
            kept = lengths.clone()
            lengths.copy_((lengths + 15) // 16 * 16)
            honest(query, out)
            lengths.copy_(kept)

        decoder.stages.attend = attend  # type: ignore[method-assign]


@pytest.mark.parametrize(
    ("backend", "check"),
    [
        (NeverAppends, "relative_error|finite|new_tokens"),
        (NeverFinalises, "summary_error"),
        (KeepsTheFirstPages, "kept_mass_of_best"),
        (ForgetsRecent, "tables_sound"),
        (ReadsBehindTheEnd, "relative_error"),
    ],
)
def test_wrong_locks_are_caught(backend: Callable[[], Backend], check: str) -> None:
    with pytest.raises(Incorrect, match=check):
        gated(backend(), tiny_case(320))


def test_a_failed_gate_leaves_the_data_whole() -> None:
    workload, backend = tiny_workload(), NeverAppends()
    launches = [backend.prepare(workload, copy) for copy in range(workload.plan.launches)]
    with pytest.raises(Incorrect):
        check_eager(Gate(workload), workload, backend, launches, Cycle(workload.set_phase, tuple(workload.phases)))
    assert workload.new_tokens_intact()


def test_nearly_tied_pages_may_change_places() -> None:
    workload, backend = tiny_workload(), Locks()
    backend.prepare(workload, 0)()
    tables = backend._decoders[0].tables
    scores = reference.score(workload.queries[0], workload.caches[0], workload.sequences)
    combined = reference.combine(scores, 2, "share")
    options = workload.case.select
    assert all(check.passed for check in check_tables(workload, 0, tables, options))
    unkept = next(page for page in range(1, 19) if page not in tables[0, 0].tolist())
    tables[0, 0, 1] = unkept
    tables[0, 0] = tables[0, 0].sort().values
    failed = [check.name for check in check_tables(workload, 0, tables, options) if not check.passed]
    assert failed and combined[0, 0, unkept] < combined[0, 0, 1:19].max()


def test_a_stale_graph_is_caught() -> None:
    """A replay that does not follow the lengths differs from the eager launch at another phase."""
    workload, backend = tiny_workload(), Locks()
    launches = [backend.prepare(workload, copy) for copy in range(workload.plan.launches)]
    cycle = Cycle(workload.set_phase, tuple(workload.phases))

    class Eager:
        def once(self, phase: int) -> list[torch.Tensor]:
            workload.set_phase(phase)
            return [launch() for launch in launches]

    stale = [output.clone() for output in Eager().once(0)]

    class Stale:
        def once(self, phase: int) -> list[torch.Tensor]:
            return [output.clone() for output in stale]

    check_graph(Gate(workload), Eager(), Eager(), cycle, "attention")  # type: ignore[arg-type]
    with pytest.raises(Incorrect, match="graph_equals_eager"):
        check_graph(Gate(workload), Stale(), Eager(), cycle, "attention")  # type: ignore[arg-type]


def test_relative_error_is_of_the_worst_head_and_never_nan() -> None:
    want = torch.ones(4, 8, 16)
    found = want.clone()
    found[3, 7] = 1.1
    assert relative_error(found, want) == pytest.approx(0.1, rel=1e-3)
    found[0, 0, 0] = float("nan")
    assert relative_error(found, want) == float("inf")
    assert relative_error(found[:2], want) == float("inf")


def test_wall_timer_of_a_cycle() -> None:
    """A sample is the mean over the phases of a page, and setting a phase is not part of it."""
    ticks = iter(range(0, 10**9, 1000))
    phases: list[int] = []
    timer = WallTimer(lambda: next(ticks))
    workload = tiny_workload()
    from harness.level import LevelLaunch

    run = timer.capture(LevelLaunch(lambda: workload.queries[0], steps=4), Cycle(phases.append, (2, 1, 0)))
    assert run.samples(2) == [250.0, 250.0]
    assert phases == [2, 1, 0, 2, 1, 0]


@pytest.mark.parametrize(
    ("output", "words"),
    [
        (torch.ones(2, 4, 8), "shape (2, 4, 8), it must be (2, 8)"),
        (1.5 * torch.ones(2, 8), "0.5, at most 0.01 is right"),
        (torch.full((2, 8), float("nan")), "inf, at most 0.01 is right"),
    ],
)
def test_a_failed_comparison_says_what_would_be_right(output: torch.Tensor, words: str) -> None:
    gate = Gate(tiny_workload())
    with pytest.raises(Incorrect, match=re.escape(words)):
        gate.compare("relative_error", output, torch.ones(2, 8))
    assert gate.checks[-1].passed is False
