"""compute-sanitizer finds no access out of bounds and no race in shared memory in any CUDA kernel."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from test_cuda_compile import REGISTERS

TESTS = Path(__file__).parent
SANITIZER = shutil.which("compute-sanitizer", path=os.environ.get("PATH", "") + ":/usr/local/cuda/bin")

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    pytest.mark.skipif(SANITIZER is None, reason="needs compute-sanitizer of the CUDA toolkit"),
]


@pytest.mark.parametrize("tool", ("memcheck", "racecheck"))
def test_kernels_are_clean(tool: str) -> None:
    paths = os.pathsep.join(filter(None, (str(TESTS), str(TESTS.parent), os.environ.get("PYTHONPATH"))))
    own = f"kre=^({'|'.join(REGISTERS)}|gemv|qkv)$"
    options = ("--report-api-errors", "no") if tool == "memcheck" else ("--kernel-regex", own)
    run = subprocess.run(
        # cuda-python asks the driver for functions that it may not have, which would count as errors of memcheck; racecheck
        # takes minutes for torch's kernels.
        [str(SANITIZER), "--tool", tool, *options, "--error-exitcode", "9", sys.executable, str(TESTS / "sanitized_steps.py")],
        capture_output=True,
        text=True,
        timeout=280,
        env={**os.environ, "PYTHONPATH": paths, "PYTORCH_NO_CUDA_MEMORY_CACHING": "1"},  # so that bounds are those of tensors
    )
    assert run.returncode == 0, (run.stdout + run.stderr)[-4000:]
    assert "ERROR SUMMARY: 0 errors" in run.stdout or "RACECHECK SUMMARY: 0 hazards" in run.stdout, run.stdout[-2000:]
