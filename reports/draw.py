"""The main figures as PNG and SVG files, for papers and READMEs, from the same plain data as the page (figures.py)."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from harness.errors import UserError
from harness.record import Record
from reports.figures import Figure, Slice, figures
from reports.panels import Panel, all_entries, panels
from reports.rows import Row
from reports.style import styles
from reports.text import number, short_size

MARKERS = {
    **{"circle": "o", "square": "s", "diamond": "D", "triangle-up": "^"},
    **{"cross": "P", "x": "X", "star": "*", "hexagon": "h"},
}
DASHES = {"solid": "-", "dash": "--", "dot": ":", "dashdot": "-."}
HATCHES = {"solid": "", "dash": "//", "dot": "..", "dashdot": "xx"}  # bars of one colour are told apart like lines
LEGEND_INSIDE = 8  # entries; more stand beside the axes
FEW_FLOORS = 4  # more of them are drawn only where they are lines
DRAWN = ("latency", "speedup", "throughput", "bytes", "stages", "roof")
FORMATS = ("png", "svg")
SETTINGS: Any = {"svg.hashsalt": "locks-bench", "font.size": 10, "axes.spines.top": False, "axes.spines.right": False}
NO_DATE: dict[str, dict[str, Any]] = {"png": {"Software": None}, "svg": {"Date": None}}  # the same records, the same file

Rows = dict[int, Row]


def write(records: Sequence[Record], folder: Path) -> Iterator[Path]:
    """Write every figure of every panel, one file per slice and format; yields the files.  UserError without matplotlib."""
    try:
        import matplotlib
    except ImportError as error:
        raise UserError("--figures needs matplotlib, which is not installed; pip install 'locks-bench[figures]'") from error
    matplotlib.use("Agg")
    found = panels(records)
    rows = {entry.index: entry.row for entry in all_entries(found)}
    with matplotlib.rc_context(SETTINGS):
        for panel in found:
            for name, figure in figures(panel).items():
                if name in DRAWN:
                    yield from _write_figure(panel, name, figure, rows, folder)


def _write_figure(panel: Panel, name: str, figure: Figure, rows: Rows, folder: Path) -> Iterator[Path]:
    from matplotlib.figure import Figure as Canvas

    used = styles(row["backend"] for row in rows.values())
    # Cells are many, and a reader of a file sees one of them: the longest context.
    slices = figure["slices"][:1] if name in ("bytes", "stages") else figure["slices"]
    for part in slices:
        canvas = Canvas(figsize=(7.2, 4.2), layout="constrained")
        axes = canvas.subplots()
        PAINTERS[name](axes, part, rows, used)
        axes.set_title(f"{panel.label}\n{part['label']}", fontsize=9, loc="left")
        folder.mkdir(parents=True, exist_ok=True)
        label = re.sub(r"[^a-z0-9.]+", "-", part["label"].lower()).strip("-")
        for suffix in FORMATS:
            file = folder / f"{panel.slug}-{name}-{label}.{suffix}"
            canvas.savefig(file, dpi=160, metadata=NO_DATE[suffix])
            yield file


def _lines(
    axes: Any, part: Slice, rows: Rows, used: dict[str, dict[str, str]], field: str, interval: str | None = None
) -> None:
    for line in part["lines"]:
        style = used[line["backend"]]
        values = [_value(rows, index, field) for index in line["rows"]]
        bounds = [_bounds(rows, index, interval, value) for index, value in zip(line["rows"], values, strict=True)]
        axes.errorbar(
            part["at"],
            values,
            yerr=list(zip(*bounds, strict=True)),
            color=style["color"],
            marker=MARKERS[style["symbol"]],
            linestyle=DASHES[style["dash"]],
            capsize=2,
            markersize=5,
            label=line["backend"],
        )


def _latency(axes: Any, part: Slice, rows: Rows, used: dict[str, dict[str, str]]) -> None:
    _lines(axes, part, rows, used, "latency_us", "latency_ci95_us")
    floors = [[_value(rows, index, "floor_us") for index in floor["rows"]] for floor in part["floors"]]
    for place, (floor, values) in enumerate(zip(part["floors"], floors, strict=True)):
        if len(floors) > FEW_FLOORS and sum(value == value for value in values) < 2:
            continue
        axes.plot(part["at"], values, color="black", linewidth=1, linestyle=(":", "-.")[place % 2], label=floor["name"])
    _axes(axes, part["at"], "context, tokens", short_size, "latency, µs")
    axes.set_yscale("log")


def _throughput(axes: Any, part: Slice, rows: Rows, used: dict[str, dict[str, str]]) -> None:
    _lines(axes, part, rows, used, "tokens_per_s")
    _axes(axes, part["at"], "batch", str, "tokens per second")
    axes.set_yscale("log")


def _roof(axes: Any, part: Slice, rows: Rows, used: dict[str, dict[str, str]]) -> None:
    _lines(axes, part, rows, used, "roof_share")
    _axes(axes, part["at"], "context, tokens", short_size, "share of the measured read roof")
    axes.set_ylim(0, None)


def _axes(axes: Any, at: list[int], title: str, words: Callable[[int], str], value: str) -> None:
    axes.set_xscale("log")
    axes.set_xticks(at, [words(place) for place in at])
    axes.minorticks_off()
    axes.set_xlabel(title)
    axes.set_ylabel(value)
    axes.grid(color="#d5d9df", linewidth=0.6)
    _legend(axes)


def _legend(axes: Any) -> None:
    entries = len(axes.get_legend_handles_labels()[1])
    if entries <= LEGEND_INSIDE:
        axes.legend(fontsize=8, frameon=False)
        return
    width, height = axes.figure.get_size_inches()
    axes.figure.set_size_inches(width + 2.4, max(height, 0.19 * entries + 0.6))
    axes.figure.legend(fontsize=8, frameon=False, loc="outside right upper")


def _speedup(axes: Any, part: Slice, rows: Rows, used: dict[str, dict[str, str]]) -> None:
    from matplotlib.colors import LinearSegmentedColormap

    values = [[_value(rows, index, "speedup_vs_best_dense") for index in line] for line in part["rows"]]
    logs = [[math.log2(value) if value == value else math.nan for value in line] for line in values]
    reach = max([1.0, *(abs(value) for line in logs for value in line if value == value)])
    colors = LinearSegmentedColormap.from_list("speedup", ["#b34700", "#f2f1ec", "#184f95"])
    axes.imshow(logs, cmap=colors, vmin=-reach, vmax=reach, origin="lower", aspect="auto")
    for y, line in enumerate(values):
        for x, value in enumerate(line):
            text = part["outcomes"][y][x] if value != value else f"{value:.2f}x"
            strong = value == value and abs(math.log2(value)) > 0.6 * reach
            axes.text(x, y, text, ha="center", va="center", color="white" if strong else "black")
    axes.set_xticks(range(len(part["at"])), [short_size(ctx) for ctx in part["at"]])
    axes.set_yticks(range(len(part["batches"])), part["batches"])
    axes.set_xlabel("context, tokens")
    axes.set_ylabel("batch")


def _bytes(axes: Any, part: Slice, rows: Rows, used: dict[str, dict[str, str]]) -> None:
    names = list(dict.fromkeys(name for index in part["rows"] for name in rows[index]["bytes"]))
    backends = [rows[index]["backend"] for index in part["rows"]]
    left = [0.0] * len(backends)
    for place, name in enumerate(names):
        values = [rows[index]["bytes"].get(name, 0) / 1e6 for index in part["rows"]]
        axes.barh(backends, values, left=left, label=name.replace("_", " "), hatch=("", "//", "..", "xx", "--")[place % 5])
        left = [before + value for before, value in zip(left, values, strict=True)]
    for backend, total in zip(backends, left, strict=True):
        axes.text(total, backend, f" {number(total)} MB", va="center")
    measured = [(rows[index]["dram_bytes_measured"], rows[index]["backend"]) for index in part["rows"]]
    if seen := [(value / 1e6, backend) for value, backend in measured if value is not None]:
        axes.scatter(*zip(*seen, strict=True), color="black", marker="D", zorder=3, label="measured DRAM bytes")
    axes.margins(x=0.15)
    axes.invert_yaxis()
    axes.set_xlabel("MB per step")
    _legend(axes)


def _stages(axes: Any, part: Slice, rows: Rows, used: dict[str, dict[str, str]]) -> None:
    names = list(dict.fromkeys(name for index in part["rows"] for name in rows[index]["stages_us"]))
    width = 0.8 / len(part["rows"])
    for place, index in enumerate(part["rows"]):
        row = rows[index]
        at = [position + (place - (len(part["rows"]) - 1) / 2) * width for position in range(len(names))]
        style = used[row["backend"]]
        look = {"color": style["color"], "hatch": HATCHES[style["dash"]], "edgecolor": "white", "linewidth": 0}
        axes.bar(at, [row["stages_us"].get(name, math.nan) for name in names], width, **look)
        axes.bar([0], [math.nan], label=row["backend"], **look)
        floors = [(row["stage_floors_us"] or {}).get(name, math.nan) for name in names]
        left, right = [one - width / 2 for one in at], [one + width / 2 for one in at]
        axes.hlines(floors, left, right, color="black", label=None if place else "floor: bytes at the read roof")
    axes.set_xticks(range(len(names)), [name.replace("_", " ") for name in names])
    axes.set_ylabel("time, µs")
    _legend(axes)


def _value(rows: Rows, index: int, field: str) -> float:
    """A gap where there is no row that may be drawn."""
    value = rows[index][field] if index >= 0 else None
    return math.nan if value is None else float(value)


def _bounds(rows: Rows, index: int, interval: str | None, value: float) -> tuple[float, float]:
    bounds = rows[index][interval] if interval and index >= 0 else None
    return (value - bounds[0], bounds[1] - value) if bounds else (0.0, 0.0)


PAINTERS: dict[str, Callable[[Any, Slice, Rows, dict[str, dict[str, str]]], None]] = {
    "latency": _latency,
    "speedup": _speedup,
    "throughput": _throughput,
    "bytes": _bytes,
    "stages": _stages,
    "roof": _roof,
}
