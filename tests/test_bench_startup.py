"""What a person meets first: --help and list at once, doctor on any machine."""

from __future__ import annotations

import json
import resource
import subprocess
import sys

import pytest

# Prints what main() prints, then one line: modules of torch that it imported.
PROGRAM = """
import sys
from bench.cli import main
try:
    main()
except SystemExit as ended:
    assert not ended.code, ended.code
print([name for name in sys.modules if name.split(".")[0] == "torch"][:3])
"""
SECONDS = 0.5


def start(*arguments: str) -> tuple[str, float]:
    """Output of the command line in a fresh interpreter, and the processor seconds it took (a busy machine adds none)."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    command = [sys.executable, "-c", PROGRAM, *arguments]
    result = subprocess.run(command, capture_output=True, text=True, check=True)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return result.stdout, after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


@pytest.mark.parametrize(
    "arguments", [("--help",), ("latency", "--help"), ("list",), ("list", "--json", "-"), ("show", "--help")]
)
def test_answers_at_once_without_torch(arguments: tuple[str, ...]) -> None:
    outputs, times = zip(*(start(*arguments) for _ in range(3)), strict=True)
    assert outputs[0].splitlines()[-1] == "[]"
    assert min(times) < SECONDS


def test_help_tells_defaults_that_depend_on_the_device() -> None:
    text = " ".join(start("latency", "--help")[0].split())
    for default in ("8K,32K,128K; cpu: 2K", "fa3,flashinfer,locks; cpu: sdpa,locks", "2048; cpu: 512"):
        assert f"[default: {default}]" in text


def test_list_names_backends_and_presets() -> None:
    text, _ = start("list", "--json", "-")
    found = json.loads(text.rpartition("\n[")[0])
    backends = {row["name"]: row for row in found["backends"]}
    assert backends["locks"]["available"] and backends["sdpa"]["available"]
    for row in backends.values():
        assert row["available"] or "pip install" in row["missing"] or row["missing"].startswith("not timed: ")
    models = {row["name"]: row for row in found["models"]}
    llama = models["llama-3.1-8b"]
    assert [llama[name] for name in ("layers", "query_heads", "kv_heads", "group", "head_dim")] == [32, 32, 8, 4, 128]
    assert models["qwen3-30b-a3b"]["levels"] == ["attention"]
    assert len(models) == 8


def test_doctor_says_what_this_machine_is_worth() -> None:
    command = [sys.executable, "-m", "bench.cli", "doctor"]
    result = subprocess.run(command, capture_output=True, text=True, check=True)
    for what in (
        "python",
        "cpu",
        "torch",
        "gpu",
        "driver",
        "triton",
        "cuda compiler",
        "counters",
        "meters",
        "disk",
        "backend locks",
    ):
        assert what in result.stdout
    assert result.stdout.splitlines()[-1].startswith(("No GPU: rows run on the CPU", "Rows of this machine are performance"))
