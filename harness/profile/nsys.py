"""Nsight Systems: where the time of a step goes, kernel by kernel.  Imports no torch."""

from __future__ import annotations

import csv
from collections.abc import Sequence
from pathlib import Path

from harness.profile.ncu import number, with_time_shares
from harness.profile.result import Kernel, Profile, Status


def record_command(nsys: str, report: Path, target: Sequence[str]) -> list[str]:
    """Record what `target` runs inside the profiler's range; a graph node by node, which the default would show as one."""
    options = ["--trace=cuda,nvtx", "--sample=none", "--cpuctxsw=none", "--cuda-graph-trace=node", "--force-overwrite=true"]
    return [nsys, "profile", *options, "--capture-range=cudaProfilerApi", f"--output={report}", *target]


def sum_command(nsys: str, report: Path) -> list[str]:
    return [nsys, "stats", "--report=cuda_gpu_kern_sum", "--format=csv", "--force-export=true", f"{report}.nsys-rep"]


def parse(output: str, exit_code: int) -> Profile:
    """A profile from the table of kernel sums."""
    lines = output.splitlines()
    start = next((at for at, line in enumerate(lines) if "Total Time" in line and "Name" in line), None)
    kernels: list[Kernel] = []
    if start is not None:
        header, *body = list(csv.reader(lines[start:]))
        kernels = [
            kernel for row in body if len(row) == len(header) and (kernel := _kernel(dict(zip(header, row, strict=True))))
        ]
    if not kernels:
        status = Status.FAILED if exit_code else Status.NO_KERNELS
        return Profile("nsys", status, f"exit code {exit_code}, and no kernel in the report")
    return Profile("nsys", Status.OK, kernels=with_time_shares(kernels))


def _kernel(row: dict[str, str]) -> Kernel | None:
    total = next((name for name in row if name.startswith("Total Time")), None)
    unit = total.rpartition("(")[2].rstrip(")") if total and "(" in total else "ns"
    duration = number(row[total], unit) if total else None
    launches = number(row.get("Instances") or row.get("Count") or "", "")
    return Kernel(row["Name"], int(launches or 1), duration_ns=duration) if duration is not None else None
