"""Every number of the README's results tables comes from the committed records."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from bench.arguments import size
from harness.store import load
from reports.rows import rows

ROOT = Path(__file__).parents[1]
BASELINE = "llama-3.1-8b"
Cell = tuple[str, str, int, int]


def results_tables() -> list[list[list[str]]]:
    """The tables of the section, each as rows of cells."""
    section = (ROOT / "README.md").read_text().split("## Results")[1].split("\n## ")[0]
    blocks = (block.splitlines() for block in section.split("\n\n") if block.startswith("|"))
    return [[re.split(r"\s*\|\s*", line.strip("| ")) for line in block] for block in blocks]


def cell(level: str, text: str) -> Cell:
    """ "glm-4-9b-1m 1M x 1" names a case."""
    *model, context, _, batch = text.split()
    return level, model[0] if model else BASELINE, size(context, "context"), int(batch)


def test_the_tables_are_what_the_records_say() -> None:
    measured: dict[Cell, dict[str, dict[str, Any]]] = {}
    for row in rows(load([ROOT / "reports/published"])):  # the newest come last
        where = (row["level"], row["model"], row["ctx"], row["batch"])
        measured.setdefault(where, {})[row["backend"]] = row
    tables = results_tables()
    told = set()
    for level, (head, _, *lines) in zip(("attention", "token", "engine"), tables, strict=True):
        for text, *latencies, speedup in lines:
            where = cell(level, text)
            told.add(where)
            for backend, latency in zip(head[1:-1], latencies, strict=True):
                row = measured[where].get(backend)
                assert (latency != "-") is (row is not None and row["outcome"] == "OK"), (text, backend)
                if row is not None and latency != "-":
                    assert row["performance_claim"]
                    assert float(latency.replace(",", "")) == pytest.approx(row["latency_us"], rel=5e-4)
            expected = measured[where]["locks"]["speedup_vs_best_dense"]
            assert (speedup == "-") is (expected is None), text
            assert expected is None or float(speedup.rstrip("x")) == pytest.approx(expected, abs=0.005)
    assert told == set(measured), "no measured case is left out"


def test_measured_bytes_are_the_counted_ones() -> None:
    profiled = [row for row in rows(load([ROOT / "reports/published"])) if row["dram_bytes_measured"]]
    assert {(row["backend"], row["ctx"]) for row in profiled} >= {
        (backend, ctx) for backend in ("flashinfer", "locks", "quest-group") for ctx in (128 << 10, 1 << 20)
    }
    for row in profiled:
        # Of the 8 MB of scores that are written 5 stay in L2: 1 % of llama's bytes, 2 % of glm-4-9b-1m's, which are half.
        off = 0.01 if row["model"] == BASELINE else 0.02
        assert 1 - off <= row["dram_bytes_measured"] / sum(row["bytes"].values()) <= 1 + off
