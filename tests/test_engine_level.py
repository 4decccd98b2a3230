"""Level engine with an engine that is none: what is timed, refused and stored, and what goes on after a failure."""

from __future__ import annotations

import io
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from engine_fakes import CHUNK_NS, STEP_NS, FakeEngine, FakeHost, engine_case
from fake_nvml import UUIDS, FakeNvml
from rich.console import Console

from harness.engine.cells import EngineBackend, EngineCase
from harness.engine.meter import open_meter
from harness.engine.run import EngineOptions, run_engines
from harness.errors import UserError
from harness.record import Outcome, Record
from harness.rerun import case_of
from harness.run import Event, LeftOut, RecordDone, RunOptions
from harness.store import Store
from reports.evidence import trust
from reports.page import render
from reports.panels import panels
from reports.payload import page_data
from reports.rows import rows
from reports.table import latency_report

BOTH = ("cpu-attn", "locks")


@pytest.fixture(autouse=True)
def installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(EngineBackend, "unavailable", lambda self, device: None)
    monkeypatch.setattr("harness.environment.source", lambda: {"commit": "c", "dirty": False, "kernel_sources": "k"})


@pytest.fixture
def sweep(tmp_path: Path) -> Callable[..., tuple[list[Record], list[Event]]]:
    def run(found: list[EngineCase], names: Any, host: FakeHost, **options: Any) -> tuple[list[Record], list[Event]]:
        events: list[Event] = []
        store = Store(tmp_path)
        records = run_engines(
            found, names, store, RunOptions("test", **options), EngineOptions(tmp_path / "logs"), events.append, host
        )
        return records, events

    return run


def outcomes(records: list[Record]) -> dict[tuple[str, int, int], str]:
    return {(record.backend, record.case["ctx"], record.case["batch"]): str(record.outcome) for record in records}


