"""What Nsight Compute prints, in the forms that its versions and options give."""

from __future__ import annotations

import csv
import io
import sys
from collections.abc import Sequence
from pathlib import Path

READ, WRITTEN, TIME = "dram__bytes_read.sum", "dram__bytes_write.sum", "gpu__time_duration.sum"
OCCUPANCY = "sm__warps_active.avg.pct_of_peak_sustained_active"
STALL = "smsp__average_warps_issue_stalled_long_scoreboard_per_issue_active.ratio"
METRICS = (READ, WRITTEN, TIME, OCCUPANCY, STALL)
BANNER = '==PROF== Connected to process 4242 (/usr/bin/python3.12)\nready\n==PROF== Profiling "attend": 0%....100% - 9 passes\n'
NVTX = ("Id:Domain:Push/Pop_Range:PL_Type:PL_Value:CLR_Type:Color:Msg_Type:Msg", "Id:Domain:Start/Stop_Range")

PERMISSION = """==PROF== Connected to process 77 (/usr/bin/python3.12)
==ERROR== ERR_NVGPUCTRPERM - The user does not have permission to access NVIDIA GPU Performance Counters on the target device 0.
"""
SANDBOX = "==PROF== Connected to process 77\n==ERROR== Failed to initialize the profiler: LibraryNotLoaded\n"
NONE_PROFILED = (
    "==PROF== Connected to process 77\n==PROF== Disconnected from process 77\n==WARNING== No kernels were profiled.\n"
)
HELD = (
    "==ERROR== Profiling failed because a driver resource was unavailable. Ensure that no other tool (like DCGM) is "
    "concurrently collecting profiling data. See https://docs.nvidia.com/nsight-compute/ProfilingGuide/index.html#faq.\n"
)


def _csv(rows: Sequence[Sequence[str]]) -> str:
    text = io.StringIO()
    csv.writer(text, quoting=csv.QUOTE_ALL, lineterminator="\n").writerows(rows)
    return text.getvalue()


def wide(values: Sequence[Sequence[str]], units: Sequence[str], columns: int = 12, nvtx: bool = True) -> str:
    """`--page raw`: a row per launch, a column per metric, units in a row of their own; `columns` before the metrics."""
    names = ["ID", "Process ID", "Process Name", "Host Name", "Kernel Name", *(f"Extra {at}" for at in range(columns - 5))]
    ranges = list(NVTX) if nvtx else []
    rows = [[*names, *ranges, *METRICS], [""] * (len(names) + len(ranges)) + list(units)]
    for at, row in enumerate(values):
        stage = ["score", "attend"][at % 2]
        message = [f'"0:<default domain>:locks-bench/{stage}:none:none:none:none:registered:x"', ""] if nvtx else []
        front = [
            str(at),
            "4242",
            "python3.12",
            "127.0.0.1",
            f"void {stage}<float, 128>(int, float *)",
            *(["1"] * (columns - 5)),
        ]
        rows.append([*front, *message, *row])
    return BANNER + _csv(rows) + "==PROF== Disconnected from process 4242\n"


def long(values: Sequence[Sequence[str]], units: Sequence[str]) -> str:
    """`--page details`: a row per metric."""
    head = [
        "ID",
        "Process ID",
        "Kernel Name",
        "Context",
        "Stream",
        "Section Name",
        "Metric Name",
        "Metric Unit",
        "Metric Value",
    ]
    rows = [head]
    for at, row in enumerate(values):
        for metric, unit, value in zip(METRICS, units, row, strict=True):
            name = ["score", "attend"][at % 2]
            rows.append([str(at), "4242", name, "1", "7", "Command line profiler metrics", metric, unit, value])
    return BANNER + _csv(rows)


BASE_UNITS = ("byte", "byte", "nsecond", "%", "warp")
BASE = (("3,000,000", "1000", "1,000", "50.00", "4.5"), ("9000000", "2000", "3000", "25.5", "7"))
LARGE_UNITS = ("Mbyte", "Kbyte", "usecond", "%", "")
LARGE = (("3.0", "1.0", "1.0", "50.00", "4.5"), ("9.0", "2.0", "3.0", "25.5", "7"))

if __name__ == "__main__":  # stands for the tool itself: prints a file, ends with a code
    print(Path(sys.argv[1]).read_text(), end="")
    sys.exit(int(sys.argv[2]))
