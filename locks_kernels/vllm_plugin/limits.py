"""What the plugin does not serve, as sentences.  Knows nothing of vLLM's classes but a few names of their fields."""

from __future__ import annotations

import math
from typing import Any

from locks_kernels.shapes import PAGE_SIZES, DecodeShape, ShapeError
from locks_kernels.vllm_plugin.settings import VARIABLE

CACHE_TYPES = ("auto", "bfloat16", "float16", "float32")


class RefusedError(ValueError):
    """The engine was asked for LOCKS with something that it cannot serve, and the settings say to stop then."""


def sentence(reason: str) -> str:
    return (
        f"LOCKS does not support {reason}; serve with the engine's own attention, or set "
        f'"unsupported": "dense" in {VARIABLE} to keep it there where needed'
    )


def layer_reason(
    *,
    query_heads: int,
    kv_heads: int,
    head_dim: int,
    scale: float,
    kv_cache_dtype: str,
    attn_type: str = "decoder",
    sliding_window: int | None = None,
    logits_soft_cap: float | None = None,
    alibi_slopes: object | None = None,
    kv_sharing_target: str | None = None,
    sinks: object | None = None,
) -> str | None:
    """Why an attention layer with these properties stays dense; None if it need not."""
    if attn_type != "decoder":
        return f"{getattr(attn_type, 'value', attn_type)} attention"
    if sliding_window is not None:
        return f"sliding-window attention (window of {sliding_window} tokens)"
    if logits_soft_cap:
        return f"a soft cap on logits ({logits_soft_cap})"
    if alibi_slopes is not None:
        return "ALiBi"
    if sinks is not None:
        return "learned attention sinks"
    if kv_sharing_target is not None:
        return f"layers that use another layer's cache ({kv_sharing_target})"
    if kv_cache_dtype not in CACHE_TYPES:
        return f"a {kv_cache_dtype} cache"
    try:
        shape = DecodeShape(query_heads, kv_heads, head_dim)
    except ShapeError as error:
        return f"this model ({error})"
    if not math.isclose(scale, shape.softmax_scale, rel_tol=1e-6):
        return f"a softmax scale of {scale:g} with head_dim {head_dim} (1 / sqrt(head_dim) is {shape.softmax_scale:g})"
    return None


def page_reason(block_size: int, sizes: tuple[int, ...] = PAGE_SIZES) -> str | None:
    """Why pages of `block_size` tokens cannot be summarised."""
    if block_size in sizes:
        return None
    return f"blocks of {block_size} tokens (use --block-size {' or '.join(map(str, sizes))})"


def engine_reason(config: Any) -> str | None:
    """Why an engine with this `VllmConfig` stays dense."""
    if getattr(config, "speculative_config", None) is not None:
        return "speculative decoding"
    if getattr(config, "kv_transfer_config", None) is not None:
        return "KV connectors (they move pages without their summaries)"
    parallel = config.parallel_config
    for name, words in (
        ("decode_context_parallel_size", "decode context parallelism"),
        ("prefill_context_parallel_size", "prefill context parallelism"),
    ):
        if getattr(parallel, name, 1) > 1:
            return words
    if getattr(parallel, "enable_dbo", False) or getattr(parallel, "ubatch_size", 0) > 1:
        return "micro-batches (dual batch overlap)"
    if getattr(getattr(config, "attention_config", None), "use_non_causal", False):
        return "non-causal attention"
    model = config.model_config
    if getattr(model, "is_mm_prefix_lm", False):
        return "models whose prompts are not causal (prefix-LM)"
    if getattr(model, "rswa_window", None) is not None:
        return "reference sliding windows"
    return None
