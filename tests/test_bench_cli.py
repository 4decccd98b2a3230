"""The command line around a sweep that does not measure: what it asks for, prints, and refuses."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from fake_records import failed, measured

import harness.run
from bench import arguments
from bench.cli import main
from bench.progress import TimeLeft
from harness.case import Case
from harness.errors import UserError
from harness.record import Outcome, Record
from harness.run import BackendStarted, CaseStarted, LeftOut, RecordDone, RunOptions
from harness.store import FILE, Store

CPU = {"gpu": None, "cpu": {"name": "some CPU"}}


class FakeSweep:
    """Stands for run_sweep: keeps what it was asked, stores one record per case and backend."""

    def __init__(self) -> None:
        self.cases: Sequence[Case] = []
        self.backends: Sequence[str] = []
        self.options: RunOptions | None = None
        self.fail: str | None = None
        self.left_out = 0

    def __call__(
        self, cases: Sequence[Case], backends: Sequence[str], store: Store, options: RunOptions, on_event: Callable[[Any], None]
    ) -> list[Record]:
        self.cases, self.backends, self.options = cases, backends, options
        records = []
        for index, one in enumerate(cases[: len(cases) - self.left_out], start=1):
            on_event(CaseStarted(one, index, len(cases), "layers=2: two copies"))
            for backend in backends:
                on_event(BackendStarted(one, backend))
                if backend == self.fail:
                    record = failed(one, backend, Outcome.OOM, "too big [for this]", environment=CPU)
                else:
                    record = measured(one, backend, 100.0, environment=CPU)
                store.append(record)
                records.append(record)
                on_event(RecordDone(record, False))
        for one in cases[len(cases) - self.left_out :]:
            on_event(LeftOut(one))
        return records


@pytest.fixture
def sweep(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> FakeSweep:
    fake = FakeSweep()
    monkeypatch.setattr(harness.run, "run_sweep", fake)
    monkeypatch.chdir(tmp_path)
    return fake


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Callable[..., tuple[int, str, str]]:
    """Run the command line in this process -> exit code, stdout, stderr."""

    def call(*arguments: str) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["/somewhere/bin/locks-bench", *arguments])
        capsys.readouterr()
        with pytest.raises(SystemExit) as ended:
            main()
        out, err = capsys.readouterr()
        return ended.value.code or 0, out, err  # type: ignore[return-value]

    return call


def test_lists_become_cases(sweep: FakeSweep, run: Callable[..., tuple[int, str, str]]) -> None:
    code, _, _ = run(
        "latency", "--device", "cpu", "--ctx", "8K,1M", "--batch", "1,16", "--budget", "2K", "--time-budget", "10m"
    )
    assert code == 0
    assert [(one.ctx, one.batch) for one in sweep.cases] == [(8192, 1), (8192, 16), (1 << 20, 1), (1 << 20, 16)]
    assert {one.select.budget_tokens for one in sweep.cases} == {2048}
    assert list(sweep.backends) == ["sdpa", "locks"]
    assert sweep.options is not None and sweep.options.time_budget_s == 600
    assert sweep.options.command.startswith("locks-bench latency --device cpu --ctx 8K,1M")


def test_options_reach_the_case(sweep: FakeSweep, run: Callable[..., tuple[int, str, str]]) -> None:
    options = (
        "--ctx 4K --model qwen3-8b --level token --kv tp=2 --combine peak --rank 4 --page-size 32 --seed 7 --dtype float16"
    )
    assert run("latency", "--device", "cpu", *options.split(), "--backends", "locks-triton")[0] == 0
    one = sweep.cases[0]
    assert (one.model.name, one.level, one.kv, one.select.combine) == ("qwen3-8b", "token", "tp=2", "peak")
    assert (one.rank, one.page_size, one.seed, one.dtype, one.device) == (4, 32, 7, "float16", "cpu")
    assert list(sweep.backends) == ["locks-triton"]


def test_json_on_stdout_is_pure_and_the_cpu_is_named(sweep: FakeSweep, run: Callable[..., tuple[int, str, str]]) -> None:
    code, out, err = run("latency", "--device", "cpu", "--ctx", "2K", "--batch", "1", "--json", "-")
    table = json.loads(out)
    assert code == 0
    assert [(row["backend"], row["outcome"], row["performance_claim"]) for row in table] == [
        ("sdpa", "OK", False),
        ("locks", "OK", False),
    ]
    assert "no performance claim" in err


def test_table_says_that_a_cpu_claims_nothing(sweep: FakeSweep, run: Callable[..., tuple[int, str, str]]) -> None:
    _, out, err = run("latency", "--device", "cpu")
    assert "no performance claim" in out and "locks (triton)" in out
    assert "2 rows measured, 0 found in the store" in err


def test_show_gives_the_rows_of_latency_and_filters(sweep: FakeSweep, run: Callable[..., tuple[int, str, str]]) -> None:
    _, before, _ = run("latency", "--device", "cpu", "--ctx", "2K,4K", "--json", "-", "--store", "kept/machine")
    _, after, _ = run("show", "kept", "--json", "-")
    by_cell = lambda row: (row["ctx"], row["backend"])  # noqa: E731
    assert sorted(json.loads(after), key=by_cell) == sorted(json.loads(before), key=by_cell)
    _, one, _ = run("show", "kept", "--json", "-", "--ctx", "4K", "--backend", "locks", "--level", "attention", "--batch", "1")
    (row,) = json.loads(one)
    assert (row["ctx"], row["backend"], row["speedup_vs_best_dense"]) == (4096, "locks", 1.0)
    code, _, err = run("show", "kept", "--model", "qwen3-8b")
    assert code == 2 and err.startswith("error: none of the 4 rows")
    Path("empty.jsonl").touch()
    code, _, err = run("show", "empty.jsonl")
    assert code == 2 and err.startswith("error: these stores hold no records yet")


def test_json_file_holds_the_rows_beside_the_table(sweep: FakeSweep, run: Callable[..., tuple[int, str, str]]) -> None:
    _, out, _ = run("latency", "--device", "cpu", "--json", "rows.json")
    assert len(json.loads(Path("rows.json").read_text())) == 2
    assert "latency us" in out


def test_strict_fails_on_any_row_that_is_not_ok(sweep: FakeSweep, run: Callable[..., tuple[int, str, str]]) -> None:
    assert run("latency", "--device", "cpu", "--strict")[0] == 0
    sweep.fail = "locks"
    code, out, _ = run("latency", "--device", "cpu")
    assert code == 0 and "locks: OOM: too big [for this]" in out
    assert run("latency", "--device", "cpu", "--strict")[0] == 1


def test_what_the_time_budget_left_out_is_said(sweep: FakeSweep, run: Callable[..., tuple[int, str, str]]) -> None:
    sweep.left_out = 1
    code, _, err = run("latency", "--device", "cpu", "--ctx", "2K,4K", "--time-budget", "1s")
    assert code == 0 and "left out by --time-budget: llama-3.1-8b attention 4K x 1" in err
    assert run("latency", "--device", "cpu", "--ctx", "2K,4K", "--time-budget", "1s", "--strict")[0] == 1


@pytest.mark.parametrize(
    ("options", "advice"),
    [
        ("--model lama-3.1-8b", "did you mean 'llama-3.1-8b', or a shape such as 32x8x128?"),
        ("--seed -1", "seed -1 is out of range"),
        ("--seed 99999999999999999999", "is out of range"),
        ("--ctx=", "--ctx '' is not a size"),
        ("--budget=", "--budget '' is not a size"),
        ("--model 30x8x128", "use a multiple"),
        ("--model 32x8x100", "use one of 64, 128, 256"),
        ("--backends fa3,flashinfr", "did you mean 'flashinfer'?"),
        ("--level tokens", "did you mean 'token'?"),
        ("--ctx 8", "less than one page"),
        ("--ctx 1K --budget 2K", "use --budget 256"),
        ("--ctx 1K,8K --budget 2K", "use --budget 256"),
        ("--budget 16", "are needed"),
        ("--ctx 8X", "write for example"),
        ("--ctx 8K,,1M", "write for example"),
        ("--ctx -1", "write for example"),
        ("--batch 0", "write for example"),
        ("--kv tp=3", "do not divide"),
        ("--kv layers=0", "layers=k"),
        ("--combine mean", "share, peak"),
        ("--rank 3", "use one of 2, 4, 8"),
        ("--page-size 8", "use one of 16, 32, 64"),
        ("--dtype float8", "bfloat16"),
        ("--device tpu", "use auto, cuda or cpu"),
        ("--time-budget soon", "write for example"),
        ("--store file", "--store DIR"),
        ("--store /proc/store", "--store DIR"),
        ("--json absent/rows.json", "--json"),
    ],
)
def test_bad_input_is_one_line_and_exit_code_2(
    sweep: FakeSweep, run: Callable[..., tuple[int, str, str]], options: str, advice: str
) -> None:
    Path("file").write_text("mine")
    device = () if "--device" in options else ("--device", "cpu")
    code, out, err = run("latency", *device, *options.split())
    assert code == 2 and out == ""
    assert err.startswith("error: ") and err.count("\n") == 1
    assert advice in err
    assert not sweep.cases, "nothing was measured"
    assert Path("file").read_text() == "mine"


def test_no_gpu_when_one_was_asked_for(
    sweep: FakeSweep, run: Callable[..., tuple[int, str, str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    code, _, err = run("latency", "--device", "cuda")
    assert code == 2 and "doctor" in err and err.count("\n") == 1
    assert run("latency", "--device", "auto")[0] == 0
    assert {one.device for one in sweep.cases} == {"cpu"}


def test_a_damaged_store_is_refused_by_name_and_line(sweep: FakeSweep, run: Callable[..., tuple[int, str, str]]) -> None:
    run("latency", "--device", "cpu")
    file = Path("results") / FILE
    lines = file.read_text().splitlines()
    file.write_text("\n".join([lines[0], lines[1][:50], lines[1]]) + "\n")
    sweep.cases = []
    for command in (("latency", "--device", "cpu"), ("show", "results")):
        code, out, err = run(*command)
        assert code == 2 and out == "" and f"{FILE}, line 2" in err and err.count("\n") == 1
    assert not sweep.cases


def test_a_torn_last_line_is_said_and_the_rest_shown(sweep: FakeSweep, run: Callable[..., tuple[int, str, str]]) -> None:
    run("latency", "--device", "cpu")
    file = Path("results") / FILE
    file.write_bytes(file.read_bytes()[:-20])
    code, out, err = run("show", "results", "--json", "-")
    assert code == 0 and len(json.loads(out)) == 1
    assert "line 2 was cut off" in err


def test_store_that_is_not_there(run: Callable[..., tuple[int, str, str]], tmp_path: Path) -> None:
    code, out, err = run("show", str(tmp_path / "absent"))
    assert code == 2 and out == "" and err.startswith("error: no store at") and err.count("\n") == 1


def test_time_left_is_the_pace_of_what_was_measured() -> None:
    now = [0.0]
    left = TimeLeft(10, lambda: now[0])
    left.record_done(reused=True)
    assert left.text() == "time left not known yet"
    now[0] = 30.0
    for _ in range(3):
        left.record_done(reused=False)
    assert left.text() == "about 60 s left"
    now[0] = 50.0
    assert left.text() == "about 40 s left"
    now[0] = 500.0
    assert left.text() == "about 0 s left"


@pytest.mark.parametrize(("text", "value"), [("1", 1), ("8k", 8192), ("1M", 1 << 20), (" 2K ", 2048)])
def test_sizes(text: str, value: int) -> None:
    assert arguments.size(text, "--ctx") == value


@pytest.mark.parametrize("text", ["", "K", "1.5K", "8KB", "1e3", "+1", "8K 16K"])
def test_what_is_not_a_size(text: str) -> None:
    with pytest.raises(UserError, match="--ctx"):
        arguments.size(text, "--ctx")


@pytest.mark.parametrize(("text", "value"), [("90", 90), ("90s", 90), ("1.5m", 90), ("2H", 7200)])
def test_durations(text: str, value: float) -> None:
    assert arguments.seconds(text, "--time-budget") == value


def test_repeated_sizes_count_once() -> None:
    assert arguments.sizes("8K,8192,1M", "--ctx") == [8192, 1 << 20]


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs Linux")
def test_a_full_disk_is_one_line() -> None:
    root = Path(__file__).parents[1]
    with open("/dev/full", "w") as full:
        command = [sys.executable, "-m", "bench.cli", "show", str(root / "reports/published")]
        done = subprocess.run(command, cwd=root, stdout=full, stderr=subprocess.PIPE, text=True)
    assert done.returncode == 2
    assert done.stderr.splitlines()[-1].startswith("error: no space left") and "Traceback" not in done.stderr
