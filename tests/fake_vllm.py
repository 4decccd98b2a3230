"""As much of vLLM's interface as the plugin stands on, in plain torch, for tests without vLLM.

Only names and meanings are vLLM's; the attention behind them is the simplest that is right.
"""

from __future__ import annotations

import dataclasses
import enum
import sys
import types
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import torch

CONFIG: list[Any] = []  # the engine being built
CONTEXT: list[Any] = []  # of the step that runs


class Support(enum.Enum):
    ALWAYS = 3
    UNIFORM_SINGLE_TOKEN_DECODE = 1


class GraphMode(enum.Enum):
    """CUDAGraphMode"""

    NONE = 0
    PIECEWISE = 1
    FULL = 2


class Layout(enum.Enum):
    LBHNC = 0
    LBNHC = 1
    BLHNC = 2
    BLNHC = 3


@dataclasses.dataclass(frozen=True, kw_only=True)
class FullAttentionSpec:
    block_size: int
    num_kv_heads: int
    head_size: int
    dtype: torch.dtype
    head_size_v: int | None = None
    page_size_padded: int | None = None
    sliding_window: int | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "head_size_v", self.head_size_v or self.head_size)

    @property
    def unpadded_page_size_bytes(self) -> int:
        return self.num_kv_heads * self.block_size * 2 * self.head_size * self.dtype.itemsize

    @property
    def page_size_bytes(self) -> int:
        return self.page_size_padded or self.unpadded_page_size_bytes


class SlidingWindowSpec(FullAttentionSpec):
    pass


@dataclasses.dataclass
class Common:
    """CommonAttentionMetadata"""

    query_start_loc: torch.Tensor
    query_start_loc_cpu: torch.Tensor
    seq_lens: torch.Tensor
    num_reqs: int
    num_actual_tokens: int
    max_query_len: int
    max_seq_len: int
    block_table_tensor: torch.Tensor
    slot_mapping: torch.Tensor
    seq_lens_cpu_upper_bound: torch.Tensor | None = None

    def replace(self, **changes: Any) -> Common:
        return dataclasses.replace(self, **changes)


@dataclasses.dataclass
class Metadata:
    """FlashAttentionMetadata, and CPUAttentionMetadata"""

    num_actual_tokens: int
    query_start_loc: torch.Tensor
    seq_lens: torch.Tensor
    block_table: torch.Tensor
    slot_mapping: torch.Tensor
    scheduler_metadata: torch.Tensor | None = None


class Builder:
    """Plans are written to one place of memory, as vLLM's for full graphs are."""

    supports_draft_decode_metadata_update = True

    def __init__(self, kv_cache_spec: Any, layer_names: list[str], vllm_config: Any, device: torch.device) -> None:
        self.plan = torch.zeros(2, dtype=torch.int32)

    @classmethod
    def get_cudagraph_support(cls, vllm_config: Any, kv_cache_spec: Any) -> Support:
        return Support.ALWAYS

    def build(self, common_prefix_len: int, common: Common, fast_build: bool = False) -> Metadata:
        self.plan[0], self.plan[1] = common.num_reqs, common.num_actual_tokens
        return Metadata(
            common.num_actual_tokens,
            common.query_start_loc,
            common.seq_lens,
            common.block_table_tensor,
            common.slot_mapping,
            None if fast_build else self.plan,
        )


