"""Profilers on fakes: every form of output gives the same bytes, every failure a status with a hint, timing rows stay."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import fake_ncu
import pytest
from fake_records import case, failed, measured
from harness_fakes import tiny_case
from rich.console import Console

from bench.cli import main
from bench.profile import find_row
from harness.environment import kernel_sources
from harness.errors import UserError
from harness.profile import ncu, nsys
from harness.profile.result import HINTS, Kernel, Profile, Status
from harness.profile.run import joined, profile
from harness.record import Outcome, Record
from harness.store import Store, load
from locks_kernels.cost import dense_bytes
from reports.bytes_table import byte_rows, bytes_report, kernels_report


def shown(what: Any) -> str:
    console = Console(width=200, record=True, quiet=False, file=open(os.devnull, "w"))  # noqa: SIM115
    console.print(what)
    return console.export_text()


@pytest.mark.parametrize(
    "output",
    [
        fake_ncu.wide(fake_ncu.BASE, fake_ncu.BASE_UNITS),
        fake_ncu.wide(fake_ncu.LARGE, fake_ncu.LARGE_UNITS),
        fake_ncu.wide(fake_ncu.LARGE, ("MB", "KB", "us", "%", "inst")).replace('"MB"', '"Mbyte"').replace('"KB"', '"Kbyte"'),
        fake_ncu.wide(fake_ncu.BASE, ("byte", "byte", "ns", "%", ""), columns=30),
        fake_ncu.wide(fake_ncu.BASE, fake_ncu.BASE_UNITS, columns=5, nvtx=False),
        fake_ncu.long(fake_ncu.BASE, fake_ncu.BASE_UNITS),
        fake_ncu.long(fake_ncu.LARGE, fake_ncu.LARGE_UNITS),
    ],
)
def test_every_form_gives_the_same_numbers(output: str) -> None:
    found = ncu.parse(output, 0)
    assert found.status is Status.OK and found.dram_bytes == 12_003_000
    score, attend = found.kernels
    assert (score.dram_bytes_read, score.dram_bytes_written, score.duration_ns) == (3_000_000, 1000, pytest.approx(1000))
    assert (score.time_share, attend.time_share) == (pytest.approx(0.25), pytest.approx(0.75))
    assert attend.bandwidth_tbps == pytest.approx(9_002_000 / 3000 / 1e3) and attend.occupancy == pytest.approx(0.255)
    assert score.stalls == {"long_scoreboard": 4.5} and "barrier" in score.missing
    assert "score" in score.name
    if "locks-bench/" in output:
        assert [kernel.stage for kernel in found.kernels] == ["score", "attend"]
    json.dumps(found.record(), allow_nan=False)


def test_nan_is_null_with_a_reason_and_the_sum_is_unknown() -> None:
    for nothing in ("nan", "n/a", "", "-nan", "inf"):
        values = [(nothing, *fake_ncu.BASE[0][1:]), fake_ncu.BASE[1]]
        found = ncu.parse(fake_ncu.wide(values, fake_ncu.BASE_UNITS), 0)
        assert found.kernels[0].dram_bytes_read is None and "gave" in found.kernels[0].missing["dram_bytes_read"]
        assert found.dram_bytes is None, "part of the bytes is not the bytes"
        assert found.kernels[0].bandwidth_tbps is None and found.kernels[1].dram_bytes_read == 9_000_000


@pytest.mark.parametrize(
    ("output", "code", "status"),
    [
        (fake_ncu.PERMISSION, 0, Status.NO_PERMISSION),
        (fake_ncu.PERMISSION, 1, Status.NO_PERMISSION),
        (fake_ncu.NONE_PROFILED, 0, Status.NO_KERNELS),
        (fake_ncu.HELD, 1, Status.COUNTERS_HELD),
        (fake_ncu.wide((), fake_ncu.BASE_UNITS), 0, Status.NO_KERNELS),
        ("", 0, Status.NO_KERNELS),
        ("Traceback\nMemoryError: too big\n", 1, Status.FAILED),
    ],
)
def test_failures_are_typed_and_never_0_bytes(output: str, code: int, status: Status) -> None:
    found = ncu.parse(output, code)
    assert (found.status, found.kernels, found.dram_bytes) == (status, [], None)
    assert found.reason and found.hint
    row = joined(measured(case(), "locks", 100.0), found)
    assert row.outcome is Outcome.OK and row.rounds_ns and row.dram_bytes_measured is None
    assert row.profiles and row.profiles["ncu"]["status"] == status and status in shown(bytes_report([row]))


def test_every_failure_has_a_hint_and_nobody_elses_process_is_stopped_by_us() -> None:
    assert set(HINTS) == set(Status) - {Status.OK}
    assert "its owner can pause it" in HINTS[Status.COUNTERS_HELD]


def test_the_command_changes_no_clocks_and_asks_for_the_bytes() -> None:
    command = ncu.command("ncu", ["python", "x"])
    assert command[command.index("--clock-control") + 1] == "none"
    assert command[command.index("--profile-from-start") + 1] == "off" and "--nvtx" in command
    asked = command[command.index("--metrics") + 1].split(",")
    assert {"dram__bytes_read.sum", "dram__bytes_write.sum"} <= set(asked) and command[-2:] == ["python", "x"]


# --- running a tool


@pytest.fixture
def tool(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Put a tool on PATH that prints a text and ends with a code, after some seconds."""

    def make(name: str, text: str, code: int = 0, seconds: int = 0) -> None:
        (tmp_path / f"{name}.txt").write_text(text)
        script = tmp_path / name
        wait = f"sleep {seconds} & wait\n" if seconds else ""
        script.write_text(f"#!/bin/sh\n{wait}exec {sys.executable} {fake_ncu.__file__} {tmp_path / name}.txt {code}\n")
        script.chmod(0o755)
        monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")

    return make


