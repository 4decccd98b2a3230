"""Rows: what is derived from records, and what a failed row must not have."""

from __future__ import annotations

import json
from io import StringIO

import pytest
from fake_records import COMMAND, H200, case, failed, measured
from rich.console import Console

from harness.record import Outcome
from locks_kernels.cost import locks_bytes, locks_stage_bytes
from reports.rows import Row, rows
from reports.table import latency_report

NUMBERS = (
    "latency_us",
    "latency_ci95_us",
    "bytes",
    "kv_bytes_per_step",
    "bandwidth_tbps",
    "tokens_per_s",
    "speedup_vs_best_dense",
    "stages_us",
    "stage_floors_us",
)
REQUIRED = (
    *("level", "model", "ctx", "batch", "budget", "backend", "outcome", "reason", "kv", *NUMBERS, "command", "cache_state"),
    *("timer", "device", "resolved", "read_roof_tbps", "performance_claim", "machine", "commit", "flags"),
)


def by_backend(table: list[Row]) -> dict[str, Row]:
    return {row["backend"]: row for row in table}


def rendered(table: list[Row]) -> str:
    console = Console(file=StringIO(), width=220)
    console.print(latency_report(table))
    return console.file.getvalue()  # type: ignore[attr-defined]


def test_numbers_of_an_ok_row() -> None:
    row = rows([measured(case(), "fa3", 983.0)])[0]
    assert set(REQUIRED) <= set(row)
    assert row["latency_us"] == pytest.approx(983.0, rel=1e-3)
    low, high = row["latency_ci95_us"]
    assert low <= row["latency_us"] <= high
    assert row["kv_bytes_per_step"] == 4_294_967_296
    assert row["bandwidth_tbps"] == pytest.approx(4.37, abs=0.01)
    assert row["tokens_per_s"] == pytest.approx(1e6 / (32 * 983.0), rel=1e-3)
    assert row["performance_claim"] is True
    assert (row["command"], row["machine"], row["commit"]) == (COMMAND, "NVIDIA H200", "abc")


def test_token_level_counts_tokens_of_the_batch() -> None:
    row = rows([measured(case(level="token", batch=16, ctx=8192), "fa3", 10_000.0)])[0]
    assert row["tokens_per_s"] == pytest.approx(1600.0, rel=1e-3)


def test_speedup_is_against_the_fastest_dense_of_the_same_case() -> None:
    other = case(batch=16)
    table = rows(
        [
            measured(case(), "fa3", 984.0),
            measured(case(), "flashinfer", 983.0),
            measured(case(), "locks", 200.0),
            measured(other, "fa3", 10.0),
            measured(other, "locks", 20.0),
        ]
    )
    assert [row["best_dense"] for row in table] == ["flashinfer"] * 3 + ["fa3"] * 2
    assert [round(row["speedup_vs_best_dense"], 3) for row in table] == [0.999, 1.0, 4.915, 1.0, 0.5]
    assert all(row["flags"] == [] for row in table)


def test_the_rival_is_of_the_same_run_where_there_is_one() -> None:
    times = [{"time": f"2026-01-0{day}T00:00:00Z"} for day in (1, 2)]
    runs = [
        measured(case(), backend, latency, **times[run])
        for run, latencies in enumerate(((900.0, 300.0), (1000.0, 200.0)))
        for backend, latency in zip(("fa3", "locks"), latencies, strict=True)
    ]
    old = measured(case(), "flashinfer", 950.0, **times[0])
    assert [row["speedup_vs_best_dense"] for row in rows([*runs, old])] == pytest.approx([1.0, 3.0, 0.95, 4.75, 900 / 950])


@pytest.mark.parametrize(
    "rival",
    [
        measured(case(), "fa3", 1.0, environment={"gpu": {"name": "another GPU"}}),
        measured(case(), "fa3", 1.0, timer="eager"),
        measured(case(seed=1), "fa3", 1.0),
        measured(case(), "fa3", 1.0, kv={"plan": "tp=8", "note": ""}),
        failed(case(), "fa3", Outcome.INCORRECT, "zeros"),
        measured(case(), "fa3", 1.0, outcome=Outcome.THROTTLED),
        measured(case(), "locks-triton", 1.0),
        measured(case(), "flashinfer#2", 1.0),
    ],
)
def test_no_speedup_against_what_cannot_be_compared(rival: object) -> None:
    row = rows([rival, measured(case(), "locks", 200.0)])[1]  # type: ignore[list-item]
    assert row["speedup_vs_best_dense"] is None and row["best_dense"] is None


@pytest.mark.parametrize("outcome", [outcome for outcome in Outcome if outcome not in (Outcome.OK, Outcome.THROTTLED)])
def test_failed_rows_have_nulls_even_if_samples_were_left(outcome: Outcome) -> None:
    broken = measured(case(), "locks", 0.001, outcome=outcome, reason="why", stages_ns={"score": [1.0]})
    row = rows([measured(case(), "fa3", 983.0), broken])[1]
    assert {name: row[name] for name in NUMBERS} == dict.fromkeys(NUMBERS)
    assert row["reason"] == "why" and row["performance_claim"] is False
    assert json.loads(json.dumps(row, allow_nan=False))["outcome"] == outcome.value


