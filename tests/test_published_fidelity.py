"""Every table of docs/fidelity.md is what the committed records say."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from harness.fidelity_record import FidelityRecord, LoopRecord
from harness.store import read
from reports import closed_loop
from reports.fidelity import rows

ROOT = Path(__file__).parents[1]
MEASURES = ("recall", "mass_of_oracle", "error", "retention_oracle_strict")
BUDGETS = (256, 512)
TEXT = (ROOT / "docs" / "fidelity.md").read_text()
TABLES = re.findall(r"<!-- ([\w.-]+), ([\w.-]+), (\d) -->\n((?:\|.*\n)+)", TEXT)


def cells(table: str) -> list[list[str]]:
    return [re.split(r"\s*\|\s*", line.strip("| ")) for line in table.splitlines()[2:]]


@pytest.mark.parametrize(("store", "model", "sinks", "table"), TABLES)
def test_a_table_is_what_the_records_say(store: str, model: str, sinks: str, table: str) -> None:
    records = read(ROOT / "reports/published" / store / "fidelity.ndjson", kind=FidelityRecord)
    found = {
        (row["selector"], row["budget"]): row
        for row in rows(records)
        if (row["model"], row["sink_pages"]) == (model, int(sinks))
    }
    for selector, *values in cells(table):
        for budget, part in zip(BUDGETS, (values[:5], values[5:]), strict=True):
            row = found[selector, budget]
            assert float(part[0].rstrip("x")) == pytest.approx(row["fewer_bytes"], abs=0.051), selector
            for measure, cell in zip(MEASURES, part[1:], strict=True):
                assert float(cell) == pytest.approx(row[measure]["value"], abs=5.1e-4), (selector, measure)


def test_there_are_tables() -> None:
    assert len(TABLES) == 5


def test_the_table_of_the_closed_loop_is_what_the_records_say() -> None:
    records = read(ROOT / "reports/published/smollm2-135m-cpu/closed_loop.ndjson", kind=LoopRecord)
    found = {row["selector"]: row for row in closed_loop.rows(records)}
    table = TEXT.split("<!-- closed loop -->\n")[1].split("\n\n")[0]
    assert len(cells(table)) == len(found)
    for selector, *values in cells(table):
        for measure, cell in zip(("exact_match", "kept_of_full", "agreement", "kl", "same_text"), values, strict=True):
            assert float(cell) == pytest.approx(found[selector][measure]["value"], abs=5.1e-4), (selector, measure)


def test_what_must_hold_on_a_real_model_holds() -> None:
    """Rank 8 keeps 0.99 of the exact ranking's mass; the order of LOCKS' ranks, Quest and a centred shared basis."""
    records = read(ROOT / "reports/published/smollm2-135m-cpu/fidelity.ndjson", kind=FidelityRecord)
    table = {(row["selector"], row["budget"], row["sink_pages"]): row for row in rows(records)}
    for budget in BUDGETS:
        for sinks in (0, 1):
            order = ("oracle", "locks-r8", "locks-r4", "locks-r2", "quest-group", "shared-svd-r8-centred")
            kept = [table[name, budget, sinks]["mass_of_oracle"]["value"] for name in order]
            assert kept == sorted(kept, reverse=True) and kept[1] >= 0.99
            assert all(table[name, budget, sinks]["active"] for name in order)
