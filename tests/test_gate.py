"""The gate: two stages before an alarm, change points over a history, and what the command line says."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Iterable
from dataclasses import asdict
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from comparison_fakes import record, rounds
from harness_fakes import bench, tiny_case

from bench.cli import main
from harness import backends, rerun
from harness.backends.sdpa import Sdpa
from harness.changes import change_points
from harness.compare import Rules, compare
from harness.gate import GateRules, gate
from harness.record import Outcome, Record
from harness.run import RunOptions, run_sweep
from harness.store import Store, load
from harness.verdict import Cell, ExitCode, Verdict
from harness.worker import InProcess, Settings

QUIET = 0.001
random = np.random.default_rng(0)


@pytest.fixture(autouse=True)
def same_noise(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever ran before."""
    monkeypatch.setattr(sys.modules[__name__], "random", np.random.default_rng(2))


def history(count: int = 3) -> list[Record]:
    return [record(rounds(random, QUIET), name, when) for when in range(count) for name in ("locks", "fa3")]


def tonight(slower: float = 0.0, share: float = QUIET, **changes: Any) -> list[Record]:
    return [record(rounds(random, share, slower=slower), when=9, **changes), record(rounds(random, QUIET), "fa3", 9)]


class Reruns:
    """Measures suspects again with scripted slow-downs, one per fresh process."""

    def __init__(self, *slower: float, **changes: Any) -> None:
        self.slower, self.changes, self.asked = slower, changes, []  # type: ignore[var-annotated]

    def __call__(self, suspects: Iterable[Cell], number: int) -> list[Record]:
        self.asked.append([cell.backend for cell in suspects])
        return [record(rounds(random, QUIET, slower=self.slower[number]), when=10 + number, **self.changes)]


def test_nothing_suspicious_is_measured_again() -> None:
    again = Reruns()
    found = gate(history(), tonight(), again)
    assert found.exit_code is ExitCode.OK and again.asked == [] and found.suspects == []


def test_an_alarm_needs_both_stages() -> None:
    again = Reruns(0.05, 0.05, 0.0)
    found = gate(history(), tonight(0.05), again)
    assert again.asked == [["locks"]] * 3, "only the suspect, in three processes"
    assert [cell.backend for cell in found.alarms] == ["locks"] and found.exit_code is ExitCode.REGRESSION
    assert "in fresh processes" in (found.alarms[0].reason or "")


def test_a_suspicion_that_does_not_repeat_is_no_alarm() -> None:
    found = gate(history(), tonight(0.05), Reruns(0.0, 0.05, 0.001))
    assert found.exit_code is ExitCode.OK and not found.alarms and len(found.suspects) == 1
    (cell,) = (cell for cell in found.comparison.cells if cell.backend == "locks")
    assert cell.verdict is Verdict.SAME and "not confirmed" in (cell.reason or "")


def test_a_suspect_that_cannot_be_measured_again_is_unclear() -> None:
    found = gate(history(), tonight(0.06), Reruns(0.1, 0.1, 0.1, outcome=Outcome.CRASHED, reason="x"))
    assert found.exit_code is ExitCode.UNCLEAR and not found.alarms


@pytest.mark.parametrize(
    ("again", "verdict"),
    [((0.0, 0.0, 0.05), Verdict.SAME), ((0.05, 0.05, 0.0), Verdict.SLOWER), (None, Verdict.INVALID)],
)
def test_what_throttled_is_measured_again(again: tuple[float, ...] | None, verdict: Verdict) -> None:
    hot = {"outcome": Outcome.THROTTLED, "reason": "clocks moved"}
    reruns = Reruns(*again) if again else Reruns(0.0, 0.0, 0.0, **hot)
    found = gate(history(), tonight(**hot), reruns)
    assert reruns.asked == [["locks"]] * 3
    (cell,) = (cell for cell in found.comparison.cells if cell.backend == "locks")
    assert cell.verdict is verdict and "throttled at first" in (cell.reason or "")
    codes = {Verdict.SAME: ExitCode.OK, Verdict.SLOWER: ExitCode.REGRESSION, Verdict.INVALID: ExitCode.UNCLEAR}
    assert found.exit_code is codes[verdict]


def test_a_faster_build_passes() -> None:
    assert gate(history(), tonight(-0.2), Reruns()).exit_code is ExitCode.OK


def test_unclear_passes_where_a_large_slow_down_is_ruled_out() -> None:
    old, new = history(), tonight(0.004, 0.02)
    (cell,) = (cell for cell in compare(old, new).cells if cell.backend == "locks")
    assert cell.verdict is Verdict.UNCLEAR and cell.effect
    assert gate(old, new, Reruns()).exit_code is ExitCode.OK
    strict = GateRules(Rules(), vouch=cell.effect.high)
    assert gate(old, new, Reruns(), strict).exit_code is ExitCode.UNCLEAR


def test_a_void_run_is_not_measured_again() -> None:
    control = [record(rounds(random, QUIET, slower=0.03), "fa3#2", 9)]
    again = Reruns()
    assert gate(history(), [*tonight(0.1), *control], again).exit_code is ExitCode.UNCLEAR and again.asked == []


def test_another_machine_has_no_history() -> None:
    other = {"gpu": {"name": "NVIDIA H100", "sm_count": 132}}
    new = [record(rounds(random, QUIET, slower=0.5), when=9, environment=other)]
    assert gate(history()[::2], new, Reruns()).exit_code is ExitCode.NOT_COMPARABLE


# --- change points


