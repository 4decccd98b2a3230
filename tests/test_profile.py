"""Profilers on fakes: every form of output gives the same bytes, every failure a status with a hint, timing rows stay."""

from __future__ import annotations

import json
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import fake_ncu
import pytest
from fake_records import case, measured
from profiler_fakes import shown, tool_on_path

from harness.errors import UserError
from harness.profile import ncu, nsys
from harness.profile.result import HINTS, Status
from harness.profile.run import joined, profile
from harness.record import Outcome
from reports.bytes_table import bytes_report


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
        (fake_ncu.SANDBOX, 1, Status.NO_PERMISSION),
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
    return tool_on_path(tmp_path, monkeypatch)


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
