"""Change points of a history of medians: where a series moved to another level, and stayed there.

E-divisive [Matteson and James 2014].  Apache Otava holds the same method, but apache-otava 0.8 pins
numpy 2.2.0 and scipy below 1.17 and brings the clients of BigQuery, PostgreSQL and Slack: a benchmark must be able to live
beside the newest vLLM and torch.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

MIN_SEGMENT = 2  # points on both sides: one bad night is no new level
ALPHA = 0.001


def change_points(values: Sequence[float], alpha: float = ALPHA) -> list[int]:
    """Indices of the first value of each new level, ascending.

    The energy distance says where, a t test whether: permutations can never be sure of two points after a change
    [Fleming et al. 2023].
    """
    data = np.asarray(values, dtype=float)

    def split(first: int, end: int) -> list[int]:
        part = data[first:end]
        if len(part) < 2 * MIN_SEGMENT or part.min() == part.max():
            return []
        at = _best_split(part)
        if _p_value(part[:at], part[at:]) > alpha:
            return []
        return [*split(first, first + at), first + at, *split(first + at, end)]

    return split(0, len(data))


def _p_value(before: np.ndarray, after: np.ndarray) -> float:
    from scipy.stats import ttest_ind

    if before.min() == before.max() and after.min() == after.max():  # no noise at all: every change is one
        return 0.0
    return float(ttest_ind(before, after).pvalue)


def _best_split(values: np.ndarray) -> int:
    """The index with the largest scaled energy distance between the parts before and after it."""
    size = len(values)
    distance = np.abs(values[:, None] - values[None, :])
    total = distance.cumsum(0).cumsum(1)  # total[i, j]: of the first i + 1 rows and j + 1 columns
    at = np.arange(MIN_SEGMENT, size - MIN_SEGMENT + 1)
    left, whole = total[at - 1, at - 1], total[-1, -1]
    cross = total[at - 1, size - 1] - left
    right = whole - left - 2 * cross
    after = size - at
    energy = 2 * cross / (at * after) - left / np.maximum(at * (at - 1), 1) - right / np.maximum(after * (after - 1), 1)
    return int(at[(energy * at * after / size).argmax()])
