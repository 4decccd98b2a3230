"""Closed-loop records -> rows and a table.  Imports no torch.

A row is one (model, context, budget, selector) over all its samples; intervals come from a bootstrap over samples.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from statistics import median
from typing import Any

from rich import box
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from harness.fidelity_record import LoopRecord
from harness.record import Outcome
from reports.fidelity import Row, number, ratio, reasons, sink_text


def rows(records: Iterable[LoopRecord]) -> list[Row]:
    """One row per model, context, budget and selector, in the order in which they were asked for."""
    groups: dict[tuple[Any, ...], list[LoopRecord]] = defaultdict(list)
    for record in records:
        groups[record.trace["model"], record.trace["ctx"], record.budget, record.sink_pages, record.selector].append(record)
    ordered = sorted(groups.items(), key=lambda group: tuple(map(str, group[0][:1])) + group[0][1:4])
    return [_row(key, members) for key, members in ordered]


def _row(key: tuple[Any, ...], records: Sequence[LoopRecord]) -> Row:
    model, ctx, budget, sink_pages, selector = key
    ok = [record for record in records if record.outcome == Outcome.OK]
    row: Row = {
        "model": model,
        "ctx": ctx,
        "budget": budget,
        "sink_pages": sink_pages,
        "selector": selector,
        "label": records[0].declaration["label"],
        "samples": len(ok),
        "outcome": "OK" if ok else str(records[0].outcome),
        "reason": None if ok else records[0].reason,
    }
    if not ok:
        return row
    differing = [record.first_difference for record in ok if record.first_difference is not None]
    return row | {
        "exact_match": ratio([(record.found or 0, record.answers or 0) for record in ok]),
        "exact_match_full": ratio([(record.full_found or 0, record.answers or 0) for record in ok]),
        "kept_of_full": ratio([(min(record.found or 0, record.full_found or 0), record.full_found or 0) for record in ok]),
        "agreement": ratio([(record.agreed or 0, record.steps or 0) for record in ok]),
        "kl": ratio([(record.kl or 0.0, record.steps or 0) for record in ok]),
        "same_text": ratio([(record.first_difference is None, 1) for record in ok]),
        "first_difference": median(differing) if differing else None,
        "steps": sum(record.steps or 0 for record in ok),
        "active": all(record.active for record in ok),
    }


COLUMNS: tuple[tuple[str, Callable[[Row], str]], ...] = (
    ("selector", lambda row: row["selector"]),
    ("what it is", lambda row: row["label"]),
    ("exact match", lambda row: number(row["exact_match"], interval=True)),
    ("of full's", lambda row: number(row["kept_of_full"])),
    ("same token", lambda row: number(row["agreement"], interval=True)),
    ("KL, nats", lambda row: number(row["kl"], interval=True)),
    ("same text", lambda row: number(row["same_text"])),
    ("first difference", lambda row: "-" if row["first_difference"] is None else f"token {row['first_difference']:g}"),
)


def report(table: Sequence[Row]) -> RenderableType:
    """One table per model, context and budget with full attention's own answers above, and notes below each."""
    parts: list[RenderableType] = []
    groups: dict[tuple[Any, ...], list[Row]] = defaultdict(list)
    for row in table:
        groups[row["model"], row["ctx"], row["budget"], row["sink_pages"]].append(row)
    for (model, ctx, budget, sink_pages), members in groups.items():
        title = f"{model}, {ctx:,} tokens, budget {budget}{sink_text(sink_pages)}: the model decodes with the selector"
        shown = Table(title=title, box=box.SIMPLE_HEAD, title_justify="left")
        for index, (name, _) in enumerate(COLUMNS):
            shown.add_column(name, justify="left" if index < 2 else "right", no_wrap=True)
        if measured := [row for row in members if row["samples"]]:
            most = max(measured, key=lambda row: row["samples"])
            shown.add_row("full attention", "reference", number(most["exact_match_full"], interval=True))
        for row in members:
            if row["samples"]:
                shown.add_row(*(cell(row) for _, cell in COLUMNS))
            else:
                shown.add_row(row["selector"], row["label"], row["outcome"])
        parts += [shown, Text("\n".join([_note(measured), *reasons(members)]) + "\n")]
    return Group(*parts)


def _note(measured: Sequence[Row]) -> str:
    if not measured:
        return "nothing could be measured"
    most = max(measured, key=lambda row: row["samples"])
    lines = [
        f"{most['samples']} samples, {most['steps']} steps; brackets: 95 % bootstrap over samples. Exact match: share of the "
        "planted answers in the text.",
        "Same token and KL: along full attention's own tokens; same text and first difference: the selector's own. The first "
        "token comes from prefill, which is full attention.",
    ]
    if idle := [row["selector"] for row in measured if not row["active"]]:
        lines.append(f"Attended everything somewhere, so not a selection: {', '.join(idle)}.")
    return "\n".join(lines)
