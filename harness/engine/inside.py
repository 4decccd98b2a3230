"""What the engine level puts inside vLLM's own worker process, through two of its public hooks: a worker extension, which
tells what really runs, and a model loader, which draws weights.  Only vLLM imports this module; nothing here is timed.
"""

from __future__ import annotations

import zlib
from typing import Any

import torch
from torch import nn
from vllm.model_executor.model_loader import register_model_loader
from vllm.model_executor.model_loader.dummy_loader import DummyModelLoader

LOAD_FORMAT = "locks-bench-random"
SHARPNESS = 3.0  # standard deviation of the attention logits: a few keys of thousands hold most of the mass, as in a model


class EngineExtension:
    """Methods that vLLM adds to its worker; asked for with `collective_rpc`.  Results are plain data."""

    model_runner: Any

    def locks_bench_layers(self) -> list[dict[str, Any]]:
        """What each attention layer runs and how its cache lies: classes, and bytes of one block with and without what
        the backend keeps behind it."""
        found = []
        for name, layer in self.model_runner.compilation_config.static_forward_context.items():
            cache = getattr(layer, "kv_cache", None)
            cache = cache[0] if isinstance(cache, list | tuple) and cache else cache
            if not isinstance(cache, torch.Tensor) or not cache.numel():
                continue
            found.append(
                {
                    "layer": name,
                    "backend": _path(layer.attn_backend),
                    "impl": _path(type(layer.impl)),
                    "flash_attention": getattr(layer.impl, "vllm_flash_attn_version", None),
                    "served": getattr(layer.impl, "served", None) is not None,  # by the plugin
                    "block_bytes": cache.stride(0) * cache.element_size(),
                    "stock_block_bytes": cache[0].numel() * cache.element_size(),
                    "dtype": str(cache.dtype).removeprefix("torch."),
                }
            )
        return found

    def locks_bench_graphs(self) -> str:
        """The mode of CUDA graphs that the engine settled for."""
        return str(getattr(self.model_runner.compilation_config.cudagraph_mode, "name", "NONE"))


@register_model_loader(LOAD_FORMAT)
class RandomModelLoader(DummyModelLoader):
    """Weights under which activations keep their variance and attention is sharp, the same for every backend.

    vLLM's own dummy weights, norms included, are below 0.001: attention then vanishes beside the residual stream, and no
    comparison of outputs could tell a right backend from a wrong one.
    """

    def load_weights(self, model: nn.Module, model_config: Any) -> None:
        super().load_weights(model, model_config)
        tied = bool(getattr(model_config.hf_config, "tie_word_embeddings", False))
        for name, module in model.named_modules():
            for kind, weight in module.named_parameters(recurse=False):
                _draw(module, f"{name}.{kind}", weight.data, tied)


def _draw(module: nn.Module, name: str, weight: torch.Tensor, tied: bool) -> None:
    generator = torch.Generator(weight.device).manual_seed(zlib.crc32(name.encode()))
    if weight.dim() < 2:
        if "norm" in name:
            weight.fill_(SHARPNESS if "q_norm" in name else 1.0)
        else:
            weight.normal_(0.0, 0.02, generator=generator)
        return
    spread = 1.0 if "embed_tokens" in name and not tied else float(weight.shape[-1]) ** -0.5
    weight.normal_(0.0, spread, generator=generator)
    if type(module).__name__ == "QKVParallelLinear":  # queries are its first rows; a norm behind them would undo this
        attention: Any = module
        weight[: attention.num_heads * attention.head_size] *= SHARPNESS


def _path(kind: Any) -> str:
    return f"{kind.__module__}.{kind.__qualname__}"
