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


# Two warps of one block, each with what the other writes.
RACY = """
extern "C" __global__ void NAME(int* out) {
    __shared__ int values[64];
    values[threadIdx.x] = threadIdx.x;
    out[threadIdx.x] = values[63 - threadIdx.x];
}
"""
OWN = (*REGISTERS, "gemv", "qkv")


def checked(tool: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    paths = os.pathsep.join(filter(None, (str(TESTS), str(TESTS.parent), os.environ.get("PYTHONPATH"))))
    # cuda-python asks the driver for functions that it may not have, which would count as errors of memcheck; racecheck takes
    # minutes for torch's kernels.
    own = [option for name in OWN for option in ("--kernel-name", f"kne={name}")]
    options = ("--report-api-errors", "no") if tool == "memcheck" else own
    script = [sys.executable, str(TESTS / "sanitized_steps.py"), *arguments]
    return subprocess.run(
        [str(SANITIZER), "--tool", tool, *options, "--error-exitcode", "9", *script],
        capture_output=True,
        text=True,
        timeout=280,
        env={**os.environ, "PYTHONPATH": paths, "PYTORCH_NO_CUDA_MEMORY_CACHING": "1"},  # so that bounds are those of tensors
    )


@pytest.mark.parametrize("tool", ("memcheck", "racecheck"))
def test_kernels_are_clean(tool: str) -> None:
    run = checked(tool)
    assert run.returncode == 0, (run.stdout + run.stderr)[-4000:]
    assert "ERROR SUMMARY: 0 errors" in run.stdout or "RACECHECK SUMMARY: 0 hazards" in run.stdout, run.stdout[-2000:]


@pytest.mark.parametrize("name", (OWN[0], OWN[-1]))
def test_a_race_in_one_of_the_kernels_is_found(name: str, tmp_path: Path) -> None:
    """Racecheck looks at each of the names that it is given."""
    (tmp_path / "racy.cu").write_text(RACY)
    run = checked("racecheck", str(tmp_path), name)
    assert run.returncode == 9 and "hazard" in run.stdout, (run.stdout + run.stderr)[-4000:]
