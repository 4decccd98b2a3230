"""Speed-ups over the best dense backend with their intervals, and the context from which they begin."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from harness.stats import CONFIDENCE, central_interval
from reports.panels import Entry, Panel

FLOOR = 0.01  # effects smaller than this are called the same


@dataclass(frozen=True)
class Crossover:
    """From which context on a backend beats the best dense one, at one batch.

    kind    "at": between two neighbouring measured contexts, interpolated on logarithmic axes
            "always" / "never": at all measured contexts / not at the largest
            "between": somewhere between `below` and `above`, with contexts in between that have no number
    at, low, high   tokens with the 95 % interval (bounds None: outside the measured range)
    below, above    the measured contexts around it
    """

    batch: int
    backend: str
    kind: Literal["at", "always", "never", "between"]
    below: int
    above: int
    at: float | None = None
    low: float | None = None
    high: float | None = None


def speedup_interval(panel: Panel, entry: Entry) -> tuple[float, float] | None:
    """95 % interval of `speedup_vs_best_dense`: rounds of both are resampled together where they pair."""
    rival = panel.rival(entry)
    if entry.row["speedup_vs_best_dense"] is None or rival is None:
        return None
    return central_interval(rival.resampled_ns / entry.resampled_ns)


def verdict(interval: Sequence[float]) -> Literal["faster", "slower", "the same", "unclear"]:
    """What an interval of speed-ups lets one say."""
    low, high = interval
    if low > 1 + FLOOR:
        return "faster"
    if high < 1 - FLOOR:
        return "slower"
    return "the same" if low > 1 - FLOOR and high < 1 + FLOOR else "unclear"


def claimed(panel: Panel, backend: str) -> list[Entry]:
    """Entries of a sparse backend whose speed-up may be told: a performance claim, and not above what bytes allow."""
    return [
        entry
        for entry in panel.entries
        if entry.row["backend"] == backend
        and not entry.dense
        and entry.drawn
        and entry.row["performance_claim"]
        and entry.row["speedup_vs_best_dense"] is not None
        and not entry.row["flags"]
    ]


def sparse_backends(panel: Panel) -> list[str]:
    """Backends with a speed-up to tell, the best first: most cells, then the highest mean speed-up."""
    found = {name: claimed(panel, name) for name in panel.backends}

    def rank(name: str) -> tuple[float, float, str]:
        speedups = [entry.row["speedup_vs_best_dense"] for entry in found[name]]
        return -len(speedups), -float(np.mean(np.log(speedups))), name

    return sorted((name for name in found if found[name]), key=rank)


def crossover(panel: Panel, backend: str, batch: int) -> Crossover | None:
    """The crossover of one backend at one batch; None if it has no speed-up there."""
    points = [entry for entry in claimed(panel, backend) if entry.row["batch"] == batch]
    if not points:
        return None
    contexts = np.array([entry.row["ctx"] for entry in points], dtype=float)
    speedups = np.array([entry.row["speedup_vs_best_dense"] for entry in points])
    slower = np.flatnonzero(speedups < 1)
    first, final = points[0].row["ctx"], points[-1].row["ctx"]
    if not len(slower):
        return Crossover(batch, backend, "always", first, first)
    last = int(slower[-1])
    if last == len(points) - 1:
        return Crossover(batch, backend, "never", final, final)
    below, above = points[last].row["ctx"], points[last + 1].row["ctx"]
    if any(below < ctx < above for ctx in panel.contexts):
        return Crossover(batch, backend, "between", below, above)
    resampled = np.stack([_resampled_speedup(panel, entry) for entry in points], axis=1)
    crossings = np.sort(_crossings(contexts, resampled))
    tail = (1 - CONFIDENCE) / 2
    low, high = crossings[int(tail * len(crossings))], crossings[int((1 - tail) * len(crossings)) - 1]
    at = float(_crossings(contexts, speedups[None])[0])
    return Crossover(batch, backend, "at", below, above, at, *(float(x) if np.isfinite(x) else None for x in (low, high)))


def _resampled_speedup(panel: Panel, entry: Entry) -> np.ndarray:
    rival = panel.rival(entry)
    assert rival is not None  # an entry with a speed-up has one
    return np.asarray(rival.resampled_ns / entry.resampled_ns)


def _crossings(contexts: np.ndarray, speedups: np.ndarray) -> np.ndarray:
    """Context after the last speed-up below 1 of each line [lines, contexts]; -inf if none is, inf if that is the last."""
    slower = speedups < 1
    last = contexts.size - 1 - np.argmax(slower[:, ::-1], axis=1)
    below = np.minimum(last, contexts.size - 2)
    x, y = np.log(contexts), np.log(speedups)
    left, right = np.take_along_axis(y, below[:, None], 1)[:, 0], np.take_along_axis(y, below[:, None] + 1, 1)[:, 0]
    with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
        inside = np.exp(x[below] - left * (x[below + 1] - x[below]) / (right - left))
    return np.where(~slower.any(axis=1), -np.inf, np.where(last == contexts.size - 1, np.inf, inside))
