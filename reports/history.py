"""What changed between rows and those of the same case and backend that they replaced: the verdicts of harness/compare.py."""

from __future__ import annotations

from harness.compare import compare
from harness.verdict import Cell, Comparison, Coverage, Verdict
from reports.panels import Entry, Panel
from reports.text import bracket, duration

# The order of importance: what is worse comes first.
ORDER = (Verdict.SLOWER, Verdict.FASTER, Verdict.INVALID, Verdict.UNCLEAR, Verdict.NOT_COMPARABLE, Verdict.SAME)


def series(panel: Panel) -> dict[tuple[int, int, str], list[Entry]]:
    """Entries of each case and backend with more than one, oldest first."""
    found: dict[tuple[int, int, str], list[Entry]] = {}
    for entry in sorted(panel.older + panel.entries, key=lambda entry: (entry.row["time"], entry.current)):
        found.setdefault((*entry.cell, entry.row["backend"]), []).append(entry)
    return {place: line for place, line in sorted(found.items()) if len(line) > 1}


def comparison(panel: Panel) -> Comparison | None:
    """The latest rows against all that they replaced; None if they replaced none.  The most important cells come first."""
    lines = [line for line in series(panel).values() if line[-1].record.case.get("select")]
    if not lines:
        return None
    found = compare([entry.record for line in lines for entry in line[:-1]], [line[-1].record for line in lines])
    found.cells.sort(key=_importance)
    return found


def told(cell: Cell) -> str:
    """What stands behind a verdict, in words."""
    parts = []
    if cell.base_ns is not None and cell.new_ns is not None:
        parts.append(f"{duration(cell.base_ns / 1e3)} before, {duration(cell.new_ns / 1e3)} now")
    if cell.effect is not None:
        bounds = bracket([100 * cell.effect.low, 100 * cell.effect.high])
        parts.append(f"{100 * cell.effect.change:+.2f} % time {bounds}")
    if cell.floor is not None:
        parts.append(f"changes under {100 * cell.floor:.1f} % do not count")
    if cell.coverage is not Coverage.KEPT and not cell.reason:
        parts.append(f"coverage {cell.coverage}")
    return "; ".join([*parts, *([cell.reason] if cell.reason else [])])


def _importance(cell: Cell) -> tuple[bool, int, float, str]:
    size = abs(cell.effect.change) if cell.effect else 0.0
    return cell.coverage is not Coverage.LOST, ORDER.index(cell.verdict), -size, cell.name
