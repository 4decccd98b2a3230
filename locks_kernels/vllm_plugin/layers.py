"""What the backends for GPUs and CPUs share: which layers LOCKS serves, and what their pages need."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch

from locks_kernels.decode import Stages
from locks_kernels.shapes import PAGE_SIZES, DecodeShape, ShapeError
from locks_kernels.vllm_plugin import compat, limits
from locks_kernels.vllm_plugin.pages import padded_bytes, page_cache, tail_bytes
from locks_kernels.vllm_plugin.settings import SettingsError, current
from locks_kernels.vllm_plugin.workspace import Workspaces, lend


@dataclass(frozen=True)
class Served:
    """What an implementation needs to serve its layer; layers of one group share the workspaces."""

    shape: DecodeShape
    workspaces: Workspaces

    def stages(self, batch: Stages, kv_cache: torch.Tensor) -> Stages:
        return lend(batch, page_cache(kv_cache, self.shape), batch.sequences)  # type: ignore[attr-defined]

    def finalise(self, kv_cache: torch.Tensor, slots: torch.Tensor) -> None:
        self.workspaces.finalise(page_cache(kv_cache, self.shape), slots)


def admit(**layer: Any) -> bool:
    """Whether LOCKS can serve a layer with these properties (limits.layer_reason) in the engine being built.

    RefusedError where it cannot and the settings do not say to stay dense.
    """
    return _settle(limits.engine_reason(compat.current_config()) or limits.layer_reason(**layer))


def pad(spec: Any, sizes: tuple[int, ...] = PAGE_SIZES) -> Any:
    """vLLM's description of a layer's cache with room for summaries, or unchanged where they are not supported."""
    from vllm.v1.kv_cache_interface import FullAttentionSpec

    plain = type(spec) is FullAttentionSpec and spec.sliding_window is None and spec.head_size == spec.head_size_v
    plain &= spec.dtype in (torch.bfloat16, torch.float16, torch.float32)
    if not plain or not _settle(limits.page_reason(spec.block_size, sizes)):
        return spec
    try:
        shape = shape_of(spec, spec.num_kv_heads)
    except ShapeError:
        return spec  # admit() has spoken
    return replace(spec, page_size_padded=padded_bytes(spec.unpadded_page_size_bytes, shape))


def shape_of(spec: Any, query_heads: int) -> DecodeShape:
    """float32 (CPU) goes as bfloat16: plain torch looks at the tensors, and the summaries are the same."""
    dtype = "float16" if spec.dtype == torch.float16 else "bfloat16"
    return DecodeShape(query_heads, spec.num_kv_heads, spec.head_size, spec.block_size, current().rank, dtype)


def serve(
    spec: Any, names: list[str], config: Any, choose: Callable[[DecodeShape], tuple[str, type[Stages]]]
) -> dict[str, Any]:
    """Tell each implementation of a group whether LOCKS serves its layer; the layers that it serves, by name.

    choose  kernels for a shape, or ShapeError
    """
    settings = current()
    modules = compat.attention_layers(config, names)
    count = compat.layer_count(config)
    if beyond := [index for index in settings.dense_layers if index >= count]:
        raise SettingsError(f"LOCKS_VLLM: dense_layers has {beyond[0]}, but the model has layers 0 to {count - 1}")
    wanted = {
        name: module
        for name, module in modules.items()
        if module.impl.admitted and compat.layer_index(name) not in settings.dense_layers
    }
    for module in modules.values():
        module.impl.served = None
    heads = {module.impl.num_heads for module in wanted.values()}
    if not wanted or not _settle(_group_reason(spec, config.model_config.dtype, heads)):
        return {}
    shape = shape_of(spec, heads.pop())
    options = settings.options(shape.page_size, config.model_config.max_model_len)
    try:
        kernels, stages = choose(shape)
    except ShapeError as error:
        _settle(f"this device ({error})")
        return {}
    served = Served(shape, Workspaces(stages, options))
    for module in wanted.values():
        module.impl.served = served
    compat.logger().info(
        "LOCKS decodes in %d of %d layers of this group: %d tokens per KV head and step (all of them up to a context of %d), "
        "rank %d, %s kernels; summaries take %.1f %% more cache",
        len(wanted),
        len(modules),
        options.kept_pages(shape.page_size) * shape.page_size,
        options.table_pages(shape.page_size) * shape.page_size,
        shape.rank,
        kernels,
        100 * tail_bytes(shape) / spec.unpadded_page_size_bytes,
    )
    return wanted


def _group_reason(spec: Any, dtype: torch.dtype, heads: set[int]) -> str | None:
    if (reason := limits.page_reason(spec.block_size)) is not None:
        return reason
    if spec.dtype != dtype:
        return f"a cache of {spec.dtype} under a model of {dtype}"
    if len(heads) > 1:
        return f"layers of {' and '.join(map(str, sorted(heads)))} query heads in one group"
    room = spec.page_size_bytes - spec.unpadded_page_size_bytes
    if room < tail_bytes(shape_of(spec, spec.num_kv_heads)):
        return "layers that share their pages with layers of another kind"
    return None


def _settle(reason: str | None) -> bool:
    """False, and once a line in the log, where there is a reason to stay dense and the settings allow it."""
    if reason is None:
        return True
    if current().unsupported == "error":
        raise limits.RefusedError(limits.sentence(reason))
    compat.logger().warning_once(f"LOCKS does not support {reason}: the engine's own attention serves it")
    return False
