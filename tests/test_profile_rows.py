"""A profile and its row: bytes side by side, what the table shows, and the command line."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import fake_ncu
import pytest
from fake_records import case, failed, measured
from harness_fakes import tiny_case
from profiler_fakes import shown, tool_on_path

from bench.cli import main
from bench.profile import find_row
from harness.environment import kernel_sources
from harness.errors import UserError
from harness.profile import ncu
from harness.profile.result import Kernel, Profile, Status
from harness.profile.run import joined, profile
from harness.record import Outcome, Record
from harness.store import Store, load
from locks_kernels.cost import dense_bytes
from reports.bytes_table import byte_rows, bytes_report, kernels_report

# --- joined to the row


def test_the_row_and_its_profile_are_one_record(tmp_path: Path) -> None:
    row = measured(case(), "locks", 100.0)
    store = Store(tmp_path)
    store.append(row)
    store.append(joined(row, ncu.parse(fake_ncu.wide(fake_ncu.BASE, fake_ncu.BASE_UNITS), 0)))
    (found,) = load([tmp_path])
    assert found.dram_bytes_measured == 12_003_000 and found.rounds_ns == row.rounds_ns
    again = joined(found, Profile("ncu", Status.COUNTERS_HELD, "held"))
    assert again.dram_bytes_measured == 12_003_000, "a failure does not take back what was measured"
    other = joined(found, Profile("torch", Status.OK, kernels=[Kernel("k")]))
    assert other.dram_bytes_measured == 12_003_000 and set(other.profiles or {}) == {"ncu", "torch"}


@pytest.mark.parametrize(
    ("share", "flag"),
    [(0.89, "reach DRAM"), (0.9, None), (1.0, None), (1.2, None), (1.21, "more than once"), (4.0, "4.00 times")],
)
def test_analytic_and_measured_bytes_stand_side_by_side(share: float, flag: str | None) -> None:
    """4.0: keys and values read again for every query head of a group."""
    row = measured(case(), "fa3", 100.0)
    total = sum((row.bytes or {}).values())
    (compared,) = byte_rows([replace(row, dram_bytes_measured=round(share * total))])
    assert compared["analytic_bytes"] == total and compared["ratio"] == pytest.approx(share, rel=1e-6)
    assert (flag in compared["flag"]) if flag else compared["flag"] is None
    text = shown(bytes_report([replace(row, dram_bytes_measured=round(share * total))]))
    assert f"{share:.2f}" in text and ("!" in text) == bool(flag)


def test_unknown_bytes_are_a_dash() -> None:
    row = measured(case(), "fa3", 100.0)
    (compared,) = byte_rows([row])
    assert compared["ratio"] is compared["dram_bytes_measured"] is compared["flag"] is None
    assert "not profiled" in shown(bytes_report([row]))
    assert byte_rows([failed(case(), "fa3", Outcome.OOM, "too big")]) == []


def test_kernels_are_shown_slowest_first() -> None:
    found = ncu.parse(fake_ncu.wide(fake_ncu.BASE, fake_ncu.BASE_UNITS), 0)
    text = shown(kernels_report(found.record()))
    assert text.index("attend") < text.index("score") and "long_scoreboard 7.0" in text


def test_the_analytic_bytes_of_the_cache_are_exact() -> None:
    """Context 1024, batch 1, 8 KV heads of 128, bf16."""
    small = case(ctx=1024)
    assert dense_bytes(small.shape(), 1024, 1)["kv"] == 4_194_304


# --- command line


def test_rows_are_found_by_words_or_key() -> None:
    rows = [measured(case(ctx=ctx), name, 1.0) for ctx in (8192, 131072) for name in ("locks", "fa3", "fa3#2")]
    assert find_row(rows, "128K x 1 locks") is rows[3] and find_row(rows, "8K fa3") is rows[1]
    assert find_row(rows, rows[4].key) is rows[4]
    with pytest.raises(UserError, match="2 rows match 'locks'"):
        find_row(rows, "locks")
    for nothing in ("", "64K", "locks 8K"):
        with pytest.raises(UserError, match=r"no timed row|rows match"):
            find_row(rows, nothing)
    with pytest.raises(UserError, match="measure it first"):
        find_row([failed(case(), "locks", Outcome.OOM, "too big")], "locks")


def call(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> int:
    monkeypatch.setattr(sys, "argv", ["locks-bench", *arguments])
    with pytest.raises(SystemExit) as ended:
        main()
    return int(ended.value.code or 0)


def stored(tmp_path: Path, **changes: Any) -> Record:
    environment = {"gpu": {"name": "NVIDIA H200", "sm_count": 132}, "kernel_sources": kernel_sources()}
    row = measured(case(), "locks", 100.0, **({"environment": environment} | changes))
    Store(tmp_path / "kept").append(row)
    return row


@pytest.fixture
def tool(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    return tool_on_path(tmp_path, monkeypatch)


def test_profile_on_the_command_line(
    tool: Callable[..., None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    stored(tmp_path)
    kept = str(tmp_path / "kept")
    tool("ncu", fake_ncu.wide(fake_ncu.BASE, fake_ncu.BASE_UNITS))
    assert call(monkeypatch, "profile", "1M locks", "--store", kept, "--json", "-") == 0
    data = json.loads(capsys.readouterr().out)
    assert data["profile"]["dram_bytes"] == data["bytes"]["dram_bytes_measured"] == 12_003_000
    assert load([kept])[0].dram_bytes_measured == 12_003_000
    tool("ncu", fake_ncu.PERMISSION, code=1)
    assert call(monkeypatch, "profile", "1M locks", "--store", kept) == 0
    assert "NO_PERMISSION" in capsys.readouterr().err
    assert call(monkeypatch, "profile", "1M locks", "--store", kept, "--strict") == 1
    (row,) = load([kept])
    assert row.rounds_ns and row.profiles and row.profiles["ncu"]["status"] == "NO_PERMISSION"


def test_a_row_of_other_kernels_gets_no_profile(
    tool: Callable[..., None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    stored(tmp_path, environment={"gpu": {"name": "NVIDIA H200"}, "kernel_sources": "older"})
    tool("ncu", fake_ncu.wide(fake_ncu.BASE, fake_ncu.BASE_UNITS))
    assert call(monkeypatch, "profile", "1M locks", "--store", str(tmp_path / "kept")) == 2
    assert "have changed" in capsys.readouterr().err


def test_torch_traces_a_real_case_on_the_cpu(tmp_path: Path) -> None:
    """Through the real target process, for a backend with stages."""
    here = tmp_path / "locks_bench-0.dist-info"
    here.mkdir()
    (here / "METADATA").write_text("Metadata-Version: 2.1\nName: locks-bench-for-this-test\nVersion: 0\n")
    (here / "entry_points.txt").write_text("[locks_bench.backends]\nlocks = harness.backends.locks:Locks\n")
    row = measured(case(), "locks", 1.0, case=asdict(tiny_case()) | {"contents": "random"})
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", str(tmp_path))
        found = profile(row, "torch", tmp_path / "traces", 200.0)
    assert found.status is Status.OK, found.reason
    assert found.kernels and sum(kernel.time_share or 0 for kernel in found.kernels) == pytest.approx(1.0)
    trace = json.loads(Path(found.trace or "").read_text())
    ranges = {event.get("name") for event in trace["traceEvents"]}
    assert {f"{ncu.STAGE_PREFIX}{stage}" for stage in ("append_finalise", "score", "select", "attend")} <= ranges
