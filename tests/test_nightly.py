"""The nightly job: its order, its exit code, and which nights become baselines.  Only measuring is faked."""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from comparison_fakes import MACHINE, record, rounds
from harness_fakes import tiny_case
from plug_in import ROOT, environment

from bench.suite import load_suite
from ci import nightly
from harness.case import Case
from harness.record import Outcome, Record
from harness.stopping import LEAST_ROUNDS
from harness.store import Store
from harness.thresholds import load_thresholds, threshold

random = np.random.default_rng(0)
SLUG = "nvidia-h200-132-580.95.05-700w"
Night = Callable[..., int]


def night_of(when: int, slower: float = 0.0, control: float = 0.0) -> list[Record]:
    """Records of a backend that no entry point knows, so that a re-run of it is a failure and not a measurement."""
    case = {"case": asdict(tiny_case())}
    return [
        record(rounds(random, 0.001, slower=slower), "ours", when, **case),
        record(rounds(random, 0.001), "rival", when, **case),
        record(rounds(random, 0.001, slower=control), "rival#2", when, **case),
    ]


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Night:
    """One night: the sweep stores what it is told, the gate is the real one; the commands that ran are in `run.commands`."""
    real, nights = nightly.locks_bench, iter(range(100))

    def one(records: list[Record], sweep_code: int = 0, **changes: Any) -> int:
        commands: list[str] = []

        def locks_bench(*arguments: str | Path) -> int:
            commands.append(str(arguments[0]))
            if arguments[0] == "sweep":
                store = Store(Path(arguments[3]))
                for each in records:
                    store.append(each)
                return sweep_code
            return real(*arguments) if arguments[0] == "gate" else 7  # what else fails costs nothing

        monkeypatch.setattr(nightly, "locks_bench", locks_bench)
        options = {"suite": "nightly", "budget": "15m", "profile": ["a", "b"], "baselines": tmp_path / "baselines"}
        options |= {"out": tmp_path / f"night-{next(nights)}", "summary": tmp_path / "summary.md", "accept": False}
        code = nightly.nightly(argparse.Namespace(**(options | changes)))
        one.commands = commands  # type: ignore[attr-defined]
        return code

    return one


def baselines(tmp_path: Path) -> list[str]:
    return sorted(file.name for file in (tmp_path / "baselines" / SLUG).glob("*"))


def test_nights_of_one_build_pass_and_join_the_window(run: Night, tmp_path: Path) -> None:
    assert run(night_of(0)) == 3, "nothing to compare with, and no baseline is invented"
    assert baselines(tmp_path) == []
    assert run(night_of(1), accept=True) == 0 and len(baselines(tmp_path)) == 1
    assert run(night_of(2)) == 0 and run(night_of(3)) == 0
    assert run.commands == ["doctor", "sweep", "profile", "profile", "gate", "report"]  # type: ignore[attr-defined]
    assert baselines(tmp_path) == [f"2026-01-0{day}T00-00-00Z.jsonl" for day in (2, 3, 4)]
    assert "no regression" in (tmp_path / "summary.md").read_text()


def test_the_window_holds_the_last_good_nights(tmp_path: Path) -> None:
    window = tmp_path / "baselines" / SLUG
    for when in range(13):
        store = Store(tmp_path / f"night-{when}")
        store.append(record([[1.0]] * 10, "ours", when))
        nightly.keep(store.path.parent, window, sorted(window.glob("*.jsonl")))
    assert len(baselines(tmp_path)) == nightly.WINDOW and baselines(tmp_path)[-1].startswith("2026-01-13")
    nightly.keep(store.path.parent, window, [])
    assert baselines(tmp_path) == ["2026-01-13T00-00-00Z.jsonl"], "a new start"


def test_a_suspicion_that_cannot_be_repeated_is_not_a_good_night(run: Night, tmp_path: Path) -> None:
    run(night_of(0), accept=True)
    assert run(night_of(1, slower=0.05)) == 2
    assert len(baselines(tmp_path)) == 1


def test_void_nights_are_no_baselines(run: Night, tmp_path: Path) -> None:
    assert run(night_of(0, control=0.03), accept=True) == 2
    assert run(night_of(0)[:2], accept=True) == 2, "without an A/A comparison"
    assert baselines(tmp_path) == []
    run(night_of(1), accept=True)
    assert run(night_of(2, control=0.03)) == 2 and len(baselines(tmp_path)) == 1


def test_lost_rows_are_no_good_night(run: Night, tmp_path: Path) -> None:
    run(night_of(0), accept=True)
    lost = night_of(1)
    lost[0] = replace(lost[0], outcome=Outcome.CRASHED, reason="illegal access", rounds_ns=None)
    assert run(lost) == 2 and len(baselines(tmp_path)) == 1


