"""Records -> one self-contained HTML page.  The same records give the same bytes."""

from __future__ import annotations

import base64
import hashlib
import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import resources
from typing import Any, Literal

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from harness.errors import UserError
from harness.fidelity_record import FidelityRecord
from harness.record import Record
from reports.evidence import outcome_counts
from reports.fidelity_view import sentences
from reports.history import comparison, told
from reports.panels import Entry, all_entries, panels
from reports.payload import embedded, packed_records, page_data, samples_kept
from reports.summary import summary
from reports.text import count, listing, short_size

Plotly = Literal["inline", "cdn", "directory"]
PLOTLY_FILE = "plotly.min.js"
SCRIPTS = ("data.js", "address.js", "figures.js", "kinds.js", "cells.js", "fidelity.js", "table.js", "main.js")
SAMPLES_KEPT = {
    "all": " No sample of a round that counts is left out.",
    "medians": " These records hold too many samples for one page, which keeps the median of each round.",
    "none": " These records hold too many samples for one page; the store has them all.",
}
MOST_REASONS = 200  # groups of failures that are listed; the table of all rows has every one


@dataclass(frozen=True)
class Options:
    """plotly: "inline" puts the library into the page; "directory" loads it from the folder `assets`; "cdn" from its CDN.

    title: heading of the page.  home: address of an index that the page belongs to.  raw: address of its records.
    """

    plotly: Plotly = "inline"
    title: str = "LOCKS decode benchmark"
    assets: str = "."
    home: str | None = None
    raw: str | None = None


def render(records: Sequence[Record], options: Options = Options(), fidelity: Sequence[FidelityRecord] = ()) -> str:
    """The page as text; `fidelity` are records of selectors, if there are any.  UserError if there are no records."""
    if not records:
        raise UserError("no records, so there is nothing to report; `locks-bench latency` makes some")
    found = panels(records)
    entries = list(all_entries(found))
    current = [entry for entry in entries if entry.current]
    data, is_packed = embedded(page_data(found, fidelity))
    return (
        environment()
        .get_template("report.html.j2")
        .render(
            options=options,
            panels=[(panel, summary(panel, sentences(fidelity)), comparison(panel)) for panel in found],
            overview=_overview(entries, current),
            failures=_failures(current),
            more_failures=max(0, len(_reasons(current)) - MOST_REASONS),
            fidelity=sentences(fidelity),
            environments=_environments(entries),
            data=data,
            packed=is_packed,
            samples_kept=SAMPLES_KEPT[samples_kept(entries)],
            raw=packed_records(entries),
            **chrome(options),
        )
    )


def chrome(options: Options) -> dict[str, Any]:
    """What every page needs beside its content: style, scripts, plotly."""
    return {
        "css": Markup(_static("report.css")),
        "scripts": [Markup(_static(name)) for name in SCRIPTS],
        "plotly": _plotly_element(options),
        "policy": "default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; img-src data: blob:"
        if options.plotly == "inline"
        else None,
    }


def plotly_source() -> str:
    """The plotly library for browsers, as the Python package brings it."""
    try:
        from plotly.offline import get_plotlyjs
    except ImportError as error:
        raise UserError("the report needs plotly, which is not installed; pip install plotly") from error
    return get_plotlyjs()


def _plotly_element(options: Options) -> Markup:
    if options.plotly == "directory":
        return Markup('<script src="{}/{}"></script>').format(options.assets, PLOTLY_FILE)
    source = plotly_source()
    if options.plotly == "cdn":
        from plotly.offline import get_plotlyjs_version

        digest = base64.b64encode(hashlib.sha256(source.encode()).digest()).decode()
        address = f"https://cdn.plot.ly/plotly-{get_plotlyjs_version()}.min.js"
        return Markup('<script src="{}" integrity="sha256-{}" crossorigin="anonymous"></script>').format(address, digest)
    return Markup("<script>") + Markup(source) + Markup("</script>")


def environment() -> Environment:
    made = Environment(
        loader=PackageLoader("reports"), autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    made.filters |= {"size": short_size, "count": count, "told": told}
    return made


def _static(name: str) -> str:
    return (resources.files("reports") / "static" / name).read_text(encoding="utf-8")


def _overview(entries: list[Entry], current: list[Entry]) -> dict[str, Any]:
    days = sorted({entry.row["time"][:10] for entry in entries})
    return {
        "rows": count(len(entries), "row"),
        "machines": listing(sorted({entry.row["machine"] or "unknown machine" for entry in entries})),
        "days": days[0] if len(days) == 1 else f"{days[0]} to {days[-1]}",
        "outcomes": outcome_counts(current),
    }


def _reasons(current: list[Entry]) -> list[tuple[tuple[str, str], int]]:
    found = Counter((entry.row["outcome"], entry.row["reason"] or "no reason given") for entry in current if not _is_ok(entry))
    return sorted(found.items(), key=lambda item: (item[0][0], -item[1], item[0][1]))


def _failures(current: list[Entry]) -> list[dict[str, Any]]:
    """Rows that are not OK by outcome and reason."""
    groups: dict[tuple[str, str], list[Entry]] = {}
    for entry in current:
        if not _is_ok(entry):
            groups.setdefault((entry.row["outcome"], entry.row["reason"] or "no reason given"), []).append(entry)
    return [
        {
            "outcome": outcome,
            "reason": reason,
            "rows": rows,
            "backends": sorted({entry.row["backend"] for entry in groups[outcome, reason]}),
            "contexts": [short_size(ctx) for ctx in sorted({entry.row["ctx"] for entry in groups[outcome, reason]})],
            "batches": sorted({entry.row["batch"] for entry in groups[outcome, reason]}),
        }
        for (outcome, reason), rows in _reasons(current)[:MOST_REASONS]
    ]


def _is_ok(entry: Entry) -> bool:
    return bool(entry.row["outcome"] == "OK")


def _environments(entries: list[Entry]) -> list[dict[str, Any]]:
    """Every distinct environment, with the number of its rows; the command line is told per row."""
    found: Counter[str] = Counter()
    for entry in entries:
        plain = {name: value for name, value in entry.record.environment.items() if name != "argv"}
        plain["read_roof_tbps"] = entry.record.read_roof_tbps
        found[json.dumps(plain, sort_keys=True)] += 1
    return [{"rows": rows, "facts": list(_facts(json.loads(text)))} for text, rows in sorted(found.items())]


def _facts(data: dict[str, Any], prefix: str = "") -> list[tuple[str, str]]:
    """Nested facts in the flat: ("gpu name", "NVIDIA H200"); what is not known says so."""
    facts: list[tuple[str, str]] = []
    for name, value in data.items():
        label = f"{prefix}{name.replace('_', ' ')}"
        if isinstance(value, dict):
            facts += _facts(value, f"{label} ")
        else:
            facts.append((label, "not known" if value is None else str(value)))
    return facts