class Impl:
    """Dense causal attention from the pages, fp32, request by request."""

    def __init__(self, heads: int, head_size: int, scale: float, kv_heads: int, *rest: Any, **extra: Any) -> None:
        self.num_heads, self.head_size, self.scale, self.num_kv_heads = heads, head_size, scale, kv_heads
        self.rows_attended = 0

    def do_kv_cache_update(
        self, layer: Any, key: torch.Tensor, value: torch.Tensor, kv_cache: torch.Tensor, slots: torch.Tensor
    ) -> None:
        page_size = kv_cache.shape[2]
        for token, slot in enumerate(slots.tolist()):
            if slot >= 0:
                row = kv_cache[slot // page_size, :, slot % page_size]
                row[:, : self.head_size], row[:, self.head_size :] = key[token], value[token]

    def forward(
        self,
        layer: Any,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        kv_cache: torch.Tensor,
        metadata: Metadata | None,
        output: torch.Tensor,
        output_scale: Any = None,
        output_block_scale: Any = None,
    ) -> torch.Tensor:
        if metadata is None:
            return output.fill_(0)
        rows = len(metadata.seq_lens)
        if metadata.scheduler_metadata is not None:  # a plan for another batch would go wrong on a GPU
            assert metadata.scheduler_metadata.tolist() == [rows, metadata.num_actual_tokens]
        self.rows_attended += rows
        starts = metadata.query_start_loc.tolist()
        assert starts[0] == 0 and starts[-1] == metadata.num_actual_tokens
        for row in range(rows):
            tokens = slice(starts[row], starts[row + 1])
            output[tokens] = dense(query[tokens], kv_cache, metadata.block_table[row], int(metadata.seq_lens[row]), self.scale)
        return output


def dense(query: torch.Tensor, kv_cache: torch.Tensor, pages: torch.Tensor, tokens: int, scale: float) -> torch.Tensor:
    """The last T tokens of a sequence, query [T, HQ, D], against all its `tokens`; zeros for none."""
    page_size, width = kv_cache.shape[2:]
    held = kv_cache[pages[: -(-tokens // page_size)].long()].transpose(0, 1).flatten(1, 2)[:, :tokens].float()
    group = query.shape[1] // kv_cache.shape[1]
    keys, values = (part.repeat_interleave(group, 0) for part in held.split(width // 2, -1))
    logits = query.float().transpose(0, 1) @ keys.mT * scale
    later = torch.arange(tokens) > torch.arange(tokens - len(query), tokens)[:, None]
    weights = logits.masked_fill(later, float("-inf")).softmax(-1).nan_to_num(0.0)
    return (weights @ values).transpose(0, 1).to(query.dtype)


def split(common: Common, decode_threshold: int = 1) -> tuple[int, int, int, int]:
    """Rows of at most `decode_threshold` tokens lie in front."""
    lengths = common.query_start_loc_cpu.diff().tolist()
    decodes = next((row for row, length in enumerate(lengths) if length > decode_threshold), len(lengths))
    tokens = int(common.query_start_loc_cpu[decodes])
    return decodes, common.num_reqs - decodes, tokens, common.num_actual_tokens - tokens


@contextmanager
def forward_context(metadata: Any, mode: GraphMode = GraphMode.NONE) -> Iterator[None]:
    """Metadata by layer's name, or None, as the model's layers see them while a step runs."""
    CONTEXT.append(SimpleNamespace(attn_metadata=metadata, cudagraph_runtime_mode=mode))
    try:
        yield
    finally:
        CONTEXT.pop()


class Registry:
    """AttentionBackendEnum and register_backend"""

    def __init__(self) -> None:
        self.paths: dict[str, str] = {}

    def member(self, name: str) -> Any:
        return SimpleNamespace(
            name=name, is_overridden=lambda: name in self.paths, get_path=lambda: self.paths.get(name, f"vllm.{name}")
        )

    def register(self, member: Any, path: str) -> None:
        self.paths[member.name] = path


@contextmanager
def installed(registry: Registry, cpu: bool = False) -> Iterator[None]:
    """`import vllm...` gives the above while this is open; plug-in modules that have imported it are forgotten afterwards."""
    log = SimpleNamespace(info=print, warning=print, warning_once=print)
    plain = (("Backend", object), ("Impl", Impl), ("Metadata", Metadata), ("MetadataBuilder", Builder))
    contents: dict[str, dict[str, Any]] = {
        "vllm": {},
        "vllm.config": {"get_current_vllm_config": lambda: CONFIG[-1], "CUDAGraphMode": GraphMode},
        "vllm.forward_context": {"get_forward_context": lambda: CONTEXT[-1]},
        "vllm.logger": {"init_logger": lambda name: log},
        "vllm.platforms": {"current_platform": SimpleNamespace(is_cpu=lambda: cpu)},
        "vllm.v1": {},
        "vllm.v1.attention": {},
        "vllm.v1.attention.backend": {"AttentionCGSupport": Support},
        "vllm.v1.attention.backends": {},
        "vllm.v1.attention.backends.registry": {
            "AttentionBackendEnum": SimpleNamespace(CUSTOM=registry.member("CUSTOM"), CPU_ATTN=registry.member("CPU_ATTN")),
            "register_backend": registry.register,
        },
        "vllm.v1.attention.backends.flash_attn": {f"FlashAttention{name}": kind for name, kind in plain},
        "vllm.v1.attention.backends.cpu_attn": {
            "CPUAttentionBackend": object,
            "CPUAttentionBackendImpl": Impl,
            "CPUAttentionMetadata": Metadata,
            "CPUAttentionMetadataBuilder": Builder,
        },
        "vllm.v1.attention.backends.utils": {"split_decodes_and_prefills": split},
        "vllm.v1.kv_cache_interface": {"FullAttentionSpec": FullAttentionSpec, "KVCacheLayout": Layout},
    }
    before = {name: module for name, module in sys.modules.items() if name.split(".")[0] == "vllm"}
    for name in before:
        del sys.modules[name]
    for name, attributes in contents.items():
        module = types.ModuleType(name)
        module.__dict__.update(attributes, __path__=[])
        sys.modules[name] = module
    try:
        yield
    finally:
        for name in [*contents, "locks_kernels.vllm_plugin.gpu", "locks_kernels.vllm_plugin.cpu"]:
            sys.modules.pop(name, None)
        sys.modules.update(before)


def engine(layers: dict[str, Any], **more: Any) -> Any:
    """A VllmConfig with the attention modules `layers` by name."""
    parallel = {"decode_context_parallel_size": 1, "prefill_context_parallel_size": 1, "enable_dbo": False, "ubatch_size": 0}
    fields = {
        "compilation_config": SimpleNamespace(static_forward_context=layers),
        "model_config": SimpleNamespace(
            hf_text_config=SimpleNamespace(num_hidden_layers=2), max_model_len=512, dtype=torch.bfloat16
        ),
        "scheduler_config": SimpleNamespace(max_num_seqs=8, async_scheduling=True),
        "cache_config": SimpleNamespace(enable_prefix_caching=True),
        "parallel_config": SimpleNamespace(**parallel),
        "attention_config": SimpleNamespace(use_non_causal=False),
        "speculative_config": None,
        "kv_transfer_config": None,
    }
    return SimpleNamespace(**{**fields, **more})
