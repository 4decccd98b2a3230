"""On a GPU: nights of one build pass, and a backend slowed down by 5 % is found and named."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from plug_in import ROOT, environment

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

SOURCE = """
import os

import torch

from harness.backends.flashinfer import FlashInfer


def nanoseconds(launch, count):
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    launch()
    start.record()
    for _ in range(count):
        launch()
    end.record()
    end.synchronize()
    return start.elapsed_time(end) * 1e6 / count


class Slowed(FlashInfer):
    name = "slowed"

    def prepare(self, workload, copy):
        launch, share = super().prepare(workload, copy), float(os.environ.get("SLOWED", "0"))
        if not share:
            return launch
        cycles = int(share * nanoseconds(launch, 20) / nanoseconds(lambda: torch.cuda._sleep(1_000_000), 3) * 1_000_000)

        def slow():
            torch.cuda._sleep(cycles)
            return launch()

        return slow
"""
SUITE = """
title = "one cell"
device = "cuda"
[[grid]]
ctx = "128K"
batch = 4
backends = ["slowed", "flashinfer", "flashinfer#2"]
"""


def test_a_slow_down_of_5_percent_is_found_and_named(tmp_path: Path) -> None:
    names = {"slowed": "plug_in_of_a_test:Slowed", "flashinfer": "harness.backends.flashinfer:FlashInfer"}
    settings = environment(tmp_path / "plug-in", SOURCE, names)
    (tmp_path / "suite.toml").write_text(SUITE)

    def night(number: int, *more: str, slowed: str = "0") -> tuple[int, str]:
        folder = tmp_path / f"night-{number}"
        command = [sys.executable, "-m", "ci.nightly", "--suite", str(tmp_path / "suite.toml"), "--out", str(folder)]
        command += ["--baselines", str(tmp_path / "baselines"), "--profile", *more]
        result = subprocess.run(command, cwd=ROOT, env=settings | {"SLOWED": slowed}, capture_output=True, text=True)
        return result.returncode, result.stdout + result.stderr

    for number, more in enumerate((("--accept",), ())):
        code, text = night(number, *more)
        assert code == 0, text
    code, text = night(9, slowed="0.05")
    print(text)
    assert code == 1, text
    (line,) = (line for line in text.splitlines() if "SLOWER" in line and "128K x 4" in line)
    assert "slowed" in line and "fresh processes" in line
    assert sorted(folder.name for folder in (tmp_path / "night-9-reruns").glob("*/*")) == ["1", "2", "3"]