def test_change_points_need_two_points_after_the_change() -> None:
    level = [100 + 0.1 * float(value) for value in np.random.default_rng(1).normal(size=20)]
    assert change_points(level) == []
    for after in (2, 3, 6):
        assert change_points([*level, *[104.0 + 0.1 * at for at in range(after)]]) == [20], after
    assert change_points([*level, 104.0]) == [], "one bad night"
    assert change_points([*level, *[value + 5 for value in level], *[value - 5 for value in level]]) == [20, 40]
    assert change_points([]) == change_points([1.0] * 30) == change_points([1.0, 9.0]) == []


def test_noise_has_few_change_points() -> None:
    series = np.random.default_rng(2).normal(100, 1, size=(100, 20))
    assert sum(bool(change_points(list(values))) for values in series) <= 3


def test_the_gate_names_the_night_of_a_slow_drift() -> None:
    """Steps too small for an alarm of one night show over many."""
    old = [record(rounds(random, QUIET, slower=0.008 * (when >= 8)), when=when) for when in range(16)]
    found = gate(old, [record(rounds(random, QUIET, slower=0.008), when=16)], Reruns())
    assert found.exit_code is ExitCode.OK
    (note,) = found.comparison.notes
    assert "+0.8%" in note and "2026-01-09" in note and "commit abc" in note


# --- measuring again


def test_reruns_take_the_same_case_with_the_same_rivals(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(backends, "load", lambda name: Sdpa)
    names, cases = ["sdpa", "sdpa#2"], [tiny_case(320), tiny_case(325)]
    new = run_sweep(cases, names, Store(tmp_path / "new"), RunOptions("c"), lambda event: None, lambda s: InProcess(bench()))
    suspects = [cell for cell in compare([], new).cells if cell.case["ctx"] == 325]
    assert len(suspects) == 1
    asked = []

    def sweep(cases: Any, names: Any, store: Any, *rest: Any) -> list[Record]:
        asked.append((cases[0], names, store.path.parent.name))
        return []

    again = rerun.in_fresh_processes(load([tmp_path / "new"]), tmp_path / "re", RunOptions("c"), lambda event: None, sweep)
    again(suspects, 0)
    again(suspects, 2)
    assert asked == [(tiny_case(325), names, "1"), (tiny_case(325), names, "3")]


def says_who_it_is(pipe: Connection, settings: Settings) -> None:
    """A worker whose records carry its process id."""
    job = pipe.recv()
    now = "2026-01-01T00:00:00Z"
    made = [Record(key, now, str(os.getpid()), {}, name, Outcome.OK, read_roof_tbps=1.0) for name, key in job.keys.items()]
    pipe.send(("records", (made, True)))


def test_every_rerun_is_a_process_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(backends, "load", lambda name: Sdpa)
    monkeypatch.setattr(rerun, "serve", says_who_it_is)
    new = [record([[1.0]] * 10, "sdpa", case=asdict(tiny_case()))]
    again = rerun.in_fresh_processes(new, tmp_path, RunOptions("c"), lambda event: None)
    found = [again(compare([], new).cells, number)[0] for number in range(2)]
    assert len({os.getpid(), *(int(one.command) for one in found)}) == 3
    assert [load([tmp_path / number])[0].command for number in "12"] == [one.command for one in found]


# --- command line


@pytest.fixture
def call(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Callable[..., tuple[int, str, str]]:
    def run(*arguments: str) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["locks-bench", *arguments])
        with pytest.raises(SystemExit) as ended:
            main()
        out, err = capsys.readouterr()
        return int(ended.value.code or 0), out, err

    return run


def keep(folder: Path, records: list[Record]) -> str:
    store = Store(folder)
    for one in records:
        store.append(one)
    return str(folder)


def test_compare_on_the_command_line(call: Callable[..., tuple[int, str, str]], tmp_path: Path) -> None:
    base, new = keep(tmp_path / "base", history(1)), keep(tmp_path / "new", tonight(0.1))
    summary = tmp_path / "summary.md"
    code, out, _ = call("compare", base, new, "--markdown", str(summary))
    assert code == 1 and "SLOWER" in out and "+10." in out and "1 SLOWER, 1 SAME" in out
    text = summary.read_text()
    assert text.startswith("### locks-bench: slower") and "| SLOWER |" in text and "<details>" in text
    code, out, _ = call("compare", base, new, "--json", "-")
    data = json.loads(out)
    assert code == data["exit_code"] == 1 and {cell["verdict"] for cell in data["cells"]} == {"SLOWER", "SAME"}
    assert call("compare", base, base)[0] == 3
    code, _, err = call("compare", base, str(tmp_path / "absent"))
    assert code == 2 and "no store at" in err


def test_gate_on_the_command_line(call: Callable[..., tuple[int, str, str]], tmp_path: Path) -> None:
    base, new = keep(tmp_path / "base", history()), keep(tmp_path / "new", tonight())
    code, out, _ = call("gate", base, new)
    assert code == 0 and "no regression" in out
    code, _, err = call("gate", base, new, "--vouch", "5")
    assert code == 2 and "--vouch 5 is refused" in err


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine could measure the suspect")
def test_suspects_of_another_machine_are_judged_as_they_are(call: Callable[..., tuple[int, str, str]], tmp_path: Path) -> None:
    base, new = keep(tmp_path / "base", history()), keep(tmp_path / "new", tonight(0.06))
    code, out, err = call("gate", base, new)
    assert code == 2 and "could not be measured again" in out and err.count("no CUDA device here") == 1
