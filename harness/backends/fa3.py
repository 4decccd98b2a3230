"""FlashAttention-3: on a contiguous cache (its best case), and on vLLM's paged build of it."""

from __future__ import annotations

from typing import Any

import torch

from harness.backend import Launch
from harness.backends.dense import CudaDenseBackend, contiguous
from harness.case import Case
from harness.libraries import FA3, VLLM
from harness.workload import Workload


def _needs_hopper(case: Case) -> str | None:
    if torch.cuda.get_device_capability()[0] != 9:
        return "FlashAttention-3 is built for compute capability 9.0 (H100, H200); this GPU is another one"
    return None


class Fa3(CudaDenseBackend):
    """`flash_attn_with_kvcache` of the fa3-fwd wheel, its own choice of splits."""

    name = "fa3"

    def unavailable(self) -> str | None:
        return FA3.missing()

    def supports(self, case: Case) -> str | None:
        if case.dtype == "float16":
            return "the fa3-fwd wheel is built without float16; use --dtype bfloat16"
        return super().supports(case) or _needs_hopper(case)

    def version(self) -> str | None:
        return FA3.version()

    def prepare(self, workload: Workload, copy: int) -> Launch:
        from fa3_fwd_interface import flash_attn_with_kvcache

        keys, values = contiguous(workload, copy)
        query = workload.queries[copy][:, None]  # [B, 1, HQ, D]
        lengths = torch.full((workload.case.batch,), workload.case.ctx, dtype=torch.int32, device=workload.device)
        scale = workload.shape.softmax_scale

        def launch() -> torch.Tensor:
            return flash_attn_with_kvcache(query, keys, values, cache_seqlens=lengths, softmax_scale=scale)[:, 0]

        return launch

    def resolved(self) -> dict[str, Any]:
        return {"kernels": "fa3", "cache": "contiguous", "splits": "automatic"}


class Fa3Paged(CudaDenseBackend):
    """`flash_attn_varlen_func` as vLLM calls it for decode: its page table is the block table."""

    name = "fa3-paged"

    def unavailable(self) -> str | None:
        return VLLM.missing()

    def supports(self, case: Case) -> str | None:
        return super().supports(case) or _needs_hopper(case)

    def version(self) -> str | None:
        return VLLM.version()

    def prepare(self, workload: Workload, copy: int) -> Launch:
        from vllm.vllm_flash_attn import flash_attn_varlen_func

        case, cache = workload.case, workload.caches[copy]
        self._page_size = case.page_size
        keys, values = cache.keys.transpose(1, 2), cache.values.transpose(1, 2)  # [num_pages, PAGE, H, D]
        query = workload.queries[copy]
        starts = torch.arange(case.batch + 1, dtype=torch.int32, device=workload.device)
        lengths = torch.full((case.batch,), case.ctx, dtype=torch.int32, device=workload.device)
        out = torch.empty_like(query)
        options = {
            "max_seqlen_q": 1,
            "cu_seqlens_q": starts,
            "max_seqlen_k": case.ctx,
            "seqused_k": lengths,
            "block_table": workload.sequences.block_table,
            "softmax_scale": workload.shape.softmax_scale,
            "causal": True,
            "fa_version": 3,
            "out": out,
        }

        def launch() -> torch.Tensor:
            flash_attn_varlen_func(query, keys, values, **options)
            return out

        return launch

    def resolved(self) -> dict[str, Any]:
        return {"kernels": "fa3", "cache": "paged", "page_size": self._page_size, "splits": "automatic"}
