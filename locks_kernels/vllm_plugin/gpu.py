"""The backend for CUDA: FlashAttention of vLLM for prompts, LOCKS for rows that decode one token.

A batch has its decodes first (reorder_batch_threshold).  Nothing here looks at a device value, and all that a decode step
reads lies in tensors that vLLM keeps at one place, so that vLLM captures it in full graphs.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any

import torch
from vllm.v1.attention.backend import AttentionCGSupport
from vllm.v1.attention.backends.flash_attn import (
    FlashAttentionBackend,
    FlashAttentionImpl,
    FlashAttentionMetadata,
    FlashAttentionMetadataBuilder,
)
from vllm.v1.attention.backends.utils import split_decodes_and_prefills
from vllm.v1.kv_cache_interface import KVCacheLayout

from locks_kernels.cache import Sequences
from locks_kernels.decode import Stages
from locks_kernels.shapes import PAGE_SIZES, DecodeShape
from locks_kernels.vllm_plugin import compat, layers
from locks_kernels.vllm_plugin.pages import page_cache
from locks_kernels.vllm_plugin.settings import SettingsError, current
from locks_kernels.vllm_plugin.workspace import choose


class LocksBackend(FlashAttentionBackend):
    # 0.33: no kernel of a model may write the cache itself, as pages are summarised where the cache is written.
    supports_kv_cache_update_bypass = False

    @staticmethod
    def get_name() -> str:
        return "CUSTOM"

    @staticmethod
    def get_impl_cls() -> type[LocksImpl]:
        return LocksImpl

    @staticmethod
    def get_builder_cls() -> type[LocksBuilder]:
        return LocksBuilder

    @classmethod
    def get_supported_kernel_block_sizes(cls, kv_cache_spec: Any = None) -> list[Any]:
        return list(PAGE_SIZES)

    @classmethod
    def supported_kv_cache_layouts(cls) -> tuple[KVCacheLayout, ...]:
        """Those with a page in one piece; a head's tokens side by side is what the sparse kernels read fastest."""
        return KVCacheLayout.LBHNC, KVCacheLayout.LBNHC, KVCacheLayout.BLHNC, KVCacheLayout.BLNHC

    @classmethod
    def customize_spec(cls, spec: Any) -> Any:
        return layers.pad(spec)


@dataclass
class LocksMetadata(FlashAttentionMetadata):
    """The whole batch for layers that stay dense, and its two parts for the others.

    decodes  rows in front that decode one token each
    stages   for them, of no layer yet
    prefill  the rows behind them; None where there are none
    summaries_ready  no row in front ranks a page that this batch completes for another, save one that shares the page with a
        prompt whose last chunk is one token: it may rank that page by what its record held before, in this step
    """

    decodes: int = 0
    stages: Stages | None = None
    prefill: FlashAttentionMetadata | None = None
    summaries_ready: bool = True

    @property
    def scorer_appends(self) -> bool:
        """Whether the scorer can write the new tokens and finish their pages: then nobody needs them before."""
        stages, only_decodes = self.stages, self.prefill is None and self.summaries_ready
        return stages is not None and only_decodes and stages.append_score is not None


