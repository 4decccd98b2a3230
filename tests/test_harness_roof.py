"""The read roof: the reduction reads everything, and a CPU has a roof too."""

from __future__ import annotations

import pytest
import torch

from harness.roof import read_roof_tbps

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


@pytest.mark.parametrize("programs", [1, 3, 8])
def test_the_reduction_reads_every_block(programs: int) -> None:
    roof_kernel = pytest.importorskip("harness.roof_kernel")
    data = torch.arange(5 * 64, dtype=torch.int32, device=DEVICE)
    out = torch.full((programs,), -1, dtype=torch.int32, device=DEVICE)
    roof_kernel._reduce[(programs,)](data, out, 5, BLOCK=64, STAGES=2)
    assert int(out.sum()) == int(data.sum())


def test_a_cpu_has_a_roof() -> None:
    assert 1e-4 < read_roof_tbps("cpu") < 10
