"""Records -> flat rows: one dict per record with everything a reader compares.  All statistics are derived here.

Units are in the names; absent is None.  A row whose outcome is neither OK nor THROTTLED has no number but `eager_us`: the
time without a graph, the only one there is of a backend that could not be captured.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterable
from datetime import datetime
from statistics import median
from typing import Any

from harness.backends import CONTROL
from harness.record import Outcome, Record
from harness.stats import median_interval
from locks_kernels.cost import kv_bytes

Row = dict[str, Any]
TIMED = (Outcome.OK, Outcome.THROTTLED)
ENGINE_APART = 1.1  # longest sequences of two engines that count as set up alike
LAUNCH_BOUND = 1.2  # eager over graph: above this the host's launches take longer than the kernels without a graph
FAIR_SHARE = 0.7  # of the read roof, which a scorer should reach where its bytes alone take FAIR_FLOOR_US or more
FAIR_FLOOR_US = 25.0
WARM = ("hot", "warm")  # states in which a kernel may find its data in the L2 cache: never a headline


def rows(records: Iterable[Record]) -> list[Row]:
    """One row per record, in the order given, each compared with the best dense backend of its own case and machine.

    Of a backend with several records the one nearest in time is the rival: that of the same run where there is one.  The second
    instance of an A/A comparison is none.
    """
    records = list(records)
    dense: dict[str, list[Row]] = defaultdict(list)
    result = [_row(record) for record in records]
    for record, row in zip(records, result, strict=True):
        if record.outcome is Outcome.OK and record.resolved.get("dense") and not record.backend.endswith(CONTROL):
            dense[_comparable(record)].append(row)
    for record, row in zip(records, result, strict=True):
        if record.outcome is Outcome.OK and (rivals := _nearest(dense[_comparable(record)], row)):
            _compare(row, min(rivals, key=lambda rival: rival["latency_us"]))
    return result


def _nearest(rivals: list[Row], row: Row) -> list[Row]:
    """One of each backend."""
    at = datetime.fromisoformat(row["time"])
    ordered = sorted(rivals, key=lambda rival: abs(datetime.fromisoformat(rival["time"]) - at), reverse=True)
    return list({rival["backend"]: rival for rival in ordered}.values())


def _row(record: Record) -> Row:
    case, timed = record.case, record.outcome in TIMED
    latency_ns, interval_ns = median_interval(record.rounds_ns) if timed and record.rounds_ns else (None, None)
    parts = record.bytes if timed else None
    floor_us = sum(parts.values()) / record.read_roof_tbps / 1e6 if parts and record.read_roof_tbps else None
    eager_us = median(record.eager_ns) / 1e3 if record.eager_ns else None
    device = case.get("device") or record.environment.get("device")
    stages = {name: median(samples) / 1e3 for name, samples in (record.stages_ns or {}).items()} if timed else {}
    return {
        "key": record.key,
        "level": case["level"],
        "model": case["model"]["name"],
        "ctx": case["ctx"],
        "batch": case["batch"],
        "budget": (case.get("select") or {}).get("budget_tokens"),
        "backend": record.backend,
        "outcome": str(record.outcome),
        "reason": record.reason,
        "kv": record.kv,
        "latency_us": latency_ns / 1e3 if latency_ns else None,
        "latency_ci95_us": [bound / 1e3 for bound in interval_ns] if interval_ns else None,
        "bytes": parts,
        "kv_bytes_per_step": kv_bytes(parts) if parts else None,
        "bandwidth_tbps": sum(parts.values()) / latency_ns / 1e3 if parts and latency_ns else None,
        "floor_us": floor_us,
        "roof_share": floor_us * 1e3 / latency_ns if floor_us and latency_ns else None,
        "dram_bytes_measured": record.dram_bytes_measured if timed else None,
        "energy_j_per_token": record.energy_j_per_token if timed else None,
        "idle_w": (record.meters or {}).get("idle_w"),
        "tokens_per_s": _tokens_per_s(case, latency_ns) if latency_ns else None,
        "speedup_vs_best_dense": None,
        "best_dense": None,
        "flags": [],
        "warnings": _unfair(stages, _floors(record, stages)),
        "performance_claim": device == "cuda" and record.outcome is Outcome.OK and record.cache_state not in WARM,
        "command": record.command,
        "device": device,
        "machine": _machine(record),
        "cache_state": record.cache_state,
        "timer": record.timer,
        "backend_version": record.backend_version,
        "resolved": record.resolved,
        "stages_us": stages or None,
        "stage_floors_us": _floors(record, stages) or None,
        "eager_us": eager_us,
        "launch_bound": eager_us * 1e3 / latency_ns > LAUNCH_BOUND if eager_us and latency_ns else None,
        "ttft_us": median(record.ttft_ns) / 1e3 if timed and record.ttft_ns else None,
        "kv_capacity_tokens": (record.kv or {}).get("capacity_tokens"),
        "kv_bytes_per_token": (record.kv or {}).get("bytes_per_token"),
        "plan_us": median(record.plan_ns) / 1e3 if timed and record.plan_ns else None,
        "read_roof_tbps": record.read_roof_tbps,
        "gate": record.gate,
        "stop_reason": record.stop_reason,
        "rounds": len(record.rounds_ns) if timed and record.rounds_ns else None,
        "commit": record.environment.get("commit"),
        "time": record.time,
    }


def _compare(row: Row, rival: Row) -> None:
    row["best_dense"] = rival["backend"]
    row["speedup_vs_best_dense"] = speedup = rival["latency_us"] / row["latency_us"]
    if row["bytes"] and rival["bytes"]:
        ratio = sum(rival["bytes"].values()) / sum(row["bytes"].values())
        # Both within a percent of the roof is possible, beyond that one of the two numbers is wrong.
        # On a CPU time is not made of bytes alone.
        if speedup > 1.01 * ratio and row["device"] == "cuda" and row["backend"] != rival["backend"]:
            row["flags"].append(f"speed-up {speedup:.2f} is above the byte ratio {ratio:.2f} to {rival['backend']}")
    own, other = (one["resolved"].get("max_tokens") for one in (row, rival))
    if own and other and max(own, other) > ENGINE_APART * min(own, other):
        row["warnings"].append(
            f"its engine is set up for sequences of {own:,} tokens and that of {rival['backend']} for {other:,}: ask for both "
            "in one command and another --store"
        )


def _comparable(record: Record) -> str:
    """Records with the same text did the same work on the same machine under the same timer."""
    case = {name: value for name, value in record.case.items() if name != "kv"}
    plan = (record.kv or {}).get("plan") or ""
    share = plan if plan.startswith("tp=") else None
    engine = record.resolved.get("vllm")  # its version, at level engine
    return json.dumps([case, share, _machine(record), record.timer, engine], sort_keys=True)


def _machine(record: Record) -> str | None:
    """Name of the device that ran it."""
    device = record.environment.get("gpu") or record.environment.get("cpu") or {}
    return device.get("name")


def _tokens_per_s(case: dict[str, Any], latency_ns: float) -> float:
    """Tokens of the whole batch per second.  At level attention: the ceiling that attention alone sets, all layers."""
    layers = case["model"]["layers"] if case["level"] == "attention" else 1
    return case["batch"] * 1e9 / (layers * latency_ns)


def _unfair(stages: dict[str, float], floors: dict[str, float]) -> list[str]:
    """A long scan that is far from the read roof: the method could do better than its kernel here."""
    spent, floor = stages.get("score"), floors.get("score", 0.0)
    if spent is None or floor < FAIR_FLOOR_US or floor >= FAIR_SHARE * spent:
        return []
    return [
        f"its scorer runs at {floor / spent:.0%} of the read roof: with a better kernel the step could take up to "
        f"{spent - floor:.0f} us less"
    ]


def _floors(record: Record, stages: dict[str, float]) -> dict[str, float]:
    """Least time of each stage in us: its bytes at the read roof measured in the same run."""
    parts, roof = record.stage_bytes or {}, record.read_roof_tbps
    return {name: parts[name] / roof / 1e6 for name in stages if name in parts} if roof else {}