class LocksBuilder(FlashAttentionMetadataBuilder):
    supports_update_block_table = False
    reorder_batch_threshold = 1

    @classmethod
    def get_cudagraph_support(cls, vllm_config: Any, kv_cache_spec: Any) -> AttentionCGSupport:
        if getattr(kv_cache_spec, "page_size_padded", None) is None:
            return super().get_cudagraph_support(vllm_config, kv_cache_spec)
        return AttentionCGSupport.UNIFORM_SINGLE_TOKEN_DECODE

    def __init__(self, kv_cache_spec: Any, layer_names: list[str], vllm_config: Any, device: torch.device) -> None:
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)
        if current().selector != "locks":
            raise SettingsError("LOCKS_VLLM: the selector oracle is plain torch, for the CPU only; leave it out on a GPU")

        def kernels(shape: DecodeShape) -> tuple[str, type[Stages]]:
            longest = vllm_config.model_config.max_model_len + 128  # vLLM's tables end at a multiple of 128 tokens
            batch = vllm_config.scheduler_config.max_num_seqs
            return choose(current().kernels, shape, device, batch, longest // shape.page_size)

        self.served = layers.serve(kv_cache_spec, layer_names, vllm_config, kernels)
        self.all_served = len(self.served) == len(layer_names)
        self.supports_draft_decode_metadata_update &= not self.served
        # A block is in the prefix cache as soon as its last token is scheduled, so a request can be scheduled in the same step
        # that shares it and lacks one token more: a decode.  Asynchronous scheduling knows only a prompt's tokens so early.
        config = vllm_config.scheduler_config
        self.shares_decoded = vllm_config.cache_config.enable_prefix_caching and not config.async_scheduling
        # Its own, as a builder plans FlashAttention-3 in one place of memory.
        self.prefills = FlashAttentionMetadataBuilder(kv_cache_spec, layer_names, vllm_config, device)

    def build(self, common_prefix_len: int, common_attn_metadata: Any, fast_build: bool = False) -> Any:
        if not self.served:
            return super().build(common_prefix_len, common_attn_metadata, fast_build)
        common = common_attn_metadata
        decodes, prefills, decode_tokens, _ = split_decodes_and_prefills(common, decode_threshold=1)
        # No plan for FlashAttention where nobody runs it on the whole batch.
        whole = super().build(common_prefix_len, common, fast_build or (self.all_served and decodes > 0))
        metadata = LocksMetadata(**{field.name: getattr(whole, field.name) for field in fields(whole)})
        if decodes:
            metadata.decodes = decodes
            metadata.stages = self._stages(common, decodes)
            metadata.summaries_ready = not (prefills or self.shares_decoded)
            if prefills:
                metadata.prefill = self.prefills.build(0, behind(common, decodes, decode_tokens), fast_build)
        return metadata

    def _stages(self, common: Any, decodes: int) -> Stages:
        module = next(iter(self.served.values()))
        served = module.impl.served
        sequences = Sequences(common.block_table_tensor[:decodes], common.seq_lens[:decodes])
        return served.workspaces.on(page_cache(module.kv_cache, served.shape), sequences)


def behind(common: Any, rows: int, tokens: int) -> Any:
    """vLLM's description of a batch without its first `rows` rows, which have `tokens` tokens."""
    upper = common.seq_lens_cpu_upper_bound
    return common.replace(
        num_reqs=common.num_reqs - rows,
        num_actual_tokens=common.num_actual_tokens - tokens,
        query_start_loc=common.query_start_loc[rows:] - tokens,
        query_start_loc_cpu=common.query_start_loc_cpu[rows:] - tokens,
        seq_lens=common.seq_lens[rows:],
        seq_lens_cpu_upper_bound=None if upper is None else upper[rows:],
        block_table_tensor=common.block_table_tensor[rows:],
        slot_mapping=common.slot_mapping[tokens:],
    )


class LocksImpl(FlashAttentionImpl):
    supports_dcp = False
    served: layers.Served | None = None  # by LOCKS; the builder says so

    def __init__(
        self,
        num_heads: int,
        head_size: int,
        scale: float,
        num_kv_heads: int | None = None,
        alibi_slopes: list[float] | None = None,
        sliding_window: int | None = None,
        kv_cache_dtype: str = "auto",
        logits_soft_cap: float | None = None,
        attn_type: str = "decoder",
        kv_sharing_target_layer_name: str | None = None,
        **extra: Any,
    ) -> None:
        kv_heads = num_kv_heads or num_heads
        super().__init__(
            num_heads,
            head_size,
            scale,
            kv_heads,
            alibi_slopes,
            sliding_window,
            kv_cache_dtype,
            logits_soft_cap,
            attn_type,
            kv_sharing_target_layer_name,
            **extra,
        )
        self.admitted = layers.admit(
            query_heads=num_heads,
            kv_heads=kv_heads,
            head_dim=head_size,
            scale=scale,
            kv_cache_dtype=kv_cache_dtype,
            attn_type=attn_type,
            sliding_window=sliding_window,
            logits_soft_cap=logits_soft_cap,
            alibi_slopes=alibi_slopes,
            kv_sharing_target=kv_sharing_target_layer_name,
            sinks=extra.get("sinks"),
        )

    def do_kv_cache_update(
        self, layer: Any, key: torch.Tensor, value: torch.Tensor, kv_cache: torch.Tensor, slot_mapping: torch.Tensor
    ) -> None:
        if self._scorer_appends(layer):
            return
        super().do_kv_cache_update(layer, key, value, kv_cache, slot_mapping)
        if self.served is not None:
            self.served.finalise(kv_cache, slot_mapping)

    def _scorer_appends(self, layer: Any) -> bool:
        """The update of the cache and forward ask in turn, in the same step, so that one of them writes the new tokens."""
        if self.served is None:
            return False
        metadata = compat.step_metadata(layer.layer_name)
        return metadata is not None and metadata.scorer_appends

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
        """query, output [T, HQ, D], key, value [T, H, D], kv_cache [pages, H, PAGE, 2 D]; T may be padded behind the batch."""
        scales = output_scale, output_block_scale
        if self.served is None or attn_metadata is None or attn_metadata.stages is None:
            return super().forward(layer, query, key, value, kv_cache, attn_metadata, output, *scales)
        decodes = attn_metadata.decodes
        stages = self.served.stages(attn_metadata.stages, kv_cache)
        if self._scorer_appends(layer):
            # vLLM's dummy batches have lengths above 0, and block tables of zeros or (model runner V1) of requests that live:
            # only their slots of -1 say that nothing is to be written.
            tokens, slots = (query[:decodes], key[:decodes], value[:decodes]), attn_metadata.slot_mapping[:decodes]
            stages.append_score(*tokens, starts_early=False, slots=slots)  # type: ignore[misc]
        else:
            stages.score(query[:decodes], summaries_ready=attn_metadata.summaries_ready)
        stages.select()
        stages.attend(query[:decodes], output[:decodes])
        if (prefill := attn_metadata.prefill) is not None:
            rest = slice(decodes, decodes + prefill.num_actual_tokens)
            super().forward(layer, query[rest], key[rest], value[rest], kv_cache, prefill, output[rest], *scales)
        return output
