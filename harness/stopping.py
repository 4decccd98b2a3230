"""When a measurement has enough samples, and how many one round takes."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from harness.stats import half_width, round_medians

MOST_WINDOWS = 64  # of a warm-up, and ...
MOST_ROUNDS = 1000  # ... of a measurement, even if the clock stands still


@dataclass(frozen=True)
class StoppingRule:
    """Limits of one backend in one case.

    half_width    of the bootstrap interval of the median over rounds, relative
    timed_s       least time spent in timed launches
    limit_s       most time spent on rounds, whatever the interval
    round_s       timed launches of one round aim at this
    warm_s        most time spent on warming up
    """

    half_width: float = 0.005
    rounds: int = 10
    timed_s: float = 0.5
    limit_s: float = 15.0
    round_s: float = 0.05
    warm_s: float = 1.0
    samples_per_round: int = 64

    def reason(self, rounds: Sequence[Sequence[float]], timed_s: float, spent_s: float) -> str | None:
        """Which condition ends the measurement now, in words for the row, or None."""
        if len(rounds) >= self.rounds and timed_s >= self.timed_s:
            width = half_width(round_medians(rounds))
            if width < self.half_width:
                return f"interval: half width {width:.2%} of the median after {len(rounds)} rounds"
        if spent_s >= self.limit_s or len(rounds) >= MOST_ROUNDS:
            width = half_width(round_medians(rounds))
            return f"limit: {spent_s:.1f} s spent, half width {width:.2%} of the median after {len(rounds)} rounds"
        return None

    def samples(self, sample_s: float) -> int:
        """Samples of one round for a backend whose sample takes `sample_s`; finite whatever a timer says."""
        if sample_s * self.samples_per_round <= self.round_s:
            return self.samples_per_round
        return max(1, round(self.round_s / sample_s))


# A CPU row is no performance claim, so it is not worth much waiting.
CPU_RULE = StoppingRule(rounds=5, timed_s=0.1, limit_s=1.0, warm_s=0.2, samples_per_round=8)


def warm_up(samples: Callable[[int], list[float]], rule: StoppingRule, steps: int, clock_s: Callable[[], float]) -> int:
    """Launch until two windows in a row agree, or the time is over; returns how many samples one round takes.

    steps: of one sample; ns per step times this is the time of a sample.
    """
    start = clock_s()
    count = rule.samples(samples(1)[0] * steps * 1e-9)
    before = None
    for _ in range(MOST_WINDOWS):
        window = statistics.median(samples(count))
        if before is not None and abs(window - before) <= rule.half_width * before:
            break
        if clock_s() - start >= rule.warm_s:
            break
        before = window
    return rule.samples(window * steps * 1e-9)
