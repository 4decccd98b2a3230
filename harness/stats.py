"""Statistics over rounds.  Samples inside a round are autocorrelated, so a round counts as one value: its median."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

import numpy as np

CONFIDENCE = 0.95
RESAMPLES = 2000
SEED = 0
DRIFT_LIMIT = 0.02  # between the medians of the two halves of a measurement
MIN_PAIRS = 5  # below this nobody can tell noise from change
RESOLUTION = 1e-6  # of a log-ratio: clocks tick, so equal samples do not mean exact ones
MOST_CORRELATED, LEAST_EFFECTIVE = 0.97, 1.05  # keep the formulas finite


def round_medians(rounds: Sequence[Sequence[float]]) -> list[float]:
    """One value per round; empty rounds count for nothing."""
    return [float(np.median(samples)) for samples in rounds if samples]


def resampled_medians(values: Sequence[float], seed: int = SEED) -> np.ndarray:
    """Medians of RESAMPLES bootstrap resamples.  The same seed and count give the same picks, so that the results of two
    equally long lists of paired rounds pair as well: their ratio is a paired bootstrap of the ratio of medians.
    """
    ordered = np.sort(np.asarray(values, dtype=float)[_picks(len(values), seed)], axis=1)
    middle = len(values) // 2
    return ordered[:, middle] if len(values) % 2 else (ordered[:, middle - 1] + ordered[:, middle]) / 2


def bootstrap_interval(values: Sequence[float], seed: int = SEED) -> tuple[float, float]:
    """Percentile bootstrap interval of the median, seeded: the same values give the same interval."""
    return central_interval(resampled_medians(values, seed))


def central_interval(resampled: np.ndarray) -> tuple[float, float]:
    """The middle CONFIDENCE share of resampled values."""
    tail = (1 - CONFIDENCE) / 2
    low, high = np.quantile(resampled, (tail, 1 - tail))
    return float(low), float(high)


@lru_cache(maxsize=16)  # a report of many rows asks for the same few counts of rounds thousands of times
def _picks(count: int, seed: int) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, count, (RESAMPLES, count))


def half_width(values: Sequence[float]) -> float:
    """Half of the interval's width relative to the median; infinite for fewer than two values, 0 if all are equal."""
    if len(values) < 2:
        return float("inf")
    low, high = bootstrap_interval(values)
    middle = float(np.median(values))
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
    first, second = np.asarray(values[:middle]), np.asarray(values[middle:])
    low, high = float(np.median(first)), float(np.median(second))
    apart = np.quantile(first, 0.75) < np.quantile(second, 0.25) or np.quantile(second, 0.75) < np.quantile(first, 0.25)
    return high / low - 1 if apart and low > 0 else 0.0


def median_interval(rounds: Sequence[Sequence[float]]) -> tuple[float, tuple[float, float]]:
    """Median over rounds and its 95 % bootstrap interval, in the unit of the samples.  ValueError if there are none."""
    medians = round_medians(rounds)
    if not medians:
        raise ValueError("no samples in any round")
    return float(np.median(medians)), bootstrap_interval(medians)


@dataclass(frozen=True)
class Effect:
    """Change from one series of rounds to another, as shares (0.03: 3 % more time).

    low, high   95 % interval
    p           two-sided, of no change at all
    rounds      pairs of rounds; effective: how many independent ones they are worth
    """

    change: float
    low: float
    high: float
    p: float
    rounds: int
    effective: float


def paired_effect(base: Sequence[Sequence[float]], new: Sequence[Sequence[float]]) -> Effect | None:
    """t test on the log-ratios of rounds paired by their place in time, at the size that their autocorrelation leaves.

    None for fewer than MIN_PAIRS pairs, or a time that is not above zero.  Neighbouring rounds share the state of the clocks
    and of the memory, so n rounds count as n (1 - r) / (1 + r) [first-order autoregression].  r is estimated from both series,
    corrected for its bias in short ones [Kendall 1954] and raised by half its standard error: simulated comparisons of
    equal things with r = 0.8 stay under 2 % false alarms from ten rounds on.
    """
    from scipy import stats  # half a second, which `list` and `--help` need not pay

    before, after = np.asarray(round_medians(base)), np.asarray(round_medians(new))
    pairs = min(len(before), len(after))
    if pairs < MIN_PAIRS or before.min() <= 0 or after.min() <= 0:
        return None
    before, after = np.log(before[:pairs]), np.log(after[:pairs])
    ratios = after - before
    mean = float(ratios.mean())
    effective = _effective_size(before, after)
    variance = float(ratios.var()) / (1 - 1 / effective)
    error = max(math.sqrt(variance / effective), RESOLUTION)
    freedom = pairs / 2
    reach = float(stats.t.ppf((1 + CONFIDENCE) / 2, freedom)) * error
    p = 2 * float(stats.t.sf(abs(mean) / error, freedom))
    return Effect(math.expm1(mean), math.expm1(mean - reach), math.expm1(mean + reach), p, pairs, effective)


def _effective_size(before: np.ndarray, after: np.ndarray) -> float:
    pairs = len(before)
    raw = (_lag_one(before) + _lag_one(after)) / 2
    unbiased = min(max(raw + (1 + 3 * raw) / pairs, 0.0), 1.0)
    correlation = min(unbiased + 0.5 * math.sqrt((1 - unbiased**2) / (2 * pairs)), MOST_CORRELATED)
    return max(pairs * (1 - correlation) / (1 + correlation), LEAST_EFFECTIVE)


def _lag_one(values: np.ndarray) -> float:
    """Autocorrelation of neighbours; 0.0 for constant values."""
    centred = values - values.mean()
    power = float(centred @ centred)
    return float(centred[1:] @ centred[:-1]) / power if power > 0 else 0.0


def outlier_labels(values: Sequence[float]) -> list[str | None]:
    """ "mild" beyond 1.5, "severe" beyond 3 interquartile ranges outside of the quartiles, else None: labelled, never dropped."""
    if len(values) < 4:
        return [None] * len(values)
    low, high = np.quantile(values, (0.25, 0.75))
    width = high - low
    beyond = [max(low - value, value - high) for value in values]
    return ["severe" if far > 3 * width else "mild" if far > 1.5 * width else None for far in beyond]
