"""How a measurement ended: what was raised, or what its samples say."""

from __future__ import annotations

import torch

from harness.backend import UnsupportedWorkload
from harness.meters.throttle import throttled
from harness.record import Outcome, Record
from harness.stats import DRIFT_LIMIT, drift, median_interval, round_medians
from harness.timer import CaptureError, first_line
from harness.verify import Incorrect

# Two measurements of the same memory differ by this much: a latency is impossible only beyond it.
ROOF_UNCERTAINTY = 0.01


def judge(record: Record) -> None:
    """Set OK, THROTTLED or INVALID from a record's samples.

    CPU rows are no performance claim: their caches hold what is read twice and their clocks are shared, so the roof and the
    drift say nothing about them.
    """
    latency_ns, _ = median_interval(record.rounds_ns or [])
    record.outcome, record.reason = Outcome.OK, None
    if latency_ns <= 0:
        record.outcome, record.reason = Outcome.INVALID, "the timer returned a time of zero"
        return
    if record.case["device"] == "cpu":
        return
    roof = record.read_roof_tbps
    bandwidth = sum((record.bytes or {}).values()) / latency_ns / 1e3
    moved = drift(round_medians(record.rounds_ns or []))
    if roof and bandwidth > roof * (1 + ROOF_UNCERTAINTY):
        record.outcome = Outcome.INVALID
        record.reason = (
            f"{bandwidth:.2f} TB/s is above the measured read roof of {roof:.2f} TB/s: data came from a cache or was not read"
        )
    elif reason := throttled(record):
        record.outcome, record.reason = Outcome.THROTTLED, reason
    elif abs(moved) > DRIFT_LIMIT:
        record.outcome = Outcome.THROTTLED
        record.reason = f"the second half of the rounds differs by {moved:+.1%}: clocks moved; let the GPU cool and repeat"


def fail(record: Record, error: Exception, when: str) -> None:
    """Turn what was raised into an outcome with a reason to act on; no headline time survives."""
    record.rounds_ns = record.stages_ns = None
    match error:
        case Incorrect():
            record.outcome, record.reason, record.gate = Outcome.INCORRECT, str(error), error.gate.record()
            record.eager_ns = record.plan_ns = None
        case UnsupportedWorkload():
            record.outcome, record.reason = Outcome.SKIPPED, str(error)
        case CaptureError():
            record.outcome, record.reason = Outcome.CAPTURE_FAILED, f"cannot be captured in a CUDA graph: {error}"
        case torch.OutOfMemoryError() | MemoryError():
            record.outcome = Outcome.OOM
            record.reason = f"out of memory {when}; use a smaller --ctx or --batch, or --kv layers=1"
        case _:
            record.outcome, record.reason = Outcome.CRASHED, f"{when}: {first_line(error)}"
