"""Records -> panels: all rows of one machine, model, level and set of options, which one set of figures can show together."""

from __future__ import annotations

import json
import re
from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from harness.backends import CONTROL
from harness.record import Outcome, Record
from harness.stats import resampled_medians, round_medians
from reports.rows import Row, rows
from reports.text import short_size

SWEPT = ("ctx", "batch", "kv")  # what varies inside a panel
LEVELS = ("engine", "token", "attention")  # the nearest to what a user waits for comes first


@dataclass
class Entry:
    """One record with its row.  index: its place in the table of all rows.  current: not superseded by a later one."""

    record: Record
    row: Row
    current: bool
    index: int = -1

    @cached_property
    def medians_ns(self) -> list[float]:
        """One value per round; empty for a row without a latency."""
        return round_medians(self.record.rounds_ns or []) if self.row["latency_us"] is not None else []

    @cached_property
    def resampled_ns(self) -> Any:
        """Bootstrap medians, which pair with those of equally many rounds."""
        return resampled_medians(self.medians_ns)

    @property
    def drawn(self) -> bool:
        """Whether a figure may show its latency."""
        return self.record.outcome is Outcome.OK and self.row["latency_us"] is not None

    @property
    def control(self) -> bool:
        """Whether it is the second instance of a backend, which only tells the noise of a run."""
        return self.record.backend.endswith(CONTROL)

    @property
    def dense(self) -> bool:
        return bool(self.record.resolved.get("dense"))

    @property
    def cell(self) -> tuple[int, int]:
        return self.row["ctx"], self.row["batch"]


@dataclass
class Panel:
    """slug: stable name for addresses.  entries: current ones by (ctx, batch, backend).  older: superseded, oldest first."""

    machine: str
    model: str
    level: str
    options: dict[str, Any]
    entries: list[Entry] = field(default_factory=list)
    older: list[Entry] = field(default_factory=list)
    slug: str = ""
    label: str = ""

    @property
    def claims(self) -> bool:
        """Whether any of its rows is a performance claim."""
        return any(entry.row["performance_claim"] for entry in self.entries)

    @cached_property
    def contexts(self) -> list[int]:
        return sorted({entry.row["ctx"] for entry in self.entries})

    @cached_property
    def batches(self) -> list[int]:
        return sorted({entry.row["batch"] for entry in self.entries})

    @cached_property
    def backends(self) -> list[str]:
        """Without the second instances of A/A comparisons."""
        return sorted({entry.row["backend"] for entry in self.entries if not entry.control})

    @cached_property
    def cells(self) -> list[tuple[int, int]]:
        return sorted({entry.cell for entry in self.entries})

    @cached_property
    def by_place(self) -> dict[tuple[int, int, str], Entry]:
        return {(*entry.cell, entry.row["backend"]): entry for entry in self.entries}

    def at(self, ctx: int, batch: int, backend: str | None) -> Entry | None:
        """The current entry of a place, or None."""
        return self.by_place.get((ctx, batch, backend)) if backend else None

    def rival(self, entry: Entry) -> Entry | None:
        """The dense entry that `entry` is compared with."""
        return self.at(*entry.cell, entry.row["best_dense"])


def panels(records: Iterable[Record]) -> list[Panel]:
    """All panels, the one that answers most first; entries are numbered in the order of the table of all rows."""
    grouped: dict[str, Panel] = {}
    for entry in _entries(list(records)):
        panel = _panel(entry)
        key = json.dumps([panel.machine, panel.model, panel.level, panel.options], sort_keys=True)
        panel = grouped.setdefault(key, panel)
        (panel.entries if entry.current else panel.older).append(entry)
    result = sorted(grouped.values(), key=_importance)
    for panel in result:
        panel.entries.sort(key=lambda entry: (*entry.cell, entry.row["backend"]))
    _name(result)
    for index, entry in enumerate(all_entries(result)):
        entry.index = index
    return result


def all_entries(found: Iterable[Panel]) -> Iterator[Entry]:
    """Every entry in the order of the table of all rows."""
    for panel in found:
        yield from panel.entries
        yield from panel.older


def _entries(records: list[Record]) -> Iterator[Entry]:
    """Rows are derived for each generation on its own: the latest records of all series, those before them, and so on."""
    series: dict[str, list[Record]] = defaultdict(list)
    for record in sorted(records, key=lambda record: (record.time, record.key)):
        series[_series(record)].append(record)
    deepest = max(map(len, series.values()), default=0)
    for age in range(deepest):
        generation = [line[-1 - age] for line in series.values() if len(line) > age]
        for record, row in zip(generation, rows(generation), strict=True):
            yield Entry(record, row, current=age == 0)


def _series(record: Record) -> str:
    row = {"machine": _device(record), "backend": record.backend, "ctx": record.case["ctx"], "batch": record.case["batch"]}
    return json.dumps([row, _options(record)], sort_keys=True)


def _options(record: Record) -> dict[str, Any]:
    """What else must agree for rows to stand side by side, in the flat."""
    case = {name: value for name, value in record.case.items() if name not in SWEPT}
    select = case.pop("select", None) or {}
    plan = (record.kv or {}).get("plan") or ""
    return case | select | {"share": plan if plan.startswith("tp=") else None}


def _panel(entry: Entry) -> Panel:
    options = _options(entry.record)
    for name in ("model", "level"):
        options.pop(name, None)
    model = {
        "model_" + name: value for name, value in entry.record.case["model"].items() if name not in ("name", "unsupported")
    }
    return Panel(_device(entry.record), entry.row["model"], entry.row["level"], options | model)


def _device(record: Record) -> str:
    device = record.environment.get("gpu") or record.environment.get("cpu") or {}
    return device.get("name") or "unknown machine"


def _importance(panel: Panel) -> tuple[Any, ...]:
    level = LEVELS.index(panel.level) if panel.level in LEVELS else len(LEVELS)
    options = json.dumps(panel.options, sort_keys=True)
    return not panel.claims, level, -len(panel.entries), panel.machine, panel.model, options


def _name(found: list[Panel]) -> None:
    """Labels name the budget and whatever else differs between panels; slugs are the labels in letters safe for addresses."""
    varying = {
        name
        for panel in found
        for name, value in panel.options.items()
        if name not in ("budget_tokens",)
        and not name.startswith("model_")
        and any(other.options.get(name) != value for other in found)
    }
    taken: dict[str, int] = defaultdict(int)
    for panel in found:
        budget = panel.options.get("budget_tokens")
        parts = [panel.machine, panel.model, f"level {panel.level}"]
        parts += [f"budget {short_size(budget)}"] if budget else []
        parts += [f"{name.replace('_', ' ')} {panel.options.get(name)}" for name in sorted(varying) if panel.options.get(name)]
        panel.label = ", ".join(parts)
        slug = re.sub(r"[^a-z0-9.]+", "-", panel.label.lower()).strip("-")
        taken[slug] += 1
        panel.slug = slug if taken[slug] == 1 else f"{slug}-{taken[slug]}"
