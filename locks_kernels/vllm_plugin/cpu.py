"""The backend for CPUs, in plain torch: it serves small models so that the plugin can be tested without a GPU.

It takes the place of vLLM's only CPU backend.  Pages are written here, [pages, H, PAGE, 2 D] as on a GPU, as the order within
a page of vLLM's own CPU kernels depends on the processor.
"""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from typing import Any

import torch
from vllm.v1.attention.backends.cpu_attn import (
    CPUAttentionBackend,
    CPUAttentionBackendImpl,
    CPUAttentionMetadata,
    CPUAttentionMetadataBuilder,
)

from locks_kernels import reference
from locks_kernels.cache import PagedCache, Sequences
from locks_kernels.decode import ReferenceStages, Stages
from locks_kernels.shapes import DecodeShape
from locks_kernels.vllm_plugin import layers
from locks_kernels.vllm_plugin.pages import page_cache, write_slots
from locks_kernels.vllm_plugin.settings import current

PAGE_SIZES = (32, 64)  # of ours, those that vLLM's CPU kernels take as well


class LocksCPUBackend(CPUAttentionBackend):
    @staticmethod
    def get_impl_cls() -> type[LocksCPUImpl]:
        return LocksCPUImpl

    @staticmethod
    def get_builder_cls() -> type[LocksCPUBuilder]:
        return LocksCPUBuilder

    @classmethod
    def customize_spec(cls, spec: Any) -> Any:
        return layers.pad(spec, PAGE_SIZES)


class OracleStages(ReferenceStages):
    """Pages ranked by their exact attention mass, the rest as in LOCKS: what a summary could reach at best."""

    def score(self, query: torch.Tensor, summaries_ready: bool = True) -> None:
        self.scores = exact_scores(query, self.cache, self.sequences, self.options.recent_pages)


def exact_scores(query: torch.Tensor, cache: PagedCache, sequences: Sequences, recent_pages: int) -> torch.Tensor:
    """As reference.score, from the keys themselves: fp32 [B, HQ, P], -inf where a page is not scored."""
    shape = cache.shape
    batch, max_pages = sequences.block_table.shape
    grouped = query.float().view(batch, shape.kv_heads, shape.group, shape.head_dim) * shape.softmax_scale
    counts = reference.scored_pages(sequences.seq_lens, shape, recent_pages)
    scores = query.new_full((batch, shape.query_heads, max_pages), float("-inf"), dtype=torch.float32)
    for b in range(batch):
        keys = cache.keys[sequences.block_table[b, : int(counts[b])].long()].float()  # [p, H, PAGE, D]
        mass = torch.einsum("hgd,phtd->hgpt", grouped[b], keys).logsumexp(-1)
        scores[b, :, : len(keys)] = mass.reshape(shape.query_heads, len(keys))
    return scores


@dataclass
class LocksCPUMetadata(CPUAttentionMetadata):
    """starts  where each row's tokens begin, and the end of the last one's"""

    starts: list[int] = field(default_factory=list)


class LocksCPUBuilder(CPUAttentionMetadataBuilder):
    def __init__(self, kv_cache_spec: Any, layer_names: list[str], vllm_config: Any, device: torch.device) -> None:
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)

        def kernels(shape: DecodeShape) -> tuple[str, type[Stages]]:
            return ("oracle", OracleStages) if current().selector == "oracle" else ("reference", ReferenceStages)

        layers.serve(kv_cache_spec, layer_names, vllm_config, kernels)

    def build(self, common_prefix_len: int, common_attn_metadata: Any, fast_build: bool = False) -> LocksCPUMetadata:
        whole = super().build(common_prefix_len, common_attn_metadata, fast_build)
        starts = common_attn_metadata.query_start_loc_cpu[: common_attn_metadata.num_reqs + 1].tolist()
        return LocksCPUMetadata(**{name.name: getattr(whole, name.name) for name in fields(whole)}, starts=starts)