def test_throttled_rows_have_a_latency_and_no_speedup() -> None:
    slow = measured(case(), "locks", 300.0, outcome=Outcome.THROTTLED, reason="clock at 60 %")
    row = rows([measured(case(), "fa3", 983.0), slow])[1]
    assert row["latency_us"] == pytest.approx(300.0, rel=1e-3)
    assert row["speedup_vs_best_dense"] is None and row["performance_claim"] is False


def test_speedup_above_the_byte_ratio_is_flagged() -> None:
    table = rows([measured(case(), "fa3", 983.0), measured(case(), "locks", 50.0)])
    assert "above the byte ratio" in table[1]["flags"][0]
    assert "!" in rendered(table) and "above the byte ratio" in rendered(table)


@pytest.mark.parametrize(
    ("score_us", "score_bytes", "warned"),
    [(50.0, 160e6, False), (50.0, 150e6, True), (5.0, 1e6, False)],  # 73 and 68 % of a roof of 4.4 TB/s; latency, not bytes
)
def test_a_scorer_far_from_the_roof_is_called_unfair(score_us: float, score_bytes: float, warned: bool) -> None:
    stages = {"stages_ns": {"score": [score_us * 1e3]}, "stage_bytes": {"score": int(score_bytes)}, "read_roof_tbps": 4.4}
    table = rows([measured(case(), "fa3", 983.0), measured(case(), "quest-group", 200.0, **stages)])
    assert [bool(row["warnings"]) for row in table] == [False, warned]
    assert ("fairness: llama-3.1-8b attention" in rendered(table)) == warned
    if warned:
        assert "68% of the read roof" in table[1]["warnings"][0] and "up to 16 us less" in table[1]["warnings"][0]


@pytest.mark.parametrize("ctx", [2048, 4096, 1 << 20])
def test_bytes_by_stage_are_the_bytes_by_part(ctx: int) -> None:
    of = case(ctx=ctx, batch=3)
    by_stage = locks_stage_bytes(of.shape(), of.select, of.ctx, of.batch)
    by_part = locks_bytes(of.shape(), of.select, of.ctx, of.batch)
    assert sum(by_stage.values()) == sum(by_part.values())
    assert by_stage["attend"] >= by_part["selected_kv"] > 0 and (by_stage["score"] > 0) is (ctx > 2048)


def test_stage_floors_are_bytes_over_the_roof() -> None:
    record = measured(case(), "locks", 200.0, stages_ns={"score": [3e5, 1e5, 2e5], "select": [1e4]})
    record.stage_bytes = {"score": 449_000_000}
    row = rows([record])[0]
    assert row["stages_us"] == {"score": 200.0, "select": 10.0}
    assert row["stage_floors_us"] == {"score": pytest.approx(100.0)}
    text = rendered([row])
    assert "2.00" in text and "select" in text


@pytest.mark.parametrize(("device", "state"), [("cpu", "layers"), ("cuda", "warm"), ("cuda", "hot")])
def test_no_performance_claim_on_a_cpu_or_a_warm_cache(device: str, state: str) -> None:
    environment = H200 if device == "cuda" else {"gpu": None, "cpu": {"name": "some CPU"}}
    row = rows([measured(case(device=device), "sdpa", 983.0, cache_state=state, environment=environment)])[0]
    assert row["performance_claim"] is False
    assert ("no performance claim" in rendered([row])) is (device == "cpu")


def test_the_table_shows_every_row_and_the_reason_of_the_failed() -> None:
    table = rows([measured(case(), "fa3", 983.0), failed(case(), "flashinfer", Outcome.SKIPPED, "pip install [this]")])
    text = rendered(table)
    assert "982.5 [" in text and "1M" in text and "layers=2" in text
    assert "flashinfer: SKIPPED: pip install [this]" in text
    assert "0.00" not in text.replace("1.00x", "")


def test_launch_bound_is_flagged_above_a_ratio_of_1_2() -> None:
    """A kernel of 2 us that takes 9 us without a graph is the launch, and so is one that does nothing."""
    eager = {2.0: 9.0, 0.001: 6.0, 100.0: 115.0}
    made = [measured(case(), "fa3", us, eager_ns=[1e3 * slow] * 5) for us, slow in eager.items()]
    table = rows([*made, measured(case(), "fa3", 1.0)])
    assert [row["launch_bound"] for row in table] == [True, True, False, None]
    console = Console(width=300, record=True, file=StringIO())
    console.print(latency_report(table[:1]))
    assert "Launch-bound without a graph: llama-3.1-8b attention 1M x 1 fa3 (4.5 x)" in console.export_text()


def test_idle_power_is_a_column_of_its_own() -> None:
    known, unknown = rows([measured(case(), "fa3", 1.0, meters={"idle_w": 74.0}), measured(case(), "fa3", 1.0)])
    assert (known["idle_w"], unknown["idle_w"]) == (74.0, None)


def test_a_memory_plan_is_told_once_per_cell() -> None:
    plans = [{"plan": "layers=1", "note": f"layers=1: {free} GB free"} for free in (15, 17)]
    records = [measured(case(), name, 1.0, kv=kv, cache_state="warm") for name, kv in zip(("fa3", "sdpa"), plans, strict=True)]
    other = measured(case(batch=2), "sdpa", 1.0, kv={"plan": "layers=1", "note": "another cell"}, cache_state="warm")
    text = rendered(rows([*records, other]))
    assert text.count("GB free") == 1 and "another cell" in text