def test_a_missing_tool_is_a_status(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    found = profile(measured(case(), "locks", 1.0), "ncu", tmp_path)
    assert found.status is Status.NO_TOOL and found.hint and "install ncu" in found.hint


def test_a_hanging_tool_ends_with_all_its_children(tool: Callable[..., None], tmp_path: Path) -> None:
    tool("ncu", "", seconds=67)
    start = time.monotonic()
    found = profile(measured(case(), "locks", 1.0), "ncu", tmp_path / "traces", timeout_s=0.5)
    assert found.status is Status.TIMEOUT and time.monotonic() - start < 20 and "0.5 s" in (found.reason or "")
    running = subprocess.run(["ps", "-eo", "args"], capture_output=True, text=True).stdout
    assert "sleep 67" not in running.splitlines()


def test_tools_for_gpus_refuse_rows_of_a_cpu(tmp_path: Path) -> None:
    row = measured(case(device="cpu"), "locks", 1.0)
    for name in ("ncu", "nsys"):
        with pytest.raises(UserError, match="--tool torch"):
            profile(row, name, tmp_path)
    with pytest.raises(UserError, match="use one of ncu, nsys, torch"):
        profile(row, "perf", tmp_path)


NSYS = """Generating SQLite file
Processing [x.sqlite] with [cuda_gpu_kern_sum.py]...

Time (%),Total Time (ns),Instances,Avg (ns),Med (ns),Name
75.0,3000,3,1000.0,1000.0,"attend<float, 128>"
25.0,1000,1,1000.0,1000.0,score
"""


def test_nsys_gives_time_shares(tool: Callable[..., None], tmp_path: Path) -> None:
    tool("nsys", NSYS)
    found = profile(measured(case(), "locks", 1.0), "nsys", tmp_path / "traces")
    assert found.status is Status.OK and found.trace and found.trace.endswith(".nsys-rep")
    assert [(kernel.name, kernel.launches, kernel.time_share) for kernel in found.kernels] == [
        ("attend<float, 128>", 3, 0.75),
        ("score", 1, 0.25),
    ]
    micro = nsys.parse('"Time (%)","Total Time (us)","Instances","Name"\n"100.0","1,500","2","k"\n', 0)
    assert micro.kernels[0].duration_ns == 1.5e6
    assert nsys.parse("no table", 0).status is Status.NO_KERNELS
    command = nsys.record_command("nsys", Path("x"), ["python"])
    assert "--cuda-graph-trace=node" in command and "--capture-range=cudaProfilerApi" in command
    tool("nsys", "cannot start", code=1)
    assert profile(measured(case(), "locks", 1.0), "nsys", tmp_path / "traces").status is Status.FAILED


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
