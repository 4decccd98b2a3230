"""What an engine said -> records.  Imports no vLLM."""

from __future__ import annotations

import re
import time
from dataclasses import asdict
from typing import Any

from harness.engine.cells import BACKENDS, EngineCase
from harness.engine.window import Timed
from harness.engine.worker import Broken, Started
from harness.meters.throttle import set_slow_rounds_aside
from harness.outcome import judge
from harness.record import Outcome, Record
from harness.weights import weight_bytes
from locks_kernels.cost import dense_bytes, locks_bytes

TIMER = "engine_steps"
CONTENTS = "random-tokens"
GRAPHS = "FULL_AND_PIECEWISE"
NO_MEMORY = re.compile(
    r"out of memory|OutOfMemory|No available memory for the cache|KV cache is needed|larger than the (maximum|available)|"
    r"Free memory on device",
    re.I,
)
NOT_SERVED = re.compile(
    r"is not valid for this configuration|RefusedError|SettingsError|No module named|ImportError|not (installed|supported)|"
    r"requires? flashinfer|FlashInfer.*(version|disabled)",
    re.I,
)

DEVICE_ERROR = re.compile(r"CUDA (driver )?error|cudaError|CUDA_ERROR|NCCL error", re.I)  # says "not supported", too


def blank(case: EngineCase, name: str, key: str, command: str, environment: dict[str, Any], batch: int | None) -> Record:
    """A row before anything is known.  batch: as tried, where the case leaves it to the engine."""
    return Record(
        key=key,
        time=time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        command=command,
        case=asdict(case) | {"contents": CONTENTS, "batch": batch or case.batch},
        backend=name,
        outcome=Outcome.SKIPPED,
        backend_version=BACKENDS[name].version(),
        resolved={"dense": BACKENDS[name].dense},
        timer=TIMER,
        cache_state="layers",
        environment=environment,
    )


def fill(record: Record, case: EngineCase, started: Started, gate: dict[str, Any]) -> None:
    """What is known of every row of an engine that is up: who attends, what a token's cache costs, how much there is."""
    layers = started.description["layers"]
    first = layers[0]
    kernels = first["impl"].rpartition(".")[2] + (f" v{first['flash_attention']}" if first.get("flash_attention") else "")
    graphs = started.description["graphs"]
    if case.device == "cuda" and graphs != GRAPHS:
        kernels += f", graphs {graphs}"
    block = sum(layer["block_bytes"] for layer in layers)
    stock = sum(layer["stock_block_bytes"] for layer in layers)
    record.gate = gate
    record.resolved |= {
        "kernels": kernels,
        "impl": first["impl"],
        "layers": len(layers),
        "layers_served_by_plugin": sum(bool(layer["served"]) for layer in layers),
        "engine_start_s": round(started.seconds, 1),
        **{name: value for name, value in started.description.items() if name != "layers"},
    }
    record.kv = {
        "plan": "max" if case.fills_cache else "engine",
        "copies": len(layers),
        "launches": len(layers),
        "bytes": started.blocks * block,
        "blocks": started.blocks,
        "block_size": started.block_size,
        "capacity_tokens": started.blocks * started.block_size,
        "bytes_per_token": block / started.block_size,
        "stock_bytes_per_token": stock / started.block_size,
        "note": f"the engine's cache holds {started.blocks * started.block_size:,} tokens, "
        f"{block / started.block_size:,.0f} bytes each ({block / stock - 1:+.1%} to keys and values alone)",
    }


def finish(record: Record, case: EngineCase, timed: Timed, readings: list[dict[str, Any]]) -> None:
    """A row with its samples, and what they say."""
    record.rounds_ns, record.ttft_ns = timed.rounds_ns, [timed.ttft_ns]
    record.stop_reason = f"{len(timed.rounds_ns)} rounds"
    record.resolved |= {name: getattr(timed, name) for name in ("first_context", "last_context", "longest_context")}
    shape, layers = case.shape(), case.model.layers
    dense = BACKENDS[record.backend].dense
    parts = dense_bytes(shape, case.ctx, timed.batch) if dense else locks_bytes(shape, case.select, case.ctx, timed.batch)
    record.bytes = {name: size * layers for name, size in parts.items()} | {
        "weights": weight_bytes(case.model, timed.batch, 1, case.dtype)
    }
    if any(readings):
        default = readings[0]["default_sm_mhz"]
        lists = {name: [one[name] for one in readings] for name in readings[0] if name != "default_sm_mhz"}
        record.meters = {"source": "nvml", "default_sm_mhz": default} | lists
        set_slow_rounds_aside(record)
    judge(record)


def outcome_of(error: str) -> Outcome:
    """Of an engine that failed, by the line that says why."""
    if NO_MEMORY.search(error):
        return Outcome.OOM
    refused = NOT_SERVED.search(error) and not DEVICE_ERROR.search(error)
    return Outcome.SKIPPED if refused else Outcome.CRASHED


def break_off(record: Record, broken: Broken, log: str) -> None:
    """A typed outcome for an engine that failed, with the line that says why."""
    mismatch = BACKENDS[record.backend].mismatch(broken.error)
    record.rounds_ns, record.outcome = None, outcome_of(broken.error)
    advice = "; use a smaller --ctx or --batch" if record.outcome is Outcome.OOM else ""
    record.reason = f"{broken.when}: {broken.error}{advice}" + (f"; {mismatch}" if mismatch else "") + f" (log: {log})"
