"""torch's own scaled_dot_product_attention on a contiguous cache: the dense rival that needs nothing but torch."""

from __future__ import annotations

import torch

from harness.backend import Launch
from harness.backends.dense import DenseBackend, contiguous
from harness.workload import Workload


class Sdpa(DenseBackend):
    name = "sdpa"

    def version(self) -> str:
        return torch.__version__

    def prepare(self, workload: Workload, copy: int) -> Launch:
        keys, values = (part.transpose(1, 2) for part in contiguous(workload, copy))  # [B, H, N, D]
        query = workload.queries[copy][:, :, None]  # [B, HQ, 1, D]
        scale = workload.shape.softmax_scale

        def launch() -> torch.Tensor:
            out = torch.nn.functional.scaled_dot_product_attention(query, keys, values, scale=scale, enable_gqa=True)
            return out[:, :, 0]

        return launch