def test_a_batch_alone_outlives_the_prompts_of_its_newest_sequence(sweep: Callable[..., Any]) -> None:
    found = [engine_case(2048, 4), engine_case(1024, 1, kv="max")]
    for case in found:
        (record,), _ = sweep([case], ("cpu-attn",), FakeHost({"cpu-attn": [FakeEngine()]}))
        assert record.outcome is Outcome.OK, record.reason
        assert record.case["batch"] > 1 and record.resolved["longest_context"] > case.ctx
        assert record.ttft_ns == [-(-case.ctx // 1024) * CHUNK_NS]  # of a prompt alone, not of all that were handed over


def test_texts_of_one_model_are_no_reference_for_another(sweep: Callable[..., Any]) -> None:
    found = [engine_case(), engine_case(seed=1)]
    other = _with("off_nats", FakeEngine(), 1.0)  # its texts differ from those of the first
    records, _ = sweep(found, ("cpu-attn",), FakeHost({"cpu-attn": [FakeEngine(), other]}))
    assert [record.outcome for record in records] == [Outcome.OK] * 2


def test_texts_may_differ_by_more_where_other_kernels_prefill(sweep: Callable[..., Any]) -> None:
    names = ("fa3", "flashinfer", "locks")
    for off_nats, wanted in ((0.3, ["OK", "OK", "INCORRECT"]), (0.5, ["OK", "INCORRECT", "INCORRECT"]), (0.1, ["OK"] * 3)):
        first, *others = FakeEngine(), FakeEngine(), FakeEngine(sparse=True)
        first.flash_attention = 3
        engines = dict(zip(names, [first, *(_with("off_nats", engine, off_nats) for engine in others)], strict=True))
        host = FakeHost({name: [engine] for name, engine in engines.items()})
        records, _ = sweep([engine_case(seed=int(100 * off_nats))], names, host)
        assert [str(record.outcome) for record in records] == wanted


def test_records_are_complete_and_cells_share_an_engine(sweep: Callable[..., Any]) -> None:
    engines = FakeEngine(), FakeEngine(sparse=True)
    host = FakeHost({"cpu-attn": [engines[0]], "locks": [engines[1]]})
    found = [engine_case(ctx, batch) for ctx in (1024, 2048) for batch in (1, 2)]
    records, events = sweep(found, BOTH, host)
    assert len(host.jobs) == 2 and all(engine.closed for engine in engines)
    assert outcomes(records) == {(name, ctx, batch): "OK" for name in BOTH for ctx in (1024, 2048) for batch in (1, 2)}
    assert [record.case["ctx"] for record in records] == [1024] * 4 + [2048] * 4  # in the order of the cases
    assert sum(isinstance(event, RecordDone) for event in events) == 8
    row = rows(records)[-1]
    assert (row["backend"], row["latency_us"], row["tokens_per_s"]) == ("locks", 2 * STEP_NS / 1e3, 1e9 / STEP_NS)
    assert row["ttft_us"] == 2 * CHUNK_NS / 1e3
    assert row["kv_capacity_tokens"] == 32_000 and row["kv_bytes_per_token"] == 30 * 26_624 / 32
    assert row["speedup_vs_best_dense"] == 1.0 and row["best_dense"] == "cpu-attn"
    assert row["resolved"]["kernels"] == "LocksCPUImpl" and row["resolved"]["layers_served_by_plugin"] == 30
    jobs = {job.backend: job for job in host.jobs}
    assert jobs["cpu-attn"].environment == {"LOCKS_VLLM": None}
    assert json.loads(jobs["locks"].environment["LOCKS_VLLM"])["budget"] == 512
    assert jobs["locks"].arguments == jobs["cpu-attn"].arguments  # the same engine on a CPU, where the plugin takes its place
    assert not list(Path(host.logs).glob("*.log"))


def test_both_kinds_of_page_show_the_rows(sweep: Callable[..., Any]) -> None:
    host = FakeHost({"cpu-attn": [FakeEngine()], "locks": [FakeEngine(sparse=True)]})
    records, _ = sweep([engine_case()], BOTH, host)
    shown = io.StringIO()
    Console(file=shown, width=250).print(latency_report(rows(records)))
    assert "TTFT ms" in shown.getvalue() and "+8.3%" in shown.getvalue() and "32,000" in shown.getvalue()
    assert "level engine" in render(records)
    assert page_data(panels(records))["columns"]["ttft_us"] == [2 * CHUNK_NS / 1e3] * 2


def test_a_second_run_starts_no_engine_and_one_backend_alone_finds_its_reference(sweep: Callable[..., Any]) -> None:
    found = [engine_case(2048, 1), engine_case(2048, 2)]
    sweep(found, ("cpu-attn",), FakeHost({"cpu-attn": [FakeEngine()]}))
    host = FakeHost({"locks": [FakeEngine(sparse=True)]})
    records, events = sweep(found, BOTH, host)
    assert [job.backend for job in host.jobs] == ["locks"] and set(outcomes(records).values()) == {"OK"}
    assert [event.reused for event in events if isinstance(event, RecordDone)] == [True, True, False, False]
    again, _ = sweep(found, BOTH, nobody := FakeHost({}))
    assert nobody.jobs == [] and outcomes(again) == outcomes(records)


def test_engines_that_are_set_up_for_other_lengths_are_no_fair_pair(sweep: Callable[..., Any]) -> None:
    sweep([engine_case(1024)], BOTH[:1], FakeHost({"cpu-attn": [FakeEngine()]}))
    found = [engine_case(1024), engine_case(4096)]
    records, _ = sweep(found, BOTH, FakeHost({"cpu-attn": [FakeEngine()], "locks": [FakeEngine(sparse=True)]}))
    assert [len(row["warnings"]) for row in rows(records)] == [0, 1, 0, 0]
    assert "sequences of 4,096 tokens and that of cpu-attn for 1,024" in rows(records)[1]["warnings"][0]
    told = " ".join(sentence for panel in panels(records) for sentence in trust(panel))
    assert "1 row of level engine beside an engine that was set up for other lengths" in told and "Scorers" not in told
    records[0].resolved["vllm"] = "another"
    assert rows(records)[1]["best_dense"] is None


def test_a_sparse_backend_alone_is_checked_against_an_engine_started_for_that(sweep: Callable[..., Any]) -> None:
    host = FakeHost({"cpu-attn": [FakeEngine()], "locks": [FakeEngine(sparse=True)]})
    records, _ = sweep([engine_case()], ("locks",), host)
    assert [(job.backend, len(job.cells)) for job in host.jobs] == [("cpu-attn", 0), ("locks", 1)]
    assert outcomes(records) == {("locks", 2048, 1): "OK"} and not list(host.logs.glob("*.log"))
    host = FakeHost({"cpu-attn": [ImportError("libcudart.so.13: cannot open")]})
    (record,), _ = sweep([engine_case(batch=2)], ("locks",), host)
    assert record.outcome == "SKIPPED" and "no dense engine" in record.reason and "libcudart" in record.reason
    host = FakeHost({"cpu-attn": [RuntimeError("CUDA out of memory")]})
    (record,), _ = sweep([engine_case(batch=3)], ("locks",), host)
    assert record.outcome == "OOM" and "cpu-attn: RuntimeError: CUDA out of memory (log: " in record.reason
    host = FakeHost({"cpu-attn": [FakeEngine()], "locks": [FakeEngine(sparse=True)]})
    (record,), _ = sweep([engine_case(batch=3)], ("locks",), host)  # may fit by now
    assert record.outcome == "OK"
    old = _with("flash_attention", FakeEngine(), 2)  # a device without FlashAttention 3
    host = FakeHost({"fa3": [old], "flashinfer": [FakeEngine()], "locks": [FakeEngine(sparse=True)]})
    (record,), _ = sweep([engine_case(device="cuda", page_size=16)], ("locks",), host)
    assert record.outcome == "OK" and [job.backend for job in host.jobs] == ["fa3", "flashinfer", "locks"]


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (lambda: FakeEngine(sparse=False), "fell back"),
        (lambda: FakeEngine(sparse=True, selects=False), "nothing was selected"),
        (lambda: _with("off_nats", FakeEngine(sparse=True), 1.0), "differs from the dense engine's by 1.00 nats"),
        (lambda: _with("repeats_differ", FakeEngine(sparse=True)), "another text the second time"),
    ],
)
def test_no_time_for_what_is_not_sparse_or_not_right(sweep: Callable[..., Any], make: Any, reason: str) -> None:
    host = FakeHost({"cpu-attn": [FakeEngine()], "locks": [make()]})
    records, _ = sweep([engine_case()], BOTH, host)
    dense, sparse = records
    assert dense.outcome is Outcome.OK
    assert sparse.outcome is Outcome.INCORRECT and reason in sparse.reason and sparse.rounds_ns is None


