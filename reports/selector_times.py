"""Measured times beside what selectors keep: the backend of the same name, in one cell of a store.  Imports no torch."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from harness.backends.untimed import SAME_STEP
from harness.record import Record
from reports.rows import Row, rows
from reports.text import short_size

OWN = ("locks", "locks-cuda", "locks-triton")  # best first; which selector they are says the case


@dataclass(frozen=True)
class Times:
    """One cell: one layer's step on one machine.  us: microseconds by selector."""

    machine: str
    model: str
    ctx: int
    batch: int
    budget: int
    us: dict[str, float]

    def record(self) -> dict[str, Any]:
        return asdict(self)

    def of(self, selector: str) -> float | None:
        """Its own time, or that of the backend whose launches would be the very same."""
        return self.us.get(selector, self.us.get(SAME_STEP.get(selector, "")))

    def sentence(self, store: str) -> str:
        return (
            f"us/layer: one attention step of a layer of {self.model} at {short_size(self.ctx)} x {self.batch}, budget "
            f"{self.budget}, {self.machine}, from the records in {store}; - where it has no kernel, or found its data in L2."
        )


def find(records: Sequence[Record], budget: int) -> Times | None:
    """The cell with times of most selectors; of those the one with this budget, the longest context, the smallest batch.
    None where no record is a performance claim.
    """
    cells: dict[tuple[Any, ...], dict[str, float]] = defaultdict(dict)
    for name, row in _named(records):
        cell = cells[row["machine"], row["model"], row["ctx"], row["batch"], row["budget"]]
        cell.setdefault(name, row["latency_us"])
    if not cells:
        return None
    key = max(cells, key=lambda key: (len(cells[key]), key[4] == budget, key[2], -key[3]))
    machine, model, ctx, batch, of_budget = key
    return Times(machine, model, ctx, batch, of_budget, cells[key])


def none_sentence(store: str) -> str:
    return f"No times of selectors in {store}: `locks-bench latency --backends all` on a GPU measures them."


def _named(records: Sequence[Record]) -> Iterable[tuple[str, Row]]:
    """Selector and row, LOCKS' best kernels first."""
    found = []
    for record, row in zip(records, rows(records), strict=True):
        if not row["performance_claim"] or row["level"] != "attention" or record.resolved.get("dense"):
            continue
        if record.backend in OWN:
            combine = (record.case.get("select") or {}).get("combine", "share")
            name = f"locks-r{record.case.get('rank', 8)}" + ("" if combine == "share" else f"-{combine}")
            found.append((OWN.index(record.backend), name, row))
        else:
            found.append((0, record.backend, row))
    return [(name, row) for _, name, row in sorted(found, key=lambda one: one[0])]
