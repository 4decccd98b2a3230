"""`locks-bench latency --level engine` as a user types it, on vLLM's CPU build: `./locks test-vllm`."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("vllm", reason="vLLM is not installed: ./locks test-vllm")
if torch.cuda.is_available():
    pytest.skip("for vLLM's CPU build", allow_module_level=True)

pytestmark = pytest.mark.timeout(1200)
CTX = 512


@pytest.fixture(scope="module")
def rows(tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[str, int], dict[str, Any]]:
    """By backend and batch.  Prompts and budget are short, as plain torch attends here."""
    folder = tmp_path_factory.mktemp("engine")
    options = ["--ctx", str(CTX), "--budget", "128", "--batch", "1,3", "--store", str(folder), "--json", str(folder / "rows")]
    command = [sys.executable, "-m", "bench.cli", "latency", "--level", "engine", *options]
    done = subprocess.run(command, env=os.environ | {"PYTHONPATH": os.getcwd()}, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    found = json.loads((folder / "rows").read_text())
    logs = {log.name: log.read_text()[-3000:] for log in Path(folder, "engine-logs").glob("*")}
    assert [row["outcome"] for row in found] == ["OK"] * 4, ([row["reason"] for row in found], logs)
    return {(row["backend"], row["batch"]): row for row in found}


def test_each_row_ran_what_it_names(rows: dict[tuple[str, int], dict[str, Any]]) -> None:
    for batch in (1, 3):
        dense, sparse = rows["cpu-attn", batch]["resolved"], rows["locks", batch]["resolved"]
        assert dense["impl"].startswith("vllm.") and dense["layers_served_by_plugin"] == 0
        assert sparse["impl"].startswith("locks_kernels.vllm_plugin.") and sparse["layers_served_by_plugin"] == 30
        assert dense["last_context"] == sparse["last_context"] == CTX
        assert dense["max_tokens"] == sparse["max_tokens"]


def test_the_gate_saw_the_same_text_within_the_budget_and_another_beyond(rows: dict[tuple[str, int], dict[str, Any]]) -> None:
    gate = rows["locks", 1]["gate"]
    assert gate["error_nats"] <= gate["tolerance_nats"] and gate["checks"]["selection changes a long text"]


def test_summaries_cost_what_their_pages_are_padded_by(rows: dict[tuple[str, int], dict[str, Any]]) -> None:
    dense, sparse = rows["cpu-attn", 1], rows["locks", 1]
    stock = 30 * 2 * 3 * 64 * 2  # layers, keys and values, heads, head_dim, bytes
    assert dense["kv_bytes_per_token"] == dense["kv"]["stock_bytes_per_token"] == stock
    assert 1.05 < sparse["kv_bytes_per_token"] / stock < 1.10
    assert sparse["kv_capacity_tokens"] < dense["kv_capacity_tokens"]


def test_times_are_plausible(rows: dict[tuple[str, int], dict[str, Any]]) -> None:
    for row in rows.values():
        assert 1e3 < row["latency_us"] < row["ttft_us"]
        assert row["tokens_per_s"] == pytest.approx(row["batch"] * 1e6 / row["latency_us"])