def test_a_dense_engine_with_the_plugin_inside_is_no_rival(sweep: Callable[..., Any]) -> None:
    (record,), _ = sweep([engine_case()], ("cpu-attn",), FakeHost({"cpu-attn": [FakeEngine(sparse=True)]}))
    assert record.outcome is Outcome.INCORRECT and "its own attention" in record.reason


def test_what_does_not_fit_is_a_row_and_max_fills_the_cache(sweep: Callable[..., Any]) -> None:
    found = [engine_case(2048, 1), engine_case(2048, 5), engine_case(2048, 1, kv="max")]
    records, _ = sweep(found, ("cpu-attn",), FakeHost({"cpu-attn": [FakeEngine(blocks=300)]}))
    one, five, most = records
    assert (one.outcome, five.outcome) == (Outcome.OK, Outcome.OOM) and "at most" in five.reason
    assert most.outcome is Outcome.OK and 2 <= most.case["batch"] <= 4 and most.kv["plan"] == "max"
    assert rows(records)[2]["tokens_per_s"] == pytest.approx(1e9 / STEP_NS)


def test_an_engine_that_dies_takes_one_row_with_it(sweep: Callable[..., Any]) -> None:
    found = [engine_case(1024, 1), engine_case(1024, 2), engine_case(2048, 1)]
    host = FakeHost({"cpu-attn": [_with("dies_at", FakeEngine(), 2), FakeEngine()]})
    records, _ = sweep(found, ("cpu-attn",), host)
    assert list(outcomes(records).values()) == ["OK", "CRASHED", "OK"] and len(host.jobs) == 2
    assert "illegal memory access" in records[1].reason and "-cpu-attn.log" in records[1].reason
    assert len(list(host.logs.glob("*.log"))) == 1


