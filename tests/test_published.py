"""Every number of the README's results table comes from the committed records."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from harness.store import load
from reports.rows import rows

ROOT = Path(__file__).parents[1]
CONTEXTS = {"8K": 8 << 10, "128K": 128 << 10, "1M": 1 << 20}


def results_table() -> list[list[str]]:
    section = (ROOT / "README.md").read_text().split("## First results")[1].split("\n## ")[0]
    return [re.split(r"\s*\|\s*", line.strip("| ")) for line in section.splitlines() if line.startswith("|")]


def test_the_table_is_what_the_records_say() -> None:
    measured = {(row["backend"], row["ctx"]): row for row in rows(load([ROOT / "reports/published"])) if row["batch"] == 1}
    head, _, *lines = results_table()
    assert len(lines) == len(CONTEXTS)
    for context, *cells in lines:
        *latencies, speedup = cells
        for backend, cell in zip(head[1:-1], latencies, strict=True):
            row = measured[backend, CONTEXTS[context]]
            assert row["outcome"] == "OK" and row["performance_claim"]
            assert float(cell.replace(",", "")) == pytest.approx(row["latency_us"], rel=5e-4)
        assert float(speedup.rstrip("x")) == pytest.approx(
            measured["locks", CONTEXTS[context]]["speedup_vs_best_dense"], abs=0.005
        )