def test_a_row_of_the_baseline_that_throttled_gets_a_successor(run: Night, tmp_path: Path) -> None:
    hot = night_of(0)
    hot[0] = replace(hot[0], outcome=Outcome.THROTTLED, reason="clocks moved")
    assert run(hot, accept=True) == 0
    assert run(night_of(1)) == 0 and len(baselines(tmp_path)) == 2
    assert run(night_of(2, slower=0.05)) == 2, "suspicious against the night that was cool"


def test_another_machine_has_its_own_baselines(run: Night, tmp_path: Path) -> None:
    run(night_of(0), accept=True)
    other = [replace(each, environment=MACHINE | {"driver": "590.1"}) for each in night_of(1)]
    assert run(other) == 3


def test_a_sweep_that_cannot_run_ends_the_night(run: Night, tmp_path: Path) -> None:
    assert run([], sweep_code=2) == 2
    assert run.commands == ["doctor", "sweep"]  # type: ignore[attr-defined]


def test_thresholds_of_the_night_have_reasons_and_fit_the_cells() -> None:
    limits = load_thresholds(ROOT / "ci" / "thresholds.toml")
    assert threshold(limits, "llama-3.1-8b attention 128K x 16 budget 2048 flashinfer") == 0.02
    assert threshold(limits, "llama-3.1-8b attention 8K x 1 budget 2048 flashinfer") == 0.04
    assert threshold(limits, "llama-3.1-8b attention 128K x 1 budget 2048 flashinfer") == 0.02


def test_profiled_cases_are_cells_of_the_suite(monkeypatch: pytest.MonkeyPatch) -> None:
    from bench.profile import find_row
    from harness import backends

    class Point:
        def __init__(self, name: str) -> None:
            self.name = name

    names = ("fa3", "flashinfer", "locks", "locks-cuda", "locks-triton", "sdpa")
    monkeypatch.setattr(backends, "entry_points", lambda group: [Point(name) for name in names])
    cells = load_suite("nightly").cells("cuda")
    rows = [_row(case, name) for case, chosen in cells.items() for name in chosen]
    assert [find_row(rows, wanted).backend for wanted in nightly.PROFILED] == ["flashinfer", "locks"]


def _row(case: Case, name: str) -> Record:
    return record([[1.0]] * 10, name, case=asdict(case), key=f"{name} {case}")


def test_workflows_call_what_exists() -> None:
    """No YAML parser is needed to see whether the commands of a workflow can be."""
    text = (ROOT / ".github" / "workflows" / "nightly.yml").read_text()
    used = next(line for line in text.splitlines() if "ci.nightly" in line).split("ci.nightly", 1)[1].split()
    known = subprocess.run([sys.executable, "-m", "ci.nightly", "--help"], capture_output=True, text=True, cwd=ROOT).stdout
    assert [word for word in used if word.startswith("--") and word not in known] == []
    assert (ROOT / "locks").exists() and "./locks sweep smoke" in (ROOT / ".github" / "workflows" / "tests.yml").read_text()


def test_the_kernels_are_a_pytest_benchmark_suite(tmp_path: Path) -> None:
    """On a CPU with the same code; what it writes can be compared."""
    names = {"sdpa": "harness.backends.sdpa:Sdpa", "locks": "harness.backends.locks:Locks"}
    settings = environment(tmp_path / "plug-in", "", names) | {"CUDA_VISIBLE_DEVICES": ""}
    settings.pop("PYTEST_XDIST_WORKER", None)  # of a worker that runs this test: pytest-benchmark would measure nothing
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:xdist", "-p", "no:cacheprovider", "ci/bench_kernels.py"]
    command += ["--benchmark-json", str(tmp_path / "a.json")]
    run = subprocess.run(command, cwd=ROOT, env=settings, capture_output=True, text=True)
    assert run.returncode == 0, run.stdout
    data = json.loads((tmp_path / "a.json").read_text())
    assert len(data["benchmarks"]) == 2
    for one in data["benchmarks"]:
        assert 0 < one["stats"]["median"] < 1 and one["stats"]["rounds"] >= LEAST_ROUNDS
        assert one["extra_info"]["timer"] == "wall"
        assert one["extra_info"]["gate"]["relative_error"] < 0.01
    (tmp_path / "b.json").write_text((tmp_path / "a.json").read_text())
    compare = [sys.executable, "-m", "pytest_benchmark", "compare", str(tmp_path / "a.json"), str(tmp_path / "b.json")]
    shown = subprocess.run(compare, capture_output=True, text=True, cwd=tmp_path)
    assert shown.returncode == 0 and "test_step[4x2x64-2048-1-512-locks]" in shown.stdout + shown.stderr
