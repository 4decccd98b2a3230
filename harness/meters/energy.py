"""Joules of a window of work: by the device's energy counter, else by integrating its instantaneous power, else unknown."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from types import TracebackType

from harness.meters.gpu import Gpu, PowerSample

LEAST_S = 1.0  # the counter moves in steps of tens of ms: a shorter window would count too many or too few
PERIOD_S = 0.02  # between power samples
LARGEST_GAP_S = 0.1  # between two samples that power is integrated over
LEAST_COVERAGE = 0.9


@dataclass(frozen=True)
class Energy:
    """joules: None if unknown, with the reason.  method: "counter" or "integrated".  coverage: share of the window that has
    power samples close enough to be integrated; None for the counter.
    """

    seconds: float
    joules: float | None = None
    method: str | None = None
    coverage: float | None = None
    reason: str | None = None


class EnergyWindow:
    """Context manager around work that ends before it does (synchronised); then `energy` holds what was used."""

    def __init__(self, gpu: Gpu, clock_s: Callable[[], float] = time.time, least_s: float = LEAST_S) -> None:
        self._gpu, self._clock_s, self._least_s = gpu, clock_s, least_s
        self._samples: list[PowerSample] = []
        self._over = threading.Event()
        self._thread: threading.Thread | None = None
        self.energy = Energy(0.0, reason="the window has not ended")

    def __enter__(self) -> EnergyWindow:
        self._counter = self._gpu.energy_j()
        if self._counter is None and self._gpu.power_kind == "instant":
            self._thread = threading.Thread(target=self._sample, daemon=True)
            self._thread.start()
        self._start = self._clock_s()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        end, counter = self._clock_s(), self._gpu.energy_j()
        self._over.set()
        if self._thread is not None:
            self._thread.join()
        self.energy = self._result(end, counter)

    def _result(self, end: float, counter: float | None) -> Energy:
        seconds = end - self._start
        if seconds < self._least_s:
            return Energy(seconds, reason=f"a window of {seconds:.3f} s is shorter than {self._least_s:g} s")
        if self._counter is not None and counter is not None:
            if counter <= self._counter:
                return Energy(seconds, reason="the energy counter did not move")
            return Energy(seconds, counter - self._counter, "counter")
        if self._thread is None:
            return Energy(seconds, reason="the device has no energy counter and no instantaneous power")
        joules, coverage = integrate(self._samples, self._start, end)
        if coverage < LEAST_COVERAGE:
            return Energy(seconds, coverage=coverage, reason=f"power samples cover {coverage:.0%} of the window")
        return Energy(seconds, joules / coverage, "integrated", coverage)

    def _sample(self) -> None:
        while not self._over.is_set():
            if (sample := self._gpu.instant_power()) is not None:
                self._samples.append(sample)
            self._over.wait(PERIOD_S)


def integrate(samples: Sequence[PowerSample], start: float, end: float) -> tuple[float, float]:
    """Joules between `start` and `end` by the trapezoidal rule, and the share of that time which they cover.

    Samples taken outside the window and repeats of the one before do not count, nor do gaps above LARGEST_GAP_S; up to its
    first and from its last sample the window counts at their power.
    """
    inside = [sample for sample in samples if start <= sample.seconds <= end]
    fresh = [now for before, now in zip([None, *inside], inside, strict=False) if not before or now.seconds > before.seconds]
    if not fresh:
        return 0.0, 0.0
    points = [PowerSample(start, fresh[0].watts), *fresh, PowerSample(end, fresh[-1].watts)]
    joules = covered = 0.0
    for before, now in pairwise(points):
        gap = now.seconds - before.seconds
        if gap <= LARGEST_GAP_S:
            joules += gap * (before.watts + now.watts) / 2
            covered += gap
    return joules, covered / (end - start)
