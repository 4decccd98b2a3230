"""Level engine with an engine that is none: what is timed, refused and stored, and what goes on after a failure."""

from __future__ import annotations

import io
import json
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from engine_fakes import CHUNK_NS, STEP_NS, FakeEngine, FakeHost, engine_case
from rich.console import Console

from bench.request import Request, cases
from harness.engine import BACKENDS, EngineBackend, EngineCase, parse_engine_args, plugin_options, resolve
from harness.engine_gate import prompt_lengths
from harness.engine_host import EngineProcess, TimedOut
from harness.engine_model import read_folder, write_folder
from harness.engine_run import EngineOptions, run_engines
from harness.engine_texts import TOLERANCE, Text, compare
from harness.engine_window import Ladder, Uneven, Window, prompt
from harness.engine_worker import Broken, EngineJob, root_cause
from harness.errors import UserError
from harness.presets import find_model, models
from harness.record import Outcome, Record
from harness.rerun import case_of
from harness.run import Event, LeftOut, RecordDone, RunOptions
from harness.store import Store
from locks_kernels.shapes import SelectOptions, ShapeError
from locks_kernels.vllm_plugin.settings import Settings
from reports.page import render
from reports.panels import panels
from reports.payload import page_data
from reports.rows import rows
from reports.table import latency_report

WINDOW = Window(warm=2, rounds=3, round_tokens=4)
BOTH = ("cpu-attn", "locks")
ROOT = Path(__file__).resolve().parents[1]


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


def ladder(engine: FakeEngine, ctx: int = 2048, slack: int = 100) -> Ladder:
    return Ladder(engine, ctx, WINDOW, slack, lambda number, length: [7] * length, engine.clock_ns)


def outcomes(records: list[Record]) -> dict[tuple[str, int, int], str]:
    return {(record.backend, record.case["ctx"], record.case["batch"]): str(record.outcome) for record in records}


def test_the_slope_is_the_time_of_a_decode_step_and_nothing_else() -> None:
    engine = FakeEngine()
    climbing = ladder(engine)
    one, four = climbing.measure(1), climbing.measure(4)
    assert one.rounds_ns == [[STEP_NS]] * WINDOW.rounds
    assert four.rounds_ns == [[4 * STEP_NS]] * WINDOW.rounds
    assert one.ttft_ns == four.ttft_ns == 2 * CHUNK_NS  # 2033 tokens in chunks of 1024, alone
    assert (one.last_context, four.last_context) == (2048, 2048)
    assert one.longest_context == 2048 < four.longest_context <= 2048 + 100
    assert engine.prefilled == [f"2048-{number}" for number in range(4)]  # each once
    climbing.close()
    assert not engine.running and len(engine.cancelled) == 4


