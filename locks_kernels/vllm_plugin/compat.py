"""All that differs between versions of vLLM (0.32 and 0.33), and the calls into it that are not made by a subclass."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any


def name_gpu_backend(path: str, asked: bool) -> None:
    """`--attention-backend CUSTOM` means `path`, unless another package has taken that name and nobody asked for LOCKS.

    The name is CUSTOM and not LOCKS: a member that a plug-in adds to vLLM's enumeration cannot be unpickled by the engine
    process that `vllm serve` spawns (seen with 0.32.0), as that happens before plug-ins are loaded.
    """
    from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend

    custom = AttentionBackendEnum.CUSTOM
    if custom.is_overridden() and custom.get_path() != path:
        if not asked:
            return
        logger().warning("--attention-backend CUSTOM was %s; LOCKS_VLLM is set, so that it is LOCKS now", custom.get_path())
    register_backend(custom, path)


def replace_cpu_backend(path: str) -> None:
    """vLLM for CPUs has one backend and heeds no choice, so LOCKS takes its place."""
    from vllm.platforms import current_platform
    from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend

    if current_platform.is_cpu():
        register_backend(AttentionBackendEnum.CPU_ATTN, path)


def logger() -> Any:
    """Below "vllm", where vLLM has set up a handler."""
    from vllm.logger import init_logger

    return init_logger("vllm.locks")


def current_config() -> Any:
    """The `VllmConfig` of the engine whose model is being built."""
    from vllm.config import get_current_vllm_config

    return get_current_vllm_config()


def attention_layers(config: Any, names: Iterable[str]) -> dict[str, Any]:
    """vLLM's `Attention` modules by name; `.impl` is their backend's, `.kv_cache` is bound before the first batch."""
    context = config.compilation_config.static_forward_context
    return {name: context[name] for name in names}


def layer_index(name: str) -> int | None:
    """Which layer "model.layers.7.self_attn.attn" is."""
    return next((int(part) for part in name.split(".") if part.isdigit()), None)


def layer_count(config: Any) -> int:
    return int(config.model_config.hf_text_config.num_hidden_layers)


def step_metadata(layer_name: str) -> Any:
    """The attention metadata that a layer has in the step that runs; None where it has none, or where it may be that of one
    call only.

    A piecewise graph keeps the update of the cache inside itself, made with the metadata of the capture, unless that update is
    among vLLM's splitting_ops, while attention reads those of the step.  Micro-batches (a list) are refused at start.
    """
    from vllm.config import CUDAGraphMode
    from vllm.forward_context import get_forward_context

    context = get_forward_context()
    if context.cudagraph_runtime_mode is CUDAGraphMode.PIECEWISE or not isinstance(context.attn_metadata, dict):
        return None
    return context.attn_metadata.get(layer_name)