@pytest.mark.parametrize(
    ("error", "outcome"),
    [
        (RuntimeError("CUDA out of memory. Tried to allocate 2 GiB"), "OOM"),
        (ValueError("No available memory for the cache blocks"), "OOM"),
        (RuntimeError("CUDA error: operation not supported"), "CRASHED"),
        (ValueError("Selected backend FLASHINFER is not valid for this configuration. Reason: [...]"), "SKIPPED"),
        (ModuleNotFoundError("No module named 'vllm'"), "SKIPPED"),
        (RuntimeError("something else"), "CRASHED"),
    ],
)
def test_an_engine_that_does_not_start_is_a_typed_row(sweep: Callable[..., Any], error: Exception, outcome: str) -> None:
    records, _ = sweep([engine_case(), engine_case(1024)], ("cpu-attn",), FakeHost({"cpu-attn": [error]}))
    assert [str(record.outcome) for record in records] == [outcome] * 2
    assert str(error) in records[0].reason and records[0].rounds_ns is None


def test_another_flash_attention_than_the_name_says_is_no_row_of_it(sweep: Callable[..., Any]) -> None:
    found = [engine_case(device="cuda", page_size=16)]
    engine = _with("flash_attention", FakeEngine(), 2)
    (record,), _ = sweep(found, ("fa3",), FakeHost({"fa3": [engine]}))
    assert record.outcome is Outcome.SKIPPED and "FlashAttention 3 is not supported here" in record.reason
    host = FakeHost({"fa3": [_with("flash_attention", FakeEngine(), 3)]})
    (record,), _ = sweep([engine_case(device="cuda", page_size=16, ctx=4096)], ("fa3",), host)
    assert record.outcome is Outcome.OK and record.resolved["kernels"] == "Attention v3, graphs NONE"
    assert host.jobs[0].arguments["attention_config"] == {"backend": "FLASH_ATTN", "flash_attn_version": 3}


def test_a_store_without_room_for_logs_is_bad_input(sweep: Callable[..., Any], tmp_path: Path) -> None:
    (tmp_path / "logs").touch()
    with pytest.raises(UserError, match="logs cannot be a folder"):
        sweep([engine_case()], ("cpu-attn",), FakeHost({}))


def test_rounds_at_low_clocks_are_set_aside_or_too_many(sweep: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    clocks = iter([1980.0, 300.0] + [1980.0] * 3)  # the first one is of the probe
    nvml = FakeNvml(sm_mhz=lambda: next(clocks, 300.0), event_bits=0x20)
    monkeypatch.setitem(sys.modules, "pynvml", nvml)
    host = FakeHost({"cpu-attn": [FakeEngine()]})
    host.open_meter = lambda uuid: open_meter(UUIDS[1])
    one, two = sweep([engine_case(), engine_case(batch=2)], BOTH[:1], host)[0]
    assert one.meters["sm_mhz"] == [300.0, 1980.0, 1980.0, 1980.0, 300.0] and one.meters["source"] == "nvml"
    assert one.meters["slow_share"] == 0.4 and len(one.rounds_ns) == 5, "too many to leave out"
    assert two.meters["slow_share"] == 1.0
    assert open_meter("GPU-of nobody")() == open_meter(None)() == {}


def test_silence_is_a_timeout(sweep: Callable[..., Any]) -> None:
    host = FakeHost({})
    host.silent = True
    (record,), _ = sweep([engine_case()], ("cpu-attn",), host)
    assert record.outcome is Outcome.TIMEOUT


def test_the_time_budget_leaves_cells_out_and_stores_nothing_for_them(
    sweep: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = FakeEngine()
    monkeypatch.setattr("time.time", lambda: 1e9 + engine.now_ns * 1e-9)
    found = [engine_case(1024), engine_case(2048)]
    records, events = sweep(found, ("cpu-attn",), FakeHost({"cpu-attn": [engine]}), time_budget_s=0.01)
    assert outcomes(records) == {("cpu-attn", 1024, 1): "OK"}
    assert [event.case.ctx for event in events if isinstance(event, LeftOut)] == [2048]
    assert len((tmp_path / "records.jsonl").read_text().splitlines()) == 1


def test_other_levels_refuse_an_engine_case(sweep: Callable[..., Any]) -> None:
    records, _ = sweep([engine_case()], ("cpu-attn",), FakeHost({"cpu-attn": [FakeEngine()]}))
    with pytest.raises(UserError, match="level engine"):
        case_of(records[0].case)


def _with(fault: str, engine: FakeEngine, value: Any = True) -> FakeEngine:
    setattr(engine, fault, value)
    return engine
