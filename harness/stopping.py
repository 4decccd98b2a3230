"""When a measurement has enough samples, and how many one round takes."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from harness.stats import half_width, round_medians

MOST_WINDOWS = 64  # of a warm-up, and ...
MOST_ROUNDS = 1000  # ... of a measurement, even if the clock stands still
LEAST_ROUNDS = 3  # however long they take: one round has no interval
MOST_SETTLING = 1000  # samples, even if they take no time


@dataclass(frozen=True)
class StoppingRule:
    """Limits of one backend in one case.

    half_width    of the bootstrap interval of the median over rounds, relative
    rounds        least number of them
    timed_s       least time spent in timed launches
    paired_rounds up to which a backend that could stop goes on beside others that cannot, so that rounds pair
    limit_s       most time spent on rounds, whatever the interval
    round_s       timed launches of one round aim at this
    settle_s      untimed launches before those of a round, where another backend ran last: what that one drew from the power
                  supply holds the clocks down for tens of ms.  On an H200 LOCKS took 9 % longer just after FlashAttention-3,
                  3 % longer after 60 ms, and as long as ever after any other backend
    warm_s        most time spent on warming up
    samples_per_round  at most
    """

    half_width: float = 0.005
    rounds: int = 10
    paired_rounds: int = 20
    timed_s: float = 0.5
    limit_s: float = 15.0
    round_s: float = 0.05
    settle_s: float = 0.1
    warm_s: float = 1.0
    samples_per_round: int = 256

    def reason(self, rounds: Sequence[Sequence[float]], timed_s: float, spent_s: float) -> str | None:
        """Which condition ends the measurement now, in words for the row, or None."""
        if len(rounds) >= self.rounds and timed_s >= self.timed_s:
            width = half_width(round_medians(rounds))
            if width < self.half_width:
                return f"interval: half width {width:.2%} of the median after {len(rounds)} rounds"
        if (self.exhausted(spent_s) and len(rounds) >= LEAST_ROUNDS) or len(rounds) >= MOST_ROUNDS:
            width = half_width(round_medians(rounds))
            return f"limit: {spent_s:.1f} s spent, half width {width:.2%} of the median after {len(rounds)} rounds"
        return None

    def exhausted(self, spent_s: float) -> bool:
        """Whether a backend that has spent so long on rounds has had its time."""
        return spent_s >= self.limit_s

    def leaves(self, rounds: int, spent_s: float) -> bool:
        """Whether a backend with a reason to stop leaves the others to themselves."""
        return rounds >= self.paired_rounds or self.exhausted(spent_s)

    def samples(self, sample_s: float) -> int:
        """Samples of one round for a backend whose sample takes `sample_s`; finite whatever a timer says."""
        if sample_s * self.samples_per_round <= self.round_s:
            return self.samples_per_round
        return max(1, round(self.round_s / sample_s))

    def settling(self, sample_s: float) -> int:
        """Untimed samples before them."""
        if self.settle_s <= 0:
            return 0
        if sample_s * MOST_SETTLING <= self.settle_s:
            return MOST_SETTLING
        return math.ceil(self.settle_s / sample_s)


# A CPU row is no performance claim, so it is not worth much waiting.
CPU_RULE = StoppingRule(rounds=5, timed_s=0.1, limit_s=1.0, settle_s=0.0, warm_s=0.2, samples_per_round=8)


def warm_up(samples: Callable[[int], list[float]], rule: StoppingRule, steps: int, clock_s: Callable[[], float]) -> float:
    """Launch until two windows in a row agree, or the time is over; returns the time of a sample in seconds.

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
    return window * steps * 1e-9
