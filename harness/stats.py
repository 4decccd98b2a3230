"""Statistics over rounds.  Samples inside a round are autocorrelated, so a round counts as one value: its median."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from statistics import median, quantiles
from typing import TYPE_CHECKING

if TYPE_CHECKING:  # a tenth of a second, which `list` and `--help` need not pay
    import numpy as np

CONFIDENCE = 0.95
RESAMPLES = 2000
SEED = 0
DRIFT_LIMIT = 0.02  # between the medians of the two halves of a measurement


def round_medians(rounds: Sequence[Sequence[float]]) -> list[float]:
    """One value per round; empty rounds count for nothing."""
    return [float(median(samples)) for samples in rounds if samples]


def resampled_medians(values: Sequence[float], seed: int = SEED) -> np.ndarray:
    """Medians of RESAMPLES bootstrap resamples.  The same seed and count give the same picks, so that the results of two
    equally long lists of paired rounds pair as well: their ratio is a paired bootstrap of the ratio of medians.
    """
    import numpy as np

    ordered = np.sort(np.asarray(values, dtype=float)[_picks(len(values), seed)], axis=1)
    middle = len(values) // 2
    return ordered[:, middle] if len(values) % 2 else (ordered[:, middle - 1] + ordered[:, middle]) / 2


def bootstrap_interval(values: Sequence[float], seed: int = SEED) -> tuple[float, float]:
    """Percentile bootstrap interval of the median, seeded: the same values give the same interval."""
    return central_interval(resampled_medians(values, seed))


def central_interval(resampled: np.ndarray) -> tuple[float, float]:
    """The middle CONFIDENCE share of resampled values."""
    import numpy as np

    tail = (1 - CONFIDENCE) / 2
    low, high = np.quantile(resampled, (tail, 1 - tail))
    return float(low), float(high)


@lru_cache(maxsize=16)  # a report of many rows asks for the same few counts of rounds thousands of times
def _picks(count: int, seed: int) -> np.ndarray:
    import numpy as np

    return np.random.default_rng(seed).integers(0, count, (RESAMPLES, count))


def half_width(values: Sequence[float]) -> float:
    """Half of the interval's width relative to the median; infinite for fewer than two values, 0 if all are equal."""
    if len(values) < 2:
        return float("inf")
    low, high = bootstrap_interval(values)
    middle = float(median(values))
    if high == low:
        return 0.0
    return (high - low) / 2 / middle if middle > 0 else float("inf")


def drift(values: Sequence[float]) -> float:
    """Change of the median from the first half of the rounds to the second, as a share of the first; 0.0 where the halves
    overlap so much that noise explains it, or there are fewer than four rounds.
    """
    if len(values) < 4:
        return 0.0
    middle = len(values) // 2
    first, second = values[:middle], values[middle:]
    low, high = float(median(first)), float(median(second))
    first_low, first_high = _quartiles(first)
    second_low, second_high = _quartiles(second)
    apart = first_high < second_low or second_high < first_low
    return high / low - 1 if apart and low > 0 else 0.0


def median_interval(rounds: Sequence[Sequence[float]]) -> tuple[float, tuple[float, float]]:
    """Median over rounds and its 95 % bootstrap interval, in the unit of the samples.  ValueError if there are none."""
    medians = round_medians(rounds)
    if not medians:
        raise ValueError("no samples in any round")
    return float(median(medians)), bootstrap_interval(medians)


def outlier_labels(values: Sequence[float]) -> list[str | None]:
    """For each value "mild" beyond 1.5 or "severe" beyond 3 interquartile ranges outside the quartiles, else None.  A label
    is all that happens to an outlier: it stays in every statistic.
    """
    if len(values) < 4:
        return [None] * len(values)
    low, high = _quartiles(values)
    width = high - low
    beyond = [max(low - value, value - high) for value in values]
    return ["severe" if far > 3 * width else "mild" if far > 1.5 * width else None for far in beyond]


def _quartiles(values: Sequence[float]) -> tuple[float, float]:
    """The first and the third, linear between values; of at least two."""
    low, _, high = quantiles(values, n=4, method="inclusive")
    return low, high
