"""What was measured, as plain data: one record per (case, backend).  Imports nothing heavy, so that old results open on a
laptop without torch.  Absent is None, never 0.  Samples are stored in time order; statistics are derived from them.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field, fields
from datetime import datetime
from enum import StrEnum
from typing import Any, Self, cast

SCHEMA = 1


class Outcome(StrEnum):
    """How a measurement ended.  Only OK and THROTTLED rows carry samples; every other has a reason to act on."""

    OK = "OK"
    SKIPPED = "SKIPPED"
    INCORRECT = "INCORRECT"
    OOM = "OOM"
    TIMEOUT = "TIMEOUT"
    CRASHED = "CRASHED"
    CAPTURE_FAILED = "CAPTURE_FAILED"
    THROTTLED = "THROTTLED"
    INVALID = "INVALID"


class Line:
    """What any dataclass that is a line of a store can do."""

    outcome: Outcome
    time: str  # UTC, ISO 8601

    def to_json(self) -> str:
        return json.dumps(asdict(cast(Any, self)), separators=(",", ":"), allow_nan=False)

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> Self:
        """From parsed JSON; unknown keys of newer schemas are dropped, TypeError if a required one is absent, ValueError if the
        outcome or the time is none."""
        known = {field.name for field in fields(cast(Any, cls))}
        record = cls(**{name: value for name, value in data.items() if name in known})
        record.outcome = Outcome(record.outcome)
        datetime.fromisoformat(record.time)
        return record


@dataclass
class Record(Line):
    """One line of a store.

    key           hash of everything that makes a measurement the same one again (see store.resume_key)
    case          the cell: level, model, ctx, batch, budget, selection options, shape, contents, seed, device
    backend       name as the user types it; `resolved` says what really ran (kernels, page size, splits, tensor cores)
    kv            memory plan: {"plan": "resident" | "layers=k" | "pooled" | "tp=n", "copies": k, "bytes": ..., "note": ...}
    rounds_ns     one list per round of samples, ns per step of the level (one layer, or one token); time order
    eager_ns      the same without a graph
    plan_ns       host time of the library's planning call, once per step, outside `rounds_ns`
    ttft_ns       time to the first token of a sequence in an idle engine; level engine only
    stages_ns     ns samples of what each stage adds to the step, measured after the headline
    bytes         analytic bytes per step by part (cost.py); for level token also "weights"
    stage_bytes   the bytes of one layer by the stage that moves them, where `stages_ns` is there
    energy_j_per_token  whole device, idle power included; at level attention of all layers of the model; None if unknown
    meters        readings at the end of each round (lists in the order of the rounds, those set aside included): sm_mhz,
                  memory_mhz, power_w, temperature_c, events (why clocks were low); default_sm_mhz, power_limit_w, idle_w;
                  slow_share and power_capped_share of the rounds, set_aside_ns by place; energy with its window;
                  dram_active_share of the peak
                  bandwidth by the device's monitors; missing: what cannot be read and why
    dram_bytes_measured  of one step, read and written, by Nsight Compute in a run of its own; None if nobody looked
    profiles      what each profiler gave, by tool: status, reason, hint, kernels (see profile/result.py)
    gate          what was checked before the time was taken: relative error, tolerance, checks by name
    """

    key: str
    time: str
    command: str
    case: dict[str, Any]
    backend: str
    outcome: Outcome
    reason: str | None = None
    backend_version: str | None = None
    resolved: dict[str, Any] = field(default_factory=dict)
    kv: dict[str, Any] | None = None
    timer: str | None = None
    cache_state: str | None = None
    rounds_ns: list[list[float]] | None = None
    eager_ns: list[float] | None = None
    plan_ns: list[float] | None = None
    ttft_ns: list[float] | None = None
    stages_ns: dict[str, list[float]] | None = None
    stop_reason: str | None = None
    bytes: dict[str, int] | None = None
    stage_bytes: dict[str, int] | None = None
    gate: dict[str, Any] | None = None
    energy_j_per_token: float | None = None
    meters: dict[str, Any] | None = None
    dram_bytes_measured: int | None = None
    profiles: dict[str, Any] | None = None
    read_roof_tbps: float | None = None
    environment: dict[str, Any] = field(default_factory=dict)
    schema: int = SCHEMA
