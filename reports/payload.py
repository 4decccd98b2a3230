"""What the page's scripts read: the table of all rows by column, the panels with their figures, and the raw records."""

from __future__ import annotations

import base64
import gzip
import json
from collections.abc import Iterable, Sequence
from statistics import median
from typing import Any, Literal

from markupsafe import Markup

from harness.fidelity_record import FidelityRecord
from reports.fidelity_view import view
from reports.figures import figures, shared_figures
from reports.panels import Entry, Panel, all_entries
from reports.payoff import speedup_interval
from reports.style import styles

# Samples kept in the page, over all records.  Above the first limit a round is its median, above the second it is left out.
MOST_SAMPLES = 100_000
MOST_MEDIANS = 400_000
MOST_PLAIN = 1_000_000  # characters of JSON that stand in the page as they are
COPIED = (
    *(
        "key",
        "machine",
        "model",
        "level",
        "ctx",
        "batch",
        "budget",
        "backend",
        "outcome",
        "reason",
        "latency_us",
        "latency_ci95_us",
    ),
    *("speedup_vs_best_dense", "best_dense", "kv_bytes_per_step", "bandwidth_tbps", "roof_share", "floor_us", "tokens_per_s"),
    *(
        "bytes",
        "dram_bytes_measured",
        "energy_j_per_token",
        "stages_us",
        "stage_floors_us",
        "eager_us",
        "plan_us",
        "ttft_us",
        "kv_capacity_tokens",
        "cache_state",
    ),
    *("timer", "backend_version", "read_roof_tbps", "stop_reason", "rounds", "performance_claim", "commit", "time", "command"),
)


def page_data(found: Sequence[Panel], fidelity: Sequence[FidelityRecord] = ()) -> dict[str, Any]:
    """Everything but the raw records."""
    kept = view(fidelity, found)
    entries = list(all_entries(found))
    owners = {entry.index: panel for panel in found for entry in panel.entries}
    table = [_table_row(entry, owners.get(entry.index)) for entry in entries]
    return {
        "columns": {name: _column([row[name] for row in table]) for name in (table[0] if table else ())},
        "count": len(table),
        "styles": styles([*(entry.row["backend"] for entry in entries), *(row["selector"] for row in kept["rows"])]),
        "fidelity": kept["rows"],
        "shared": shared_figures(kept),
        "panels": [
            {"slug": panel.slug, "label": panel.label, "level": panel.level, "figures": figures(panel)} for panel in found
        ],
    }


def embedded(data: object) -> tuple[Markup, bool]:
    """JSON that may stand inside a <script> element whatever its strings hold, packed if it is large; whether it is."""
    text = json.dumps(data, separators=(",", ":"), allow_nan=False, ensure_ascii=False)
    if len(text) > MOST_PLAIN:
        return Markup(packed(text)), True
    for character in "<>&\u2028\u2029":
        text = text.replace(character, f"\\u{ord(character):04x}")
    return Markup(text), False


def packed_records(entries: Iterable[Entry]) -> str:
    """All records as gzipped JSON in base64, in the order of the table; samples are thinned where they would fill the page."""
    entries = list(entries)
    kept, lines = samples_kept(entries), []
    for record in (entry.record for entry in entries):
        data = dict(vars(record))
        if kept != "all" and record.rounds_ns:
            data["rounds_ns"] = [[_short(median(part))] for part in record.rounds_ns if part] if kept == "medians" else None
            data["samples_kept_in_this_page"] = kept
        lines.append(data)
    return packed(json.dumps(lines, separators=(",", ":"), allow_nan=False))


def samples_kept(entries: Iterable[Entry]) -> Literal["all", "medians", "none"]:
    """How much of the samples the page has room for."""
    rounds = [entry.record.rounds_ns or [] for entry in entries]
    if sum(len(samples) for line in rounds for samples in line) <= MOST_SAMPLES:
        return "all"
    return "medians" if sum(map(len, rounds)) <= MOST_MEDIANS else "none"


def packed(text: str) -> str:
    """Gzip in base64; the same text gives the same result."""
    return base64.b64encode(gzip.compress(text.encode(), 6, mtime=0)).decode()


def _table_row(entry: Entry, panel: Panel | None) -> dict[str, Any]:
    row = entry.row
    return {name: row[name] for name in COPIED} | {
        "kernels": row["resolved"].get("kernels"),
        "dense": entry.dense,
        "plan": (row["kv"] or {}).get("plan"),
        "flags": row["flags"],
        "speedup_ci95": speedup_interval(panel, entry) if panel else None,
        "current": entry.current,
    }


def _column(values: list[Any]) -> Any:
    """Numbers as they are, to seven digits; everything else by a list of distinct values, since most repeat."""
    if all(value is None or (isinstance(value, int | float) and not isinstance(value, bool)) for value in values):
        return [_short(value) for value in values]
    places: dict[str, int] = {}
    codes = [places.setdefault(json.dumps(_short(value)), len(places)) for value in values]
    return {"values": [json.loads(text) for text in places], "codes": codes}


def _short(value: Any) -> Any:
    if isinstance(value, float):
        return float(f"{value:.7g}")
    if isinstance(value, dict):
        return {name: _short(part) for name, part in value.items()}
    return [_short(part) for part in value] if isinstance(value, list | tuple) else value