def test_a_batch_alone_outlives_the_prompts_of_its_newest_sequence(sweep: Callable[..., Any]) -> None:
    found = [engine_case(2048, 4), engine_case(1024, 1, kv="max")]
    for case in found:
        (record,), _ = sweep([case], ("cpu-attn",), FakeHost({"cpu-attn": [FakeEngine()]}))
        assert record.outcome is Outcome.OK, record.reason
        assert record.case["batch"] > 1 and record.resolved["longest_context"] > case.ctx
        assert record.ttft_ns == [-(-case.ctx // 1024) * CHUNK_NS]  # of a prompt alone, not of all that were handed over


def test_texts_of_one_model_are_no_reference_for_another(sweep: Callable[..., Any]) -> None:
    found = [engine_case(), engine_case(seed=1)]
    other = _with("wrong", FakeEngine())  # its texts differ from those of the first
    records, _ = sweep(found, ("cpu-attn",), FakeHost({"cpu-attn": [FakeEngine(), other]}))
    assert [record.outcome for record in records] == [Outcome.OK] * 2


def test_a_step_that_leaves_a_sequence_out_gives_no_time() -> None:
    engine = FakeEngine()
    engine.preempts = True
    with pytest.raises(Uneven, match="2 of 3 sequences"):
        ladder(engine).measure(3)


def test_prompts_stay_within_what_the_model_is_made_for() -> None:
    engine = FakeEngine()
    engine.max_tokens = 2048
    timed = ladder(engine).measure(1)
    assert timed.last_context == 1948  # slack for the batches that follow


def test_prompts_are_the_same_for_everybody_and_differ_by_sequence() -> None:
    assert prompt(0, 8, 1, 50, 1000) == prompt(0, 8, 1, 50, 1000) != prompt(0, 8, 2, 50, 1000)
    assert prompt(0, 8, 1, 50, 1000) != prompt(1, 8, 1, 50, 1000)
    assert set(prompt(0, 8, 1, 500, 4)) == {2, 3}


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


def test_a_sparse_backend_alone_is_checked_against_an_engine_started_for_that(sweep: Callable[..., Any]) -> None:
    host = FakeHost({"cpu-attn": [FakeEngine()], "locks": [FakeEngine(sparse=True)]})
    records, _ = sweep([engine_case()], ("locks",), host)
    assert [(job.backend, len(job.cells)) for job in host.jobs] == [("cpu-attn", 0), ("locks", 1)]
    assert outcomes(records) == {("locks", 2048, 1): "OK"}
    host = FakeHost({"cpu-attn": [ImportError("libcudart.so.13: cannot open")]})
    (record,), _ = sweep([engine_case(batch=2)], ("locks",), host)
    assert record.outcome == "SKIPPED" and "no dense engine" in record.reason and "libcudart" in record.reason


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (lambda: FakeEngine(sparse=False), "fell back"),
        (lambda: FakeEngine(sparse=True, selects=False), "nothing was selected"),
        (lambda: _with("wrong", FakeEngine(sparse=True)), "differs from the dense engine's by 1.00 nats"),
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


def test_texts_may_part_at_a_near_tie_only() -> None:
    reference = Text(4, [1, 2, 3], [[(1, -1.0), (9, -3.0)], [(2, -1.0), (8, -1.1)], [(3, -0.5), (7, -4.0)]])
    same = replace(reference, likely=[[(1, -1.05), (9, -3.0)], *reference.likely[1:]])
    assert compare(same, reference).nats == pytest.approx(0.05) and compare(same, reference).positions == 3
    tie = Text(4, [1, 8, 5], [reference.likely[0], [(8, -1.0), (2, -1.05)], [(5, -0.1), (6, -9.0)]])
    assert compare(tie, reference).within(TOLERANCE) and compare(tie, reference).positions == 2
    wrong = replace(tie, tokens=[1, 4, 5], likely=[reference.likely[0], [(4, -0.1), (2, -3.0)], tie.likely[2]])
    assert compare(wrong, reference).nats is None and not compare(wrong, reference).within(9.0)
    off = replace(reference, likely=[[(1, -1.0 - 2 * TOLERANCE), (9, -3.0)], *reference.likely[1:]])
    assert not compare(off, reference).within(TOLERANCE)
    assert compare(reference, reference).nats == 0


def test_prompts_of_the_gate_lie_on_both_sides_of_the_budget() -> None:
    *short, long = prompt_lengths(2048, 131_072)
    assert set(short) == {512} and long == 8192
    assert max(prompt_lengths(128, 2048)[:-1]) + 16 <= 128
    assert len(set(prompt_lengths(2048, 2048))) == 1  # nothing to leave out


@pytest.mark.parametrize("name", [name for name, model in models().items() if "engine" not in dict(model.unsupported)])
def test_presets_as_folders(name: str, tmp_path: Path) -> None:
    model = find_model(name)
    write_folder(model, tmp_path / name, 4096, "bfloat16")
    read, label, longest = read_folder(tmp_path / name)
    assert replace(read, unsupported=model.unsupported) == model and longest == 4096 and label.startswith(f"{name} ")


def test_folders_that_are_none(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="not a model folder"):
        read_folder(tmp_path)
    (tmp_path / "config.json").write_text('{"num_experts": 8}')
    with pytest.raises(UserError, match="mixture of experts"):
        read_folder(tmp_path)
    for text in ("[]", "{", '{"num_hidden_layers": 1, "num_attention_heads": 0, "hidden_size": 64}'):
        (tmp_path / "config.json").write_text(text)
        with pytest.raises(UserError, match="not one of a dense decoder"):
            read_folder(tmp_path)


def test_a_model_folder_is_not_measured_beyond_what_it_is_made_for(tmp_path: Path) -> None:
    write_folder(find_model("smollm2-135m"), tmp_path, 8192, "bfloat16")
    asked = Request(None, "1", None, "engine", None, "auto", "share", 8, 16, "bfloat16", 0, str(tmp_path))
    assert [case.ctx for case in cases(asked, "cpu")] == [2048]
    with pytest.raises(UserError, match="131072 is above the 8192 tokens"):
        cases(asked, "cuda")  # whose contexts are longer where none is asked for


def test_the_last_error_of_the_log_is_the_cause(tmp_path: Path) -> None:
    log = tmp_path / "log"
    log.write_text(
        "(EngineCore pid=7) ERROR ValueError: LOCKS does not support ALiBi; serve with ...\n"
        "RuntimeError: Engine core initialization failed. See root cause above.\n"
    )
    error = RuntimeError("Engine core initialization failed. See root cause above.")
    assert root_cause(error, log) == "ValueError: LOCKS does not support ALiBi; serve with ..."
    assert root_cause(ValueError("another"), log) == "ValueError: another"
    assert root_cause(error, None).startswith("RuntimeError: Engine core")


def fake_vllm(folder: Path, text: str) -> str:
    (folder / "vllm").mkdir()
    (folder / "vllm" / "__init__.py").write_text(text)
    return str(folder)


def job(folder: Path) -> EngineJob:
    case = engine_case()
    return EngineJob(
        *("cpu-attn", False, case.model, None, None, "bfloat16", 0, 512, [(2048, 1)], [(2048, 1)], WINDOW),
        *({"model": str(folder / "model")}, {}),
    )


def test_a_process_whose_vllm_is_broken_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(fake_vllm(tmp_path, "print('printed')\nraise ImportError('this is no vllm')"))
    (event,) = EngineProcess(120).events(job(tmp_path), tmp_path / "log")
    assert event == Broken("while the engine started", "ImportError: this is no vllm")
    assert "printed" in (tmp_path / "log").read_text()


def test_a_process_that_dies_or_hangs_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(fake_vllm(tmp_path, "import os, time\ntime.sleep(600) if os.environ['HANG'] else os._exit(7)"))
    monkeypatch.setenv("HANG", "")
    (event,) = EngineProcess(120).events(job(tmp_path), tmp_path / "log")
    assert event == Broken("unexpectedly", "its process ended with exit code 7")
    monkeypatch.setenv("HANG", "1")
    with pytest.raises(TimedOut, match="within 3 s"):
        list(EngineProcess(3).events(job(tmp_path), tmp_path / "log"))


@pytest.mark.skipif(not Path("/proc").exists(), reason="looks for a process in /proc")
def test_a_sweep_that_was_killed_leaves_no_engine_behind(tmp_path: Path) -> None:
    helper, script = tmp_path / "helper", tmp_path / "sweep.py"
    started = (
        "import subprocess, time\n"
        f"open({str(helper)!r}, 'w').write(str(subprocess.Popen(['sleep', '300']).pid))\n"
        "time.sleep(300)"
    )
    script.write_text(
        f"import sys; sys.path[:0] = {[fake_vllm(tmp_path, started), str(ROOT), str(ROOT / 'tests')]}\n"
        "from pathlib import Path\n"
        "from harness.engine_host import EngineProcess\n"
        "from test_engine_level import job\n"
        f"folder = Path({str(tmp_path)!r})\n"
        "if __name__ == '__main__': list(EngineProcess(300).events(job(folder), folder / 'log'))\n"
    )
    sweep = subprocess.Popen([sys.executable, str(script)])
    wait_until(lambda: helper.exists() and helper.read_text() != "")
    sweep.kill()
    sweep.wait()
    wait_until(lambda: not running(int(helper.read_text())))


def wait_until(true: Callable[[], bool]) -> None:
    end = time.monotonic() + 60
    while not true():
        assert time.monotonic() < end
        time.sleep(0.1)


def running(process: int) -> bool:
    status = Path(f"/proc/{process}/stat")
    return status.exists() and status.read_text().rpartition(")")[2].split()[0] != "Z"


def test_what_a_user_types() -> None:
    asked = Request("4K,8K", "2,max", None, "engine", None, "auto", "share", 8, 16, "bfloat16", 0)
    found = cases(asked, "cpu")
    assert [(case.ctx, case.batch, case.kv) for case in found] == [
        (n, *b) for n in (4096, 8192) for b in ((2, "auto"), (1, "max"))
    ]
    assert {(case.model.name, case.page_size) for case in found} == {("smollm2-135m", 32)}
    assert {case.model.name for case in cases(asked, "cuda")} == {"llama-3.1-8b"}
    for change, message in (
        ({"kv": "pooled"}, "--kv is not for"),
        ({"engine_args": '{"model": "x"}'}, "decided by"),
        ({"engine_args": "[1]"}, "not a JSON object"),
        ({"level": "token"}, "--batch max is for"),
        ({"level": "token", "batch": "1", "model_path": "x"}, "are for --level engine"),
        ({"model": "llama-3.1-8b", "model_path": "x"}, "both given"),
        ({"engine_args": '{"kv_cache_dtype": "fp8"}'}, "not measured at this level"),
        ({"batch": ""}, "--batch '' is not a size"),
        ({"batch": "max,"}, "--batch '' is not a size"),
        ({"page_size": 5}, "page_size 5"),
    ):
        with pytest.raises((UserError, ShapeError), match=message):
            cases(replace(asked, **change), "cpu")
    assert parse_engine_args('{"b": 1, "a": 2}') == '{"a": 2, "b": 1}'


def test_names_of_this_level() -> None:
    assert resolve("default", "cuda") == ["fa3", "flashinfer", "locks"] and resolve("default", "cpu") == ["cpu-attn", "locks"]
    assert resolve("all", "cpu") == ["cpu-attn", "locks"]
    with pytest.raises(UserError, match="did you mean 'flashinfer'"):
        resolve("flash-infer", "cuda")
    assert [name for name, backend in BACKENDS.items() if not backend.dense] == ["locks"]


def test_the_plugin_understands_its_options() -> None:
    options = SelectOptions(1024, sink_pages=2, recent_pages=3, combine="peak")
    read = Settings.parse(plugin_options(options, 4))
    assert (read.budget, read.rank, read.sink_pages, read.recent_pages, read.combine) == (1024, 4, 2, 3, "peak")


def test_other_levels_refuse_an_engine_case(sweep: Callable[..., Any]) -> None:
    records, _ = sweep([engine_case()], ("cpu-attn",), FakeHost({"cpu-attn": [FakeEngine()]}))
    with pytest.raises(UserError, match="level engine"):
        case_of(records[0].case)


def _with(fault: str, engine: FakeEngine, value: Any = True) -> FakeEngine:
    setattr(engine, fault, value)
    return engine
