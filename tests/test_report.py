"""The page: its numbers against ones recomputed here, and what it must hold whatever the records hold."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any

import pytest
from fake_records import case, failed
from report_fakes import HOSTILE, every_outcome, fidelity, grid, many, old_schema, two_runs, typical
from report_page import FIGURES, MOST_BYTES, SECTIONS, Page, drawn

from harness.errors import UserError
from harness.record import Outcome, Record
from reports.fidelity_view import load as load_fidelity
from reports.page import Options, plotly_source, render
from reports.style import COLORS, styles


def test_numbers_are_those_of_the_records() -> None:
    records = grid()
    page = Page(render(records))
    by_key = {record.key: record for record in records}
    latency = {key: median(median(part) for part in record.rounds_ns or []) / 1e3 for key, record in by_key.items()}
    rows = page.rows()
    assert {row["key"] for row in rows} == set(by_key)
    for row in rows:
        record = by_key[row["key"]]
        rivals = [
            latency[other.key]
            for other in records
            if other.resolved["dense"] and (other.case["ctx"], other.case["batch"]) == (row["ctx"], row["batch"])
        ]
        assert row["latency_us"] == pytest.approx(latency[row["key"]], rel=1e-6)
        assert row["speedup_vs_best_dense"] == pytest.approx(min(rivals) / latency[row["key"]], rel=1e-6)
        low, high = row["speedup_ci95"]
        assert low <= row["speedup_vs_best_dense"] <= high
        total = sum(record.bytes.values())  # type: ignore[union-attr]
        assert row["bandwidth_tbps"] == pytest.approx(total / latency[row["key"]] / 1e6, rel=1e-6)
        assert row["floor_us"] == pytest.approx(total / record.read_roof_tbps / 1e6, rel=1e-6)  # type: ignore[operator]
        assert row["roof_share"] == pytest.approx(row["bandwidth_tbps"] / record.read_roof_tbps, rel=1e-5)
        assert row["command"] == record.command


def test_the_summary_tells_the_numbers_of_the_best_cell() -> None:
    records = grid()
    times = {(record.backend, record.case["ctx"], record.case["batch"]): record for record in records}

    def latency(backend: str, ctx: int, batch: int) -> float:
        return median(median(part) for part in times[backend, ctx, batch].rounds_ns or []) / 1e3

    def speedup(ctx: int, batch: int) -> float:
        return min(latency(name, ctx, batch) for name in ("fa3", "flashinfer")) / latency("locks", ctx, batch)

    best = max({(ctx, batch) for _, ctx, batch in times}, key=lambda cell: speedup(*cell))
    text = Page(render(records)).text
    assert f"{speedup(*best):.2f}x" in text
    assert f"locks takes {latency('locks', 1 << 20, 1):.1f} µs" in text
    assert "locks wins from" in text and "48 of 48" in text


def test_raw_records_are_in_the_page_as_they_are() -> None:
    records = grid()
    page = Page(render(records))
    raw = {one["key"]: one for one in page.raw()}
    assert raw == {record.key: json.loads(record.to_json()) for record in records}
    assert [row["key"] for row in page.rows()] == [one["key"] for one in page.raw()]


@pytest.mark.parametrize("records", [grid(), every_outcome(), two_runs(), [typical(case(), "locks")]], ids=len)
def test_every_section_and_figure_is_there_and_nothing_is_fetched(records: list[Record]) -> None:
    text = render(records)
    page = Page(text)
    assert [name for name in SECTIONS if name not in page.ids] == []
    assert tuple(page.figures) == FIGURES
    assert page.fetched == []
    assert len(page.ids) == len(set(page.ids))
    assert len(text.encode()) < MOST_BYTES
    assert text.count(plotly_source()) == 1
    assert "default-src &#39;none&#39;; script-src" in text


def test_figures_show_no_row_that_is_not_ok() -> None:
    page = Page(render(every_outcome()))
    rows, data = page.rows(), page.data()
    named = drawn([panel["figures"] for panel in data["panels"]]) - {-1}
    assert {rows[index]["outcome"] for index in named} == {"OK"}
    ok = {index for index, row in enumerate(rows) if row["outcome"] == "OK"}
    assert named == ok
    untimed = {row["latency_us"] for row in rows if row["outcome"] not in ("OK", "THROTTLED")}
    assert untimed == {None}


def test_gaps_stay_gaps() -> None:
    records = [record for record in grid() if record.case["batch"] == 1 and record.backend in ("fa3", "locks")]
    records[3].outcome, records[3].reason = Outcome.OOM, "out of memory"
    absent = records.pop(5)
    page = Page(render(records))
    figure = page.data()["panels"][0]["figures"]["latency"]["slices"][0]
    rows = page.rows()
    line = next(line for line in figure["lines"] if line["backend"] == "locks")
    values = [rows[index]["latency_us"] if index >= 0 else None for index in line["rows"]]
    assert [value is None for value in values] == [False, True, True, False]
    assert absent.case["ctx"] in figure["at"]


def test_failures_are_told_with_their_reasons() -> None:
    page = Page(render(every_outcome()))
    for outcome in Outcome:
        assert outcome is Outcome.OK or f"{outcome}: because of <b>this & that</b>" in page.text
    assert "no reason given" in page.text
    assert "b" not in page.tags[page.tags.index("table") : page.tags.index("form")]


def test_names_and_reasons_are_text() -> None:
    text = render(every_outcome())
    assert HOSTILE not in text
    page = Page(text)
    assert HOSTILE in page.text  # as text, after the browser has decoded it
    assert HOSTILE in {row["backend"] for row in page.rows()}


def test_same_records_same_page() -> None:
    assert render(every_outcome()) == render(every_outcome())
    assert render(grid()) == render(list(reversed(grid())))


def test_colours_are_those_of_the_backends_in_every_report() -> None:
    both = Page(render(grid())).data()["styles"]
    one = Page(render([typical(case(), "locks")])).data()["styles"]
    assert one["locks"] == both["locks"]
    looks = [(style["color"], style["symbol"]) for style in both.values()]
    assert len(set(looks)) == len(looks) == 4
    crowd = styles(["locks", "fa3", *(f"plug-in {place}" for place in range(62))])
    assert crowd["locks"] == one["locks"] and len({(style["color"], style["symbol"]) for style in crowd.values()}) == 64
    assert styles(["locks", "quest"])["quest"]["color"] != one["locks"]["color"]


@pytest.mark.parametrize("page", ["#ffffff", "#14171c"])
def test_colours_stand_out_from_both_pages(page: str) -> None:
    def luminance(color: str) -> float:  # WCAG 2
        shares = [int(color[at : at + 2], 16) / 255 for at in (1, 3, 5)]
        linear = [share / 12.92 if share <= 0.04045 else ((share + 0.055) / 1.055) ** 2.4 for share in shares]
        return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]

    assert page in render(grid()[:1])
    for color in COLORS:
        dark, light = sorted([luminance(color), luminance(page)])
        assert (light + 0.05) / (dark + 0.05) >= 3, color


def test_older_schema_and_rows_without_anything() -> None:
    old = Record.from_dict(old_schema())
    empty = failed(case(ctx=8192), "locks", Outcome.CRASHED, "died", environment={}, timer=None, read_roof_tbps=None)
    page = Page(render([old, empty]))
    assert sorted(row["latency_us"] or 0.0 for row in page.rows()) == [0.0, pytest.approx(1.005)]
    assert "not measured in these records" in page.text
    assert "NaN" not in page.scripts["data"] and "None" not in page.text


def test_two_machines_are_never_compared() -> None:
    records = [
        typical(case(), "fa3", environment={"gpu": {"name": "A"}}),
        typical(case(), "locks", environment={"gpu": {"name": "B"}}),
    ]
    records[1].key = "other"
    page = Page(render(records))
    assert [panel["label"].split(",")[0] for panel in page.data()["panels"]] == ["A", "B"]
    assert [row["speedup_vs_best_dense"] for row in page.rows() if row["backend"] == "locks"] == [None]


def test_the_later_row_counts_and_the_earlier_is_history() -> None:
    page = Page(render(two_runs()))
    rows = page.rows()
    assert sum(row["current"] for row in rows) == 8 and len(rows) == 16
    assert all(row["time"].startswith("2026-01-02") for row in rows if row["current"])
    assert "SLOWER" in page.text and "SAME" in page.text and "OOM" in page.text
    assert page.data()["panels"][0]["figures"]["history"]["slices"]


def test_a_cpu_claims_nothing() -> None:
    on_cpu = {"gpu": None, "cpu": {"name": "some CPU"}, "device": "cpu"}
    records = [typical(case(device="cpu"), backend, environment=on_cpu) for backend in ("sdpa", "locks")]
    text = Page(render(records)).text
    assert "no performance claim" in text and "pays from" not in text


def test_what_was_not_measured_is_said_and_what_was_is_shown() -> None:
    records = grid()
    figures = Page(render(records)).data()["panels"][0]["figures"]
    assert figures["energy"]["slices"] == [] and "not measured" in figures["energy"]["empty"]
    for record in records:
        record.energy_j_per_token = 0.25
        record.meters = {"sm_mhz": [1980.0, 1965.0], "temperature_c": [51.0, None], "events": [["power cap"], None]}
    page = Page(render(records))
    assert page.data()["panels"][0]["figures"]["energy"]["empty"] is None
    assert {row["energy_j_per_token"] for row in page.rows()} == {0.25}
    assert "1965 to 1980 MHz, at most 51 °C; reasons that clocks were held: power cap" in page.text


def test_fidelity_stands_beside_the_bytes_and_the_time_of_the_same_model(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    records = fidelity()
    torn = "".join(record.to_json() + "\n" for record in records) + '{"key":'
    (tmp_path / "run" / "fidelity.ndjson").write_text(torn)
    notes: list[str] = []
    loaded = load_fidelity([tmp_path, tmp_path / "run" / "records.jsonl"], notes.append)
    assert len(loaded) == len(records) and "cut off" in notes[0]
    again = [replace(record, key=record.key + "x", time="2026-02-01T00:00:00Z") for record in records]  # by other code
    (tmp_path / "fidelity.ndjson").write_text("".join(record.to_json() + "\n" for record in again))
    assert {record.key for record in load_fidelity([tmp_path], notes.append)} == {record.key for record in again}
    page = Page(render([typical(case(ctx=8192), "locks"), typical(case(ctx=8192), "fa3")], fidelity=loaded))
    data = page.data()
    shown = {(row["selector"], row["budget"]): row for row in data["fidelity"]}
    assert shown["locks-r8", 2048]["mass_of_oracle"] == pytest.approx((0.8 + 0.9) / 2)
    low, high = shown["locks-r8", 2048]["mass_of_oracle_ci95"]
    assert (low, high) == pytest.approx((0.8, 0.9))
    assert shown["locks-r8", 2048]["fewer_bytes"] == pytest.approx(100 / 5)
    locks = next(row for row in page.rows() if row["backend"] == "locks")
    assert shown["locks-r8", 2048]["latency_us"] == pytest.approx(locks["latency_us"], rel=1e-6)
    assert shown["locks-r8", 512]["latency_us"] is None and shown["quest", 2048]["latency_us"] is None
    assert "budget 2K: locks-r8 keeps 0.850 [0.800, 0.900] of the attention mass" in page.text
    assert "20.0x fewer bytes than full attention; more is kept by quest (0 with no more bytes)" in page.text
    lines = data["shared"]["fidelity"]["slices"][0]["lines"]
    assert [line["backend"] for line in lines] == ["locks-r8", "quest"] and data["shared"]["fidelity-time"]["empty"] is None
    assert data["styles"]["locks-r8"] == data["styles"]["locks"]


def test_no_records_is_an_error() -> None:
    with pytest.raises(UserError, match="nothing to report"):
        render([])


@pytest.mark.parametrize(
    ("plotly", "wanted"), [("cdn", r"https://cdn\.plot\.ly/plotly-[\d.]+\.min\.js"), ("directory", r"\./plotly\.min\.js")]
)
def test_plotly_from_elsewhere(plotly: Any, wanted: str) -> None:
    text = render(grid(), Options(plotly=plotly))
    assert len(text) < 1_000_000
    assert len(Page(text).fetched) == 1 and re.fullmatch(wanted, Page(text).fetched[0])


def test_ten_thousand_rows() -> None:
    records = many(10_000)
    start = time.process_time()
    text = render(records)
    assert time.process_time() - start < 20
    assert len(text.encode()) < MOST_BYTES
    page = Page(text)
    assert len(page.rows()) == len(page.raw()) == 10_000
    some = next(one for one in page.raw() if one["outcome"] == "OK")
    assert some["samples_kept_in_this_page"] == "medians"
    record = next(record for record in records if record.key == some["key"])
    assert [part[0] for part in some["rounds_ns"]] == pytest.approx([median(part) for part in record.rounds_ns or []])


BLOCKED = """
import sys
class Block:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in ("torch", "triton", "pynvml"):
            raise ImportError(name + " is not installed here")
sys.meta_path.insert(0, Block())
from bench.cli import main
main()
"""


def test_the_command_works_without_torch(tmp_path: Path) -> None:
    store = tmp_path / "store" / "records.jsonl"
    store.parent.mkdir()
    store.write_text("".join(record.to_json() + "\n" for record in grid()))
    target = tmp_path / "new" / "report.html"
    command = [sys.executable, "-c", BLOCKED, "report", str(store.parent), "-o", str(target)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode in (0, None), done.stderr
    assert "48 rows" in done.stderr
    assert tuple(Page(target.read_text()).figures) == FIGURES
