"""A comparison -> a rich table for a terminal, and GitHub-flavoured Markdown.  Never prints."""

from __future__ import annotations

from rich import box
from rich.console import Group, RenderableType
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from harness.verdict import Cell, Comparison, ExitCode, Verdict

HEADINGS = ("verdict", "cell", "base us", "new us", "change [95 %]", "floor", "why")
ORDER = (Verdict.SLOWER, Verdict.INVALID, Verdict.UNCLEAR, Verdict.FASTER, Verdict.NOT_COMPARABLE, Verdict.SAME)
STYLE = {Verdict.SLOWER: "red", Verdict.FASTER: "green", Verdict.SAME: None}
CLOSING = {
    ExitCode.OK: "no regression",
    ExitCode.REGRESSION: "slower",
    ExitCode.UNCLEAR: "invalid or unclear: measure again before you trust it",
    ExitCode.NOT_COMPARABLE: "not comparable",
}


def headline(comparison: Comparison, code: ExitCode) -> str:
    """The result in a line: what the exit code means, and how many cells have which verdict."""
    counts = [f"{len(found)} {verdict}" for verdict in ORDER if (found := comparison.having(verdict))]
    lost = f", {len(comparison.lost)} lost" if comparison.lost else ""
    return f"{CLOSING[code]} ({', '.join(counts) or 'no cells'}{lost})"


def verdict_report(comparison: Comparison, code: ExitCode) -> RenderableType:
    """For a terminal: what is not SAME first."""
    table = Table(box=box.SIMPLE_HEAD)
    for heading in HEADINGS:
        table.add_column(heading, justify="right" if heading not in ("verdict", "cell", "why") else "left")
    for cell in _sorted(comparison):
        table.add_row(*map(escape, _cells(cell)), style=STYLE.get(cell.verdict, "yellow"))
    return Group(table, *map(Text, _notes(comparison)), Text(headline(comparison, code)))


def verdict_markdown(comparison: Comparison, code: ExitCode) -> str:
    """For the summary page of a pipeline: the cells that need somebody open, the others folded."""
    rows = {cell.key: f"| {' | '.join(text.replace('|', '/') for text in _cells(cell))} |" for cell in _sorted(comparison)}
    head = f"| {' | '.join(HEADINGS)} |\n|{'|'.join('---' for _ in HEADINGS)}|"
    shown = [rows[cell.key] for cell in _sorted(comparison) if cell.verdict is not Verdict.SAME]
    folded = [rows[cell.key] for cell in _sorted(comparison) if cell.verdict is Verdict.SAME]
    parts = [f"### locks-bench: {headline(comparison, code)}", *_notes(comparison)]
    if shown:
        parts.append("\n".join([head, *shown]))
    if folded:
        table = "\n".join([head, *folded])
        parts.append(f"<details><summary>{len(folded)} cells are the same</summary>\n\n{table}\n\n</details>")
    return "\n\n".join(parts) + "\n"


def _sorted(comparison: Comparison) -> list[Cell]:
    return sorted(comparison.cells, key=lambda cell: (ORDER.index(cell.verdict), cell.name))


def _cells(cell: Cell) -> tuple[str, ...]:
    effect = cell.effect
    change = f"{effect.change:+.2%} [{effect.low:+.2%}, {effect.high:+.2%}]" if effect else "-"
    floor = "-" if cell.floor is None else f"{cell.floor:.1%}"
    return (str(cell.verdict), cell.name, _us(cell.base_ns), _us(cell.new_ns), change, floor, cell.reason or "")


def _us(nanoseconds: float | None) -> str:
    return "-" if nanoseconds is None else f"{nanoseconds / 1e3:,.2f}"


def _notes(comparison: Comparison) -> list[str]:
    lines = [f"The run is void: {comparison.void}."] if comparison.void else []
    if comparison.noise_floor is not None:
        lines.append(f"A/A comparison: changes up to {comparison.noise_floor:.2%} are noise.")
    return lines + [f"Change point: {note}" for note in comparison.notes]
