"""Fidelity records -> rows and a table.  Imports no torch.

A row is one (model, context, budget, selector) over all its samples.  Intervals come from a bootstrap over samples, since the
heads and steps of one sample are not independent.  Retention has three denominators:

    all        every step, layer and query head
    oracle     those whose exact ranking at the same budget keeps the whole carrier
    retrieval  those that give the carrier at least 5 % of their attention
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np
from rich import box
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from harness.fidelity_record import DENOMINATORS, FidelityRecord
from harness.record import Outcome
from reports.text import number as plain_number

RESAMPLES = 2000
CONFIDENCE = 0.95
Row = dict[str, Any]


def rows(records: Iterable[FidelityRecord]) -> list[Row]:
    """One row per model, context, budget and selector, in the order in which they were asked for."""
    groups: dict[tuple[Any, ...], list[FidelityRecord]] = defaultdict(list)
    for record in records:
        groups[record.trace["model"], record.trace["ctx"], record.budget, record.sink_pages, record.selector].append(record)
    ordered = sorted(groups.items(), key=lambda group: tuple(map(str, group[0][:1])) + group[0][1:4])
    return [_row(key, members) for key, members in ordered]


def _row(key: tuple[Any, ...], records: Sequence[FidelityRecord]) -> Row:
    model, ctx, budget, sink_pages, selector = key
    ok = [record for record in records if record.outcome == Outcome.OK]
    first = records[0]
    row: Row = {
        "model": model,
        "ctx": ctx,
        "budget": budget,
        "sink_pages": sink_pages,
        "selector": selector,
        "label": first.declaration["label"],
        "granularity": first.declaration["granularity"],
        "forced_in_budget": first.declaration["forced_in_budget"],
        "dense_layers": list(first.declaration["dense_layers"]),
        "question_visible": first.declaration["question_visible"],
        "samples": len(ok),
        "outcome": str(first.outcome) if not ok else "OK",
        "reason": None if ok else first.reason,
    }
    if not ok:
        return row
    parts = {
        name: float(np.mean([record.bytes[name] for record in ok if record.bytes])) for name in ("score", "attend", "full")
    }
    row |= {
        "score_bytes": parts["score"],
        "attend_bytes": parts["attend"],
        "bytes_per_step": parts["score"] + parts["attend"],
        "fewer_bytes": parts["full"] / (parts["score"] + parts["attend"]),
        "attended_tokens": float(np.mean([record.attended for record in ok])),
        "recall": ratio([(record.recall or 0.0, 1.0) for record in ok]),
        "mass": ratio([(record.mass or 0.0, 1.0) for record in ok]),
        "mass_of_oracle": ratio([(record.mass or 0.0, record.oracle_mass or 0.0) for record in ok]),
        "error": ratio([(record.error or 0.0, 1.0) for record in ok]),
        "active": all(record.active for record in ok),
        "agrees": _mean([record.trace["agrees"] for record in ok]),
        "energy": {rank: float(np.mean([record.trace["energy"][rank] for record in ok])) for rank in ok[0].trace["energy"]},
    }
    for name in DENOMINATORS:
        for how in ("strict", "loose"):
            counts = [record.retention[name][how] for record in ok]
            row[f"retention_{name}_{how}"] = {**ratio(counts), "cases": sum(cases for _, cases in counts)}
    return row


def _mean(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return float(np.mean(known)) if known else None


def ratio(pairs: Sequence[Sequence[float]]) -> dict[str, Any]:
    """Sum over sum with its percentile interval; None where there is nothing to divide by, no interval for one sample."""
    data = np.asarray(pairs, dtype=float)
    above, below = data.sum(0)
    if below == 0:
        return {"value": None, "interval": None}
    if len(data) == 1:
        return {"value": float(above / below), "interval": None}
    picks = np.random.default_rng(0).integers(0, len(data), (RESAMPLES, len(data)))
    sums = data[picks].sum(1)
    ratios = sums[sums[:, 1] > 0]
    tail = (1 - CONFIDENCE) / 2
    low, high = np.quantile(ratios[:, 0] / ratios[:, 1], (tail, 1 - tail))
    return {"value": float(above / below), "interval": [float(low), float(high)]}


TIME = "us/layer"  # only where a store has times

COLUMNS: tuple[tuple[str, Callable[[Row], str]], ...] = (
    ("selector", lambda row: row["selector"]),
    ("what it is", lambda row: row["label"]),
    ("bytes/step", lambda row: _bytes(row["bytes_per_step"])),
    ("fewer", lambda row: f"{row['fewer_bytes']:.1f}x"),
    (TIME, lambda row: plain_number(row.get("latency_us"))),
    ("recall", lambda row: number(row["recall"])),
    ("mass of oracle's", lambda row: number(row["mass_of_oracle"], interval=True)),
    ("output error", lambda row: number(row["error"])),
    ("retention: all", lambda row: number(row["retention_all_strict"])),
    ("oracle keeps", lambda row: number(row["retention_oracle_strict"], interval=True)),
    ("retrieval heads", lambda row: number(row["retention_retrieval_strict"], interval=True)),
)


def report(table: Sequence[Row], closing: Sequence[str] = ()) -> RenderableType:
    """One table per model, context and budget; notes below each, `closing` lines at the end."""
    parts: list[RenderableType] = []
    groups: dict[tuple[Any, ...], list[Row]] = defaultdict(list)
    for row in table:
        groups[row["model"], row["ctx"], row["budget"], row["sink_pages"]].append(row)
    for (model, ctx, budget, sink_pages), members in groups.items():
        shown = Table(
            title=f"{model}, {ctx:,} tokens, budget {budget}{sink_text(sink_pages)}", box=box.SIMPLE_HEAD, title_justify="left"
        )
        timed = any(row.get("latency_us") for row in members)
        columns = [column for column in COLUMNS if timed or column[0] != TIME]
        for index, (name, _) in enumerate(columns):
            shown.add_column(name, justify="left" if index < 2 else "right", no_wrap=True)
        for row in members:
            if row["samples"]:
                shown.add_row(*(cell(row) for _, cell in columns))
            else:
                shown.add_row(row["selector"], row["label"], row["outcome"])
        parts += [shown, Text(_note(members))]
    return Group(*parts, *map(Text, closing))


def sink_text(sink_pages: int) -> str:
    """Of a title, where it is not one page as in the paper."""
    return "" if sink_pages == 1 else f", {sink_pages or 'no'} sink page{'s' if sink_pages > 1 else ''} forced"


def theory_lines(promises: dict[str, Any] | None) -> list[str]:
    """What harness.fidelity_run.promises found, in sentences."""
    if promises is None:
        return []
    pair, rank = promises["blind_pair"], promises["rank"]
    lines = [
        f"Theory on sample 1 ({promises['task']}), summaries not quantised:",
        f"  blind pair (Prop. 1): two pages {pair['exact']:.1f} nats apart are {abs(pair['shared']):.1e} apart in a shared "
        f"basis of rank {rank}, {pair['page']:.1f} in one per page",
    ]
    for bound in promises["bounds"]:
        broken = ", ".join(f"{name} {count}" for name, count in bound["broken"].items() if count) or "none"
        lines += [
            f"  retention bound (Thm. 1), rank {bound['rank']}, budget {bound['budget']}: violations {broken} in "
            f"{bound['cases']:,} cases; worst error of a mass {bound['eta']:.2f} nats; share kept {bound['retained']:.4f} of "
            f"the exact ranking's, promised {bound['promised']:.3f}; output error {bound['error']:.3f} R, bound "
            f"{bound['error_bound']:.3f} R"
        ]
    return lines


def _note(members: Sequence[Row]) -> str:
    measured, missing = [row for row in members if row["samples"]], reasons(members)
    if not measured:
        return "\n".join(["nothing could be measured", *missing])
    row = max(measured, key=lambda row: row["samples"])
    energy = ", ".join(f"r{rank} {value:.2f}" for rank, value in row["energy"].items())
    cases = ", ".join(f"{name} {row[f'retention_{name}_strict']['cases']:,}" for name in DENOMINATORS)
    lines = [
        f"{row['samples']} samples; brackets: 95 % bootstrap over samples. Retention: whole carrier kept, cases: {cases}.",
        f"Variance inside a page carried by its leading directions: {energy}.",
    ]
    if row["agrees"] is not None:
        lines.append(f"Steps follow the right answer; the model itself says {row['agrees']:.0%} of its tokens.")
    if row["model"].startswith("synthetic"):
        lines.append("Synthetic keys: how selectors behave on this structure, no claim about any model.")
    if idle := [row["selector"] for row in measured if not row["active"]]:
        lines.append(f"Attended everything somewhere, so not a selection: {', '.join(idle)}.")
    return "\n".join([*lines, *missing]) + "\n"


def reasons(members: Sequence[Row]) -> list[str]:
    """A line for every reason why selectors have no numbers."""
    found: dict[str, list[str]] = defaultdict(list)
    for row in members:
        if not row["samples"]:
            found[f"{row['outcome']}: {row['reason']}"].append(row["selector"])
    return [f"{', '.join(names)}: {reason}" for reason, names in found.items()]


def number(cell: dict[str, Any], interval: bool = False) -> str:
    if cell["value"] is None:
        return "-"
    text = f"{cell['value']:.3f}"
    if interval and cell["interval"]:
        text += f" [{cell['interval'][0]:.3f}, {cell['interval'][1]:.3f}]"
    return text


def _bytes(count: float) -> str:
    for unit, size in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if count >= size:
            return f"{count / size:.2f} {unit}"
    return f"{count:.0f} B"
