"""Analytic beside measured bytes: one row per record, the ratio, and a flag where the two do not agree.  Never prints."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from rich import box
from rich.console import Group, RenderableType
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from harness.compare import cell_name
from harness.record import Record

AGREES = (0.9, 1.2)  # measured / analytic


def byte_rows(records: Iterable[Record]) -> list[dict[str, Any]]:
    """One row per record that was profiled or has analytic bytes; `ratio` None where one of the two is unknown."""
    return [_row(record) for record in records if record.bytes or record.profiles]


def _row(record: Record) -> dict[str, Any]:
    analytic = sum(record.bytes.values()) if record.bytes else None
    measured = record.dram_bytes_measured
    ratio = measured / analytic if measured is not None and analytic else None
    ncu = (record.profiles or {}).get("ncu") or {}
    return {
        "cell": cell_name(record),
        "analytic_bytes": analytic,
        "analytic_parts": record.bytes,
        "dram_bytes_measured": measured,
        "ratio": ratio,
        "flag": _flag(ratio),
        "status": ncu.get("status"),
        "hint": ncu.get("hint"),
        "kernels": ncu.get("kernels") or [],
    }


def _flag(ratio: float | None) -> str | None:
    if ratio is None or AGREES[0] <= ratio <= AGREES[1]:
        return None
    if ratio > AGREES[1]:
        return f"reads {ratio:.2f} times what it needs to: something is read more than once"
    return f"only {ratio:.2f} of the analytic bytes reach DRAM: data came from a cache or was not read"


def bytes_report(records: Iterable[Record]) -> RenderableType:
    """For a terminal."""
    rows = byte_rows(records)
    table = Table(box=box.SIMPLE_HEAD, title="DRAM bytes of one step: counted from the shape, and by the device")
    for heading in ("cell", "analytic MB", "measured MB", "ratio", ""):
        table.add_column(heading, justify="left" if heading in ("cell", "") else "right")
    for row in rows:
        ratio = "-" if row["ratio"] is None else f"{row['ratio']:.2f}"
        style = "yellow" if row["flag"] else None
        last = "!" if row["flag"] else "" if row["ratio"] is not None else row["status"] or "not profiled"
        table.add_row(
            escape(row["cell"]), _mb(row["analytic_bytes"]), _mb(row["dram_bytes_measured"]), ratio, last, style=style
        )
    notes = [f"! {row['cell']}: {row['flag']}" for row in rows if row["flag"]]
    notes += [f"{row['cell']}: {row['status']}: {row['hint']}" for row in rows if row["hint"]]
    return Group(table, *map(Text, notes))


def kernels_report(profile: dict[str, Any]) -> RenderableType:
    """The kernels of one profile, slowest first."""
    table = Table(box=box.SIMPLE_HEAD, title=f"Kernels seen by {profile['tool']} (its times are no latencies)")
    headings = ("kernel", "stage", "launches", "us", "time %", "read MB", "written MB", "TB/s", "occupancy %", "waits for")
    for heading in headings:
        table.add_column(heading, justify="left" if heading in ("kernel", "stage", "waits for") else "right")
    for kernel in sorted(profile["kernels"], key=lambda kernel: -(kernel["duration_ns"] or 0)):
        stalls = sorted(kernel["stalls"].items(), key=lambda item: -item[1])[:2]
        table.add_row(
            escape(kernel["name"][:60]),
            kernel["stage"] or "-",
            str(kernel["launches"]),
            _scaled(kernel["duration_ns"], 1e-3),
            _scaled(kernel["time_share"], 100),
            _mb(kernel["dram_bytes_read"]),
            _mb(kernel["dram_bytes_written"]),
            _scaled(kernel["bandwidth_tbps"], 1),
            _scaled(kernel["occupancy"], 100),
            ", ".join(f"{name} {value:.1f}" for name, value in stalls) or "-",
        )
    return table


def _mb(count: int | None) -> str:
    return _scaled(count, 1e-6)


def _scaled(value: float | None, factor: float) -> str:
    return "-" if value is None else f"{value * factor:,.2f}"
