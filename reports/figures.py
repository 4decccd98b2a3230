"""Panels -> figures as plain data, which a browser (figures.js) and a file (draw.py) draw alike.

A mark names entries by their place in the table of all rows, so that a figure cannot show another number than the table.
Only entries that are OK are named; every other place holds NONE, which is drawn as a gap.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import Any

from reports.history import series
from reports.panels import Entry, Panel
from reports.payoff import crossover, sparse_backends
from reports.text import listing, short_size

NONE = -1
SAME_ROOF = 0.01  # the read roof is measured anew by every run
Figure = dict[str, Any]
Slice = dict[str, Any]


def figures(panel: Panel) -> dict[str, Figure]:
    """Every figure of a panel by name: {"kind", "slices": [{"label", ...}], "empty": why there is nothing}."""
    made = {
        "latency": _figure("lines", _latency(panel), "No row of this set-up has a latency."),
        "speedup": _figure("heat", _speedup(panel), "No sparse row can be compared with a dense one of the same case."),
        "throughput": _figure("lines", _throughput(panel), "No row of this set-up has a latency."),
        "pareto": _figure("lines", _throughput(panel), "No row of this set-up has a latency."),
        "bytes": _figure("stack", _cells(panel, lambda row: row["bytes"]), "No row of this set-up has bytes."),
        "stages": _figure(
            "stages",
            _cells(panel, lambda row: row["stages_us"]),
            "Stages were not measured in these records; run “locks-bench latency”.",
        ),
        "roof": _figure(
            "lines",
            _lines_by_batch(panel, lambda row: row["roof_share"]),
            "The read roof was not measured in these records; run “locks-bench latency” on a GPU.",
        ),
        "energy": _figure(
            "lines",
            _lines_by_batch(panel, lambda row: row["energy_j_per_token"]),
            "Energy was not measured in these records; run “locks-bench latency” on a GPU whose driver reports power.",
        ),
        "stability": _figure("rounds", _cells(panel, lambda row: row["latency_us"]), "No row of this set-up has samples."),
        "history": _figure("history", _history(panel), "These records hold one measurement of each case; give several stores."),
    }
    return made


def shared_figures(kept: dict[str, Any]) -> dict[str, Figure]:
    """Figures that do not depend on the panel, of fidelity_view.view()."""
    absent = "Fidelity was not measured in these records; run “locks-bench fidelity” into the same store."
    untimed = "No selector here has both a fidelity and a measured time for the same model, context and budget."
    return {
        "fidelity": _figure("fidelity", kept["slices"], absent),
        "fidelity-time": _figure("fidelity", kept["timed"], untimed),
    }


def _figure(kind: str, slices: list[Slice], empty: str) -> Figure:
    return {"kind": kind, "slices": slices, "empty": None if slices else empty}


def _latency(panel: Panel) -> list[Slice]:
    slices = _lines_by_batch(panel, lambda row: row["latency_us"])
    for part in slices:
        part["floors"] = _floors(panel, part["batch"])
    return slices


def _lines_by_batch(panel: Panel, value: Callable[[dict[str, Any]], Any]) -> list[Slice]:
    """One slice per batch: a line per backend over all contexts, with gaps where a row failed or is missing."""
    slices = []
    for batch in panel.batches:
        lines = _lines(panel, [(ctx, batch) for ctx in panel.contexts], value)
        if lines:
            slices.append({"label": f"batch {batch}", "batch": batch, "at": panel.contexts, "lines": lines})
    return slices


def _throughput(panel: Panel) -> list[Slice]:
    """One slice per context, the longest first: a line per backend over all batches."""
    slices = []
    for ctx in reversed(panel.contexts):
        lines = _lines(panel, [(ctx, batch) for batch in panel.batches], lambda row: row["tokens_per_s"])
        if lines:
            slices.append({"label": f"context {short_size(ctx)}", "at": panel.batches, "lines": lines})
    return slices


def _lines(panel: Panel, places: list[tuple[int, int]], value: Callable[[dict[str, Any]], Any]) -> list[dict[str, Any]]:
    lines = []
    for backend in panel.backends:
        rows = [_index(panel.at(ctx, batch, backend), value) for ctx, batch in places]
        if any(index != NONE for index in rows):
            lines.append({"backend": backend, "rows": rows})
    return lines


def _index(entry: Entry | None, value: Callable[[dict[str, Any]], Any]) -> int:
    return entry.index if entry is not None and entry.drawn and value(entry.row) is not None else NONE


def _floors(panel: Panel, batch: int) -> list[dict[str, Any]]:
    """Least time of the bytes at the measured roof; backends that move the same bytes share a line."""
    groups: list[tuple[list[str], list[Entry | None]]] = []
    for backend in panel.backends:
        line = [panel.at(ctx, batch, backend) for ctx in panel.contexts]
        line = [entry if entry and entry.drawn and entry.row["floor_us"] is not None else None for entry in line]
        for names, shared in groups:
            if _move_the_same(shared, line):
                names.append(backend)
                shared[:] = [known or entry for known, entry in zip(shared, line, strict=True)]
                break
        else:
            groups.append(([backend], line))
    return [
        {"name": f"byte floor: {listing(names)}", "rows": [entry.index if entry else NONE for entry in line]}
        for names, line in groups
        if any(line)
    ]


def _move_the_same(one: list[Entry | None], other: list[Entry | None]) -> bool:
    """Whether two lines agree wherever both have a row, and have such a place."""
    pairs = [(left.row, right.row) for left, right in zip(one, other, strict=True) if left and right]
    return bool(pairs) and all(
        left["bytes"] == right["bytes"] and math.isclose(left["floor_us"], right["floor_us"], rel_tol=SAME_ROOF)
        for left, right in pairs
    )


def _speedup(panel: Panel) -> list[Slice]:
    """One slice per sparse backend: entries by batch and context, and the crossover at each batch."""
    slices = []
    for backend in sparse_backends(panel):
        rows = [
            [_index(panel.at(ctx, batch, backend), lambda row: row["speedup_vs_best_dense"]) for ctx in panel.contexts]
            for batch in panel.batches
        ]
        outcomes = [
            [entry.row["outcome"] if (entry := panel.at(ctx, batch, backend)) else "not run" for ctx in panel.contexts]
            for batch in panel.batches
        ]
        found = [crossover(panel, backend, batch) for batch in panel.batches]
        crossings = [
            {"batch": one.batch, "at": one.at, "low": one.low, "high": one.high} for one in found if one and one.kind == "at"
        ]
        slices.append(
            {
                "label": backend,
                "at": panel.contexts,
                "batches": panel.batches,
                "rows": rows,
                "outcomes": outcomes,
                "crossings": crossings,
            }
        )
    return slices


def _cells(panel: Panel, value: Callable[[dict[str, Any]], Any]) -> list[Slice]:
    """One slice per (context, batch), the longest context first: the entries that have the value."""
    slices = []
    for ctx, batch in sorted(panel.cells, key=lambda cell: (-cell[0], cell[1])):
        found: Iterable[Entry | None] = (panel.at(ctx, batch, backend) for backend in panel.backends)
        rows = [index for entry in found if (index := _index(entry, value)) != NONE]
        if rows:
            slices.append({"label": f"{short_size(ctx)} x batch {batch}", "rows": rows})
    return slices


def _history(panel: Panel) -> list[Slice]:
    by_cell: dict[tuple[int, int], list[dict[str, Any]]] = {}
    for (ctx, batch, backend), line in series(panel).items():
        rows = [_index(entry, lambda row: row["latency_us"]) for entry in line]
        if any(index != NONE for index in rows):
            by_cell.setdefault((ctx, batch), []).append({"backend": backend, "rows": rows})
    return [
        {"label": f"{short_size(ctx)} x batch {batch}", "lines": lines}
        for (ctx, batch), lines in sorted(by_cell.items(), key=lambda item: (-item[0][0], item[0][1]))
    ]
