"""An engine's process at level engine: what it says when it breaks, and that nothing of it stays behind."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from engine_fakes import engine_case

from harness.engine.host import EngineProcess, TimedOut
from harness.engine.window import Window
from harness.engine.worker import Broken, EngineJob, root_cause

ROOT = Path(__file__).resolve().parents[1]


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
        *(
            "cpu-attn",
            False,
            case.model,
            None,
            None,
            "bfloat16",
            0,
            512,
            [(2048, 1)],
            [(2048, 1)],
            Window(warm=2, rounds=3, round_tokens=4),
        ),
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
        "from harness.engine.host import EngineProcess\n"
        "from test_engine_process import job\n"
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