class LocksCPUImpl(CPUAttentionBackendImpl):
    served: layers.Served | None = None  # by LOCKS; the builder says so

    def __init__(
        self,
        num_heads: int,
        head_size: int,
        scale: float,
        num_kv_heads: int,
        alibi_slopes: list[float] | None,
        sliding_window: int | None,
        kv_cache_dtype: str,
        logits_soft_cap: float | None = None,
        attn_type: str = "decoder",
        kv_sharing_target_layer_name: str | None = None,
        sinks: torch.Tensor | None = None,
    ) -> None:
        super().__init__(
            num_heads,
            head_size,
            scale,
            num_kv_heads,
            alibi_slopes,
            sliding_window,
            kv_cache_dtype,
            logits_soft_cap,
            attn_type,
            kv_sharing_target_layer_name,
            sinks,
        )
        self.admitted = layers.admit(
            query_heads=num_heads,
            kv_heads=num_kv_heads,
            head_dim=head_size,
            scale=scale,
            kv_cache_dtype=kv_cache_dtype,
            attn_type=attn_type,
            sliding_window=sliding_window,
            logits_soft_cap=logits_soft_cap,
            alibi_slopes=alibi_slopes,
            kv_sharing_target=kv_sharing_target_layer_name,
            sinks=sinks,
        )

    def do_kv_cache_update(
        self, layer: Any, key: torch.Tensor, value: torch.Tensor, kv_cache: torch.Tensor, slot_mapping: torch.Tensor
    ) -> None:
        if self.served is None:
            super().do_kv_cache_update(layer, key, value, kv_cache, slot_mapping)
            return
        write_slots(page_cache(kv_cache, self.served.shape), key, value, slot_mapping)
        self.served.finalise(kv_cache, slot_mapping)

    def forward(
        self,
        layer: Any,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        kv_cache: torch.Tensor,
        attn_metadata: Any,
        output: torch.Tensor,
        output_scale: torch.Tensor | None = None,
        output_block_scale: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """As LocksImpl.forward; rows may come in any order."""
        if self.served is None or attn_metadata is None:
            scales = output_scale, output_block_scale
            return super().forward(layer, query, key, value, kv_cache, attn_metadata, output, *scales)
        served, starts = self.served, attn_metadata.starts
        cache = page_cache(kv_cache, served.shape)
        decodes = [row for row, start in enumerate(starts[:-1]) if starts[row + 1] - start == 1]
        if decodes:
            tokens = [starts[row] for row in decodes]
            sequences = Sequences(attn_metadata.block_table[decodes], attn_metadata.seq_lens[decodes])
            stages, out = served.workspaces.on(cache, sequences), torch.empty_like(query[tokens])
            stages.score(query[tokens])
            stages.select()
            stages.attend(query[tokens], out)
            output[tokens] = out
        for row, start in enumerate(starts[:-1]):
            if starts[row + 1] - start > 1:
                rows = slice(start, starts[row + 1])
                output[rows] = attend_prompt(
                    query[rows], cache, attn_metadata.block_table[row], int(attn_metadata.seq_lens[row])
                )
        return output


def attend_prompt(query: torch.Tensor, cache: PagedCache, pages: torch.Tensor, tokens: int) -> torch.Tensor:
    """Exact causal attention of a sequence's last T tokens, query [T, HQ, D], to all its `tokens` on `pages`; like query."""
    shape = cache.shape
    used = pages[: shape.pages(tokens)].long()
    keys, values = (pool[used].transpose(0, 1).flatten(1, 2)[:, :tokens].float() for pool in (cache.keys, cache.values))
    position = torch.arange(tokens - len(query), tokens)[:, None]
    out = torch.nn.functional.scaled_dot_product_attention(
        query.float().transpose(0, 1)[None],
        keys[None],
        values[None],
        attn_mask=torch.arange(tokens) <= position,
        scale=shape.softmax_scale,
        enable_gqa=True,
    )
    return out[0].transpose(0, 1).to(query.dtype)
