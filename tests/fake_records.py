"""Records as a sweep makes them, without measuring."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from harness.case import Case
from harness.presets import find_model
from harness.record import Outcome, Record
from locks_kernels.cost import dense_bytes, locks_bytes
from locks_kernels.shapes import SelectOptions

H200 = {"gpu": {"name": "NVIDIA H200", "sm_count": 132}, "commit": "abc"}
COMMAND = "locks-bench latency --ctx 1M"


def case(**changes: Any) -> Case:
    values: dict[str, Any] = {"level": "attention", "ctx": 1 << 20, "batch": 1, "select": SelectOptions()}
    return Case(model=find_model("llama-3.1-8b"), **(values | changes))


def measured(of: Case, backend: str, microseconds: float, **changes: Any) -> Record:
    """An OK record with ten rounds around `microseconds`."""
    dense = backend not in ("locks", "locks-triton", "locks-cuda")
    bytes_ = dense_bytes(of.shape(), of.ctx, of.batch) if dense else locks_bytes(of.shape(), of.select, of.ctx, of.batch)
    values: dict[str, Any] = {
        "key": f"{backend}-{of.ctx}-{of.batch}-{of.level}",
        "time": "2026-01-01T00:00:00Z",
        "command": COMMAND,
        "case": asdict(of),
        "backend": backend,
        "outcome": Outcome.OK,
        "resolved": {"dense": dense, "kernels": "triton" if backend == "locks" else backend},
        "kv": {"plan": "layers=2", "copies": 2, "launches": 4, "bytes": 1, "note": "layers=2: two copies"},
        "timer": "graph",
        "cache_state": "layers",
        "rounds_ns": [[1e3 * microseconds * (1 + shift / 1000)] * 3 for shift in range(-5, 5)],
        "bytes": bytes_,
        "read_roof_tbps": 4.49,
        "environment": H200,
    }
    return Record(**(values | changes))


def failed(of: Case, backend: str, outcome: Outcome, reason: str, **changes: Any) -> Record:
    """A record without a number."""
    empty = {"outcome": outcome, "reason": reason, "rounds_ns": None, "bytes": None, "kv": None}
    return measured(of, backend, 1.0, **(empty | changes))
