"""Rounds with known noise, and records around them."""

from __future__ import annotations

from typing import Any

import numpy as np
from fake_records import case, measured

from harness.compare import Rules, compare
from harness.record import Record
from harness.verdict import Cell

MACHINE = {
    "gpu": {"name": "NVIDIA H200", "sm_count": 132, "power_limit_w": 700.0},
    "driver": "580.95.05",
    "commit": "abc",
}
ROUNDS = 30


def noise(generator: np.random.Generator, share: float, correlation: float = 0.0, rounds: int = ROUNDS) -> np.ndarray:
    """First-order autoregressive noise of standard deviation `share`."""
    fresh = generator.normal(size=rounds)
    values = fresh.copy()
    for i in range(1, rounds):
        values[i] = correlation * values[i - 1] + np.sqrt(1 - correlation**2) * fresh[i]
    return values * share


def rounds(generator: np.random.Generator, share: float, correlation: float = 0.0, slower: float = 0.0, **more: Any) -> Any:
    """Rounds of one sample around 100 us."""
    return [[100e3 * (1 + slower) * float(np.exp(value))] for value in noise(generator, share, correlation, **more)]


def record(rounds_ns: Any, backend: str = "locks", when: int = 0, ctx: int = 1 << 20, **changes: Any) -> Record:
    """An OK record of one sample per round; `when` orders the records in time."""
    values = {"rounds_ns": rounds_ns, "environment": MACHINE, "time": f"2026-01-{when + 1:02}T00:00:00Z"}
    return measured(case(ctx=ctx), backend, 100.0, **(values | {"key": f"{backend}-{ctx}-{when}"} | changes))


def one(base: list[Record], new: list[Record], **rules: Any) -> Cell:
    (cell,) = compare(base, new, Rules(**rules)).cells
    return cell
