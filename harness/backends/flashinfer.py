"""FlashInfer's paged decode (HND pages, tensor cores on): the strongest paged dense rival."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from harness.backend import Launch, UnsupportedWorkload
from harness.backends.dense import CudaDenseBackend
from harness.libraries import FLASHINFER
from harness.memory import HEAD_STRIDE_LIMIT
from harness.workload import Workload
from locks_kernels.shapes import DecodeShape

CTAS_PER_SM = 2  # what FlashInfer's planner fills
QUERY_TILE = 16  # rows of a decode tile; one query of up to 16 grouped heads


def workspace_bytes(shape: DecodeShape, batch: int, sm_count: int) -> int:
    """Partial outputs and log-sum-exps of every split, fp32, for the most splits that the planner may choose."""
    tiles = max(CTAS_PER_SM * sm_count // shape.kv_heads, 2 * batch)
    return 4 * shape.query_heads * tiles * QUERY_TILE * (shape.head_dim + 1) + (1 << 20)


class FlashInfer(CudaDenseBackend):
    """BatchDecodeWithPagedKVCacheWrapper; one plan serves all copies, since they share lengths and block table."""

    name = "flashinfer"

    def __init__(self) -> None:
        self._wrapper: Any = None

    def unavailable(self) -> str | None:
        return FLASHINFER.missing()

    def version(self) -> str | None:
        return FLASHINFER.version()

    def prepare(self, workload: Workload, copy: int) -> Launch:
        cache = workload.caches[copy]
        if cache.keys.stride(1) >= HEAD_STRIDE_LIMIT:
            raise UnsupportedWorkload(
                "FlashInfer keeps strides in 32 bits and this pool is larger; use a smaller --batch or --kv pooled"
            )
        if self._wrapper is None:
            self._set_up(workload)
        wrapper, query, out = self._wrapper, workload.queries[copy], torch.empty_like(workload.queries[copy])

        def launch() -> torch.Tensor:
            return wrapper.run(query, (cache.keys, cache.values), out=out)

        return launch

    def _set_up(self, workload: Workload) -> None:
        from flashinfer import BatchDecodeWithPagedKVCacheWrapper

        case, shape, device = workload.case, workload.shape, workload.device
        batch, pages = workload.sequences.block_table.shape
        sm_count = torch.cuda.get_device_properties(device).multi_processor_count
        # On the host, as an engine has them, so that planning does not wait for the device.
        starts = torch.arange(batch + 1, dtype=torch.int32) * pages
        last_page = torch.full((batch,), case.ctx - (pages - 1) * case.page_size, dtype=torch.int32)
        indices = workload.sequences.block_table.reshape(-1)
        self._wrapper = BatchDecodeWithPagedKVCacheWrapper(
            torch.zeros(workspace_bytes(shape, batch, sm_count), dtype=torch.uint8, device=device),
            "HND",
            use_cuda_graph=True,
            use_tensor_cores=True,
            paged_kv_indptr_buffer=torch.empty_like(starts, device=device),
            paged_kv_indices_buffer=torch.empty_like(indices),
            paged_kv_last_page_len_buffer=torch.empty_like(last_page, device=device),
        )
        dtype = workload.queries[0].dtype

        def plan() -> None:
            self._wrapper.plan(
                starts,
                indices,
                last_page,
                shape.query_heads,
                shape.kv_heads,
                shape.head_dim,
                case.page_size,
                q_data_type=dtype,
                kv_data_type=dtype,
                sm_scale=shape.softmax_scale,
            )

        self._plan, self._page_size = plan, case.page_size
        plan()

    def plan(self) -> Callable[[], None]:
        return self._plan

    def resolved(self) -> dict[str, Any]:
        kernels = getattr(self._wrapper, "_backend", None)
        return {"kernels": kernels, "cache": "paged HND", "page_size": self._page_size, "tensor_cores": True}
