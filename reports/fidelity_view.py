"""Fidelity for the page: what selectors keep against what they read and, where it was measured, against their time."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from harness.backends.untimed import SAME_STEP
from harness.fidelity_record import FILE, FidelityRecord
from harness.store import read
from reports.fidelity import Row
from reports.fidelity import rows as fidelity_rows
from reports.panels import Panel
from reports.style import SAME_AS
from reports.text import listing, short_size

COPIED = ("model", "ctx", "budget", "selector", "label", "samples", "outcome", "reason", "bytes_per_step", "fewer_bytes")
OURS = "locks-r8"
MEASURES = ("mass_of_oracle", "recall", "error", "retention_oracle_strict")


def load(stores: Iterable[Path | str], on_note: Callable[[str], None]) -> list[FidelityRecord]:
    """Latest fidelity record of each cell that lies in or beside the given stores; none is no error.

    Not of each key: what an older version of the code said of the same sample would count as another sample.
    """
    folders = [path if path.is_dir() else path.parent for path in map(Path, stores)]
    files = sorted({file.resolve() for folder in folders for file in folder.rglob(FILE)})
    latest: dict[str, FidelityRecord] = {}
    for file in files:
        for record in read(file, on_note, FidelityRecord):
            known = latest.get(record.cell())
            if known is None or record.time >= known.time:
                latest[record.cell()] = record
    return sorted(
        latest.values(), key=lambda record: (record.trace["model"], record.trace["ctx"], record.selector, record.budget)
    )


def view(records: Sequence[FidelityRecord], panels: Sequence[Panel]) -> dict[str, Any]:
    """Rows with value and interval of each measure, and slices by model and context: the points of a selector by budget."""
    table = [_row(row, panels) for row in _as_in_the_paper(records)]
    return {"rows": table, "slices": _slices(table, "bytes_per_step"), "timed": _slices(table, "latency_us")}


def sentences(records: Sequence[FidelityRecord]) -> list[str]:
    """What LOCKS keeps, and who keeps more at the same budget."""
    table = [row for row in _as_in_the_paper(records) if row["samples"] and row["mass_of_oracle"]["value"] is not None]
    told = []
    for model, ctx, budget in dict.fromkeys((row["model"], row["ctx"], row["budget"]) for row in table):
        group = [row for row in table if (row["model"], row["ctx"], row["budget"]) == (model, ctx, budget)]
        ours = next((row for row in group if row["selector"] == OURS), None)
        if ours is None:
            continue
        kept = ours["mass_of_oracle"]
        bounds = f" [{kept['interval'][0]:.3f}, {kept['interval'][1]:.3f}]" if kept["interval"] else ""
        better = [
            row["selector"]
            for row in group
            if row["mass_of_oracle"]["value"] > kept["value"] and "oracle" not in row["selector"]
        ]
        cheaper = [row for row in group if row["selector"] in better and row["bytes_per_step"] <= ours["bytes_per_step"]]
        rivals = (
            f"; more is kept by {listing(better)} ({len(cheaper)} with no more bytes)" if better else "; no other keeps more"
        )
        told.append(
            f"{model}, {short_size(ctx)} tokens, budget {short_size(budget)}: {OURS} keeps {kept['value']:.3f}{bounds} of the "
            f"attention mass that exact ranking keeps, reading {ours['fewer_bytes']:.1f}x fewer bytes than full "
            f"attention{rivals}."
        )
    return told


def _as_in_the_paper(records: Sequence[FidelityRecord]) -> list[Row]:
    """Rows with one forced sink page; others are an experiment and would be taken for the same selector."""
    return fidelity_rows(record for record in records if record.sink_pages == 1)


def _row(row: Row, panels: Sequence[Panel]) -> dict[str, Any]:
    shown: dict[str, Any] = {name: row.get(name) for name in COPIED}
    for name in MEASURES:
        cell = row.get(name) or {}
        shown[name], shown[f"{name}_ci95"] = cell.get("value"), cell.get("interval")
    shown["latency_us"] = _latency(row, panels)
    return shown


def _latency(row: Row, panels: Sequence[Panel]) -> float | None:
    """Measured time of the backend of the same name, or with the same launches, for the same model, context and budget, at
    its smallest batch.
    """
    backend = SAME_AS.get(row["selector"]) or SAME_STEP.get(row["selector"], row["selector"])
    times = [
        (entry.row["batch"], entry.row["latency_us"])
        for panel in panels
        if panel.model == row["model"] and panel.claims
        for entry in panel.entries
        if entry.drawn and (entry.row["backend"], entry.row["ctx"], entry.row["budget"]) == (backend, row["ctx"], row["budget"])
    ]
    return min(times)[1] if times else None


def _slices(table: list[dict[str, Any]], x: str) -> list[dict[str, Any]]:
    slices = []
    for model, ctx in dict.fromkeys((row["model"], row["ctx"]) for row in table):
        lines: dict[str, list[int]] = {}
        for index, row in enumerate(table):
            if (row["model"], row["ctx"]) == (model, ctx) and row[x] is not None and row["mass_of_oracle"] is not None:
                lines.setdefault(row["selector"], []).append(index)
        if lines:
            # Rows come by budget already, so a line goes from the smallest to the largest.
            points = [{"backend": name, "rows": rows} for name, rows in sorted(lines.items())]
            slices.append({"label": f"{model}, {short_size(ctx)}", "lines": points})
    return slices
