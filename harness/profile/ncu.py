"""Nsight Compute: its command line, and its CSV whatever the number of columns and the units.  Imports no torch."""

from __future__ import annotations

import csv
import math
import re
import tomllib
from collections import defaultdict
from collections.abc import Sequence
from functools import cache
from pathlib import Path

from harness.profile.result import Kernel, Profile, Status, last_line

METRICS_FILE = Path(__file__).resolve().parents[2] / "profiles" / "ncu.toml"
STAGE_PREFIX = "locks-bench/"  # of the NVTX ranges around the stages
STAGE = re.compile(re.escape(STAGE_PREFIX) + r"([\w.-]+)")
SAYS = (  # what the tool prints -> what it means; its exit code may be 0 all the same
    ("ERR_NVGPUCTRPERM", Status.NO_PERMISSION),
    ("Failed to initialize the profiler", Status.NO_PERMISSION),  # a sandbox between the tool and the driver
    ("driver resource was unavailable", Status.COUNTERS_HELD),
    ("No kernels were profiled", Status.NO_KERNELS),
)
NOT_NUMBERS = ("", "n/a", "nan", "-nan", "inf", "-inf", "(!) n/a", "no data")
_PREFIXES = {"": 1.0, "k": 1e3, "m": 1e6, "g": 1e9, "t": 1e12}
_SECONDS = {"n": 1.0, "u": 1e3, "m": 1e6, "": 1e9}


@cache
def metric_set() -> dict[str, dict[str, str]]:
    """Tables `options`, `metrics` and `stalls` of profiles/ncu.toml."""
    return tomllib.loads(METRICS_FILE.read_text())


def command(ncu: str, target: Sequence[str]) -> list[str]:
    """Profile what `target` runs between the start and the stop of the CUDA profiler, and print it as CSV."""
    chosen = metric_set()
    options = [part for name, value in chosen["options"].items() for part in (f"--{name}", value)]
    metrics = ",".join([*chosen["metrics"].values(), *chosen["stalls"].values()])
    return [ncu, *options, "--nvtx", "--csv", "--page", "raw", "--metrics", metrics, *target]


def parse(output: str, exit_code: int) -> Profile:
    """A profile from all that the tool printed."""
    status = next((status for text, status in SAYS if text in output), None)
    if status is not None:
        return Profile("ncu", status, _line_with(output, status))
    kernels = [_kernel(name, stage, values) for name, stage, values in _launches(output)]
    if not kernels:
        failed = Status.FAILED if exit_code else Status.NO_KERNELS
        return Profile("ncu", failed, f"exit code {exit_code}: {last_line(output)}")
    return Profile("ncu", Status.OK, kernels=with_time_shares(kernels))


def with_time_shares(kernels: list[Kernel]) -> list[Kernel]:
    """The same kernels with their share of the time of all; unknown if one of them has no duration."""
    times = [kernel.duration_ns for kernel in kernels]
    total = sum(time for time in times if time is not None)
    if None in times or total <= 0:
        return kernels
    return [Kernel(**(vars(kernel) | {"time_share": (kernel.duration_ns or 0.0) / total})) for kernel in kernels]


Value = tuple[str, str]  # number and unit as printed


def _launches(output: str) -> list[tuple[str, str | None, dict[str, Value]]]:
    """Kernel name, stage and metrics of each launch, from the wide form (a column per metric) or the long (a row)."""
    lines = output.splitlines()
    start = next((at for at, line in enumerate(lines) if line.startswith('"ID"') or line.startswith("ID,")), None)
    if start is None:
        return []
    header, *body = list(csv.reader(line for line in lines[start:] if not line.startswith("==")))
    rows = [dict(zip(header, row, strict=True)) for row in body if len(row) == len(header)]
    if "Metric Name" in header:
        return _long(rows)
    units = rows[0] if rows and not rows[0]["ID"].strip() else {}
    return [
        (row["Kernel Name"], _stage(row), {name: (text, units.get(name, "")) for name, text in row.items() if "__" in name})
        for row in rows[1 if units else 0 :]
    ]


def _long(rows: list[dict[str, str]]) -> list[tuple[str, str | None, dict[str, Value]]]:
    metrics: dict[str, dict[str, Value]] = defaultdict(dict)
    first: dict[str, dict[str, str]] = {}
    for row in rows:
        first.setdefault(row["ID"], row)
        metrics[row["ID"]][row["Metric Name"]] = (row["Metric Value"], row.get("Metric Unit", ""))
    return [(row["Kernel Name"], _stage(row), metrics[launch]) for launch, row in first.items()]


def _stage(row: dict[str, str]) -> str | None:
    """The NVTX range is in one of many columns, whose names differ by version."""
    found = (STAGE.search(text) for name, text in row.items() if name != "Kernel Name")
    return next((match[1] for match in found if match), None)


def _kernel(name: str, stage: str | None, values: dict[str, Value]) -> Kernel:
    chosen, missing = metric_set(), {}
    found: dict[str, float | None] = {}
    for field, metric in (chosen["metrics"] | chosen["stalls"]).items():
        found[field] = number(*values[metric]) if metric in values else None
        if found[field] is None:
            missing[field] = f"the tool gave {values[metric][0]!r}" if metric in values else "the tool does not list it"
    read, written, duration = (found[field] for field in ("dram_bytes_read", "dram_bytes_written", "duration_ns"))
    moved = None if read is None or written is None else read + written
    occupancy = found["occupancy"]
    return Kernel(
        name=name,
        stage=stage,
        duration_ns=duration,
        dram_bytes_read=None if read is None else round(read),
        dram_bytes_written=None if written is None else round(written),
        bandwidth_tbps=moved / duration / 1e3 if moved is not None and duration else None,
        occupancy=None if occupancy is None else occupancy / 100,
        stalls={stall: value for stall in chosen["stalls"] if (value := found[stall]) is not None},
        missing=missing,
    )


def number(text: str, unit: str) -> float | None:
    """Bytes, ns, or the number as it is; None for what is no number."""
    if text.strip().lower() in NOT_NUMBERS:
        return None
    try:
        value = float(text.replace(",", "").replace("\u00a0", "").replace(" ", ""))
    except ValueError:
        return None
    return value * _factor(unit.strip().lower()) if math.isfinite(value) else None


def _factor(unit: str) -> float:
    if match := re.fullmatch(r"([kmgt]?)bytes?", unit):
        return _PREFIXES[match[1]]
    if match := re.fullmatch(r"([num]?)s(?:ec(?:ond)?s?)?", unit):
        return _SECONDS[match[1]]
    return 1.0


def _line_with(output: str, status: Status) -> str:
    texts = [text for text, meaning in SAYS if meaning is status]
    return next(line.strip() for line in output.splitlines() if any(text in line for text in texts))
