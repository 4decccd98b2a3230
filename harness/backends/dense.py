"""What full attention backends share."""

from __future__ import annotations

from typing import TYPE_CHECKING

from harness.backend import Backend, UnsupportedWorkload
from harness.memory import local_shape
from locks_kernels.cost import dense_bytes

if TYPE_CHECKING:
    import torch

    from harness.case import Case
    from harness.workload import Workload


class DenseBackend(Backend):
    dense = True

    def bytes(self, case: Case) -> dict[str, int]:
        return dense_bytes(local_shape(case), case.ctx, case.batch)


class CudaDenseBackend(DenseBackend):
    def supports(self, case: Case) -> str | None:
        return None if case.device == "cuda" else "runs on NVIDIA GPUs only; use --device cuda"


def contiguous(workload: Workload, copy: int) -> tuple[torch.Tensor, torch.Tensor]:
    """[B, N, H, D] views of the copy's keys and values, or UnsupportedWorkload."""
    views = workload.contiguous(copy)
    if views is None:
        raise UnsupportedWorkload("needs each sequence in one piece, and the pooled plan shares pages between sequences")
    return views
