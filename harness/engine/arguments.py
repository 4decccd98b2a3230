"""How an engine is set up for its cells: the same for every backend but for the name of its attention."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from harness.engine.cells import BACKENDS, DUMMY, EngineCase
from harness.engine.record import GRAPHS
from harness.engine.window import Window, slack_tokens
from harness.engine.worker import Cell
from harness.memory import DeviceMemory
from harness.weights import resident_weight_bytes

CPU_CACHE_BYTES = 1 << 30  # where the cache is to be filled


def window(case: EngineCase) -> Window:
    """What is timed: on a CPU, where a row is no performance claim, as little as shows that it works."""
    if case.device == "cpu":
        return Window(warm=2, rounds=5, round_tokens=4)
    return Window(warm=32, rounds=12, round_tokens=max(16, case.page_size))


def cell_of(case: EngineCase) -> Cell:
    return case.ctx, None if case.fills_cache else case.batch


def arguments(case: EngineCase, name: str, model: Path, cells: list[Cell]) -> dict[str, Any]:
    """Of vllm.LLM, but for those that follow from the lengths and numbers of its sequences.  model: a folder."""
    result: dict[str, Any] = {
        "model": str(model),
        "load_format": "locks-bench-random" if case.weights == DUMMY else "auto",
        "skip_tokenizer_init": True,
        "generation_config": "vllm",
        "block_size": case.page_size,
        "enable_prefix_caching": False,
    }
    if case.device == "cuda":
        result["attention_config"] = {"backend": BACKENDS[name].attention["cuda"]}
        if version := BACKENDS[name].flash_attention:
            result["attention_config"]["flash_attn_version"] = version
        result["compilation_config"] = {"cudagraph_mode": GRAPHS}
    else:
        result |= {"enforce_eager": True, "kv_cache_memory_bytes": _cpu_cache_bytes(case, cells)}
    return result | json.loads(case.engine_args)


def _cpu_cache_bytes(case: EngineCase, cells: list[Cell]) -> int:
    """For the largest cell, with a fifth more for summaries and part-filled pages."""
    if any(batch is None for _, batch in cells):
        return CPU_CACHE_BYTES
    token = 2 * case.model.layers * case.model.kv_heads * case.model.head_dim * 2
    most = max((ctx + slack_tokens(window(case), [batch], ctx, 2048) + 1024) * (batch or 1) for ctx, batch in cells)
    return int(1.2 * token * most)


def no_memory(case: EngineCase) -> str | None:
    """Why a CPU cannot hold the model; a GPU's engine finds out by itself."""
    if case.device == "cuda":
        return None
    needed = resident_weight_bytes(case.model, 1, case.dtype) + _cpu_cache_bytes(case, [cell_of(case)])
    free = DeviceMemory.now("cpu").free_bytes
    if needed <= free:
        return None
    return f"{case.model.name} needs {needed / 1e9:.0f} GB and {free / 1e9:.0f} GB are free; use --model smollm2-135m"
