"""Timers: what turns launches into nanoseconds.  All of them give samples in time order, in ns per step of the level."""

from __future__ import annotations

import gc
import time
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from harness.level import LevelLaunch

EMPTY_GRAPH = ".*CUDA Graph is empty"  # torch only warns when every launch went to a stream that was not captured
WARM_LAUNCHES = 3  # on a side stream before a capture: lazy compilation and allocation must be over by then


class CaptureError(Exception):
    """A backend's launches cannot be captured in a CUDA graph."""


@dataclass(frozen=True)
class Cycle:
    """The launches that make one sample: one per phase.  A backend that writes the cache runs through a whole page of growing
    lengths, so that exactly one launch of a sample finalises a page; others run at phase 0 only.
    """

    set_phase: Callable[[int], None]
    phases: Sequence[int] = (0,)


class Run(Protocol):
    """One backend, ready to be timed over and over."""

    def once(self, phase: int) -> list[torch.Tensor]:
        """Launch untimed at a phase; the outputs, one per layer, valid until the next launch."""
        ...

    def samples(self, count: int) -> list[float]:
        """`count` samples; each is one cycle."""
        ...


class Timer(Protocol):
    label: str  # of the headline's samples, as stored in a record
    eager_label: str | None  # of a second column without a graph; None if the headline is eager already

    def capture(self, level: LevelLaunch, cycle: Cycle) -> Run:
        """The run that gives the headline; CaptureError if there can be none."""
        ...

    def eager(self, level: LevelLaunch, cycle: Cycle) -> Run: ...


class GraphTimer:
    """CUDA events around replays of one captured graph."""

    label = "cuda_graph"
    eager_label: str | None = "cuda_events"

    def capture(self, level: LevelLaunch, cycle: Cycle) -> Run:
        cycle.set_phase(cycle.phases[-1])
        try:
            graph, outputs = _captured(level)
        except torch.OutOfMemoryError:
            raise
        except Exception as error:
            torch.cuda.synchronize()  # a sticky error of the device must not pass for a mere failure to capture
            raise CaptureError(first_line(error)) from error

        def replay() -> list[torch.Tensor]:
            graph.replay()
            return outputs

        return _EventRun(replay, level.steps, cycle)

    def eager(self, level: LevelLaunch, cycle: Cycle) -> Run:
        return _EventRun(lambda: _as_list(level.launch()), level.steps, cycle)


class WallTimer:
    """Wall clock around eager launches: what a CPU offers."""

    label = "wall"
    eager_label: str | None = None

    def __init__(self, clock_ns: Callable[[], int] = time.perf_counter_ns) -> None:
        self._clock_ns = clock_ns

    def capture(self, level: LevelLaunch, cycle: Cycle) -> Run:
        return _WallRun(level, cycle, self._clock_ns)

    def eager(self, level: LevelLaunch, cycle: Cycle) -> Run:
        return self.capture(level, cycle)


class _EventRun:
    def __init__(self, launch: Callable[[], list[torch.Tensor]], steps: int, cycle: Cycle) -> None:
        self._launch, self._steps, self._cycle = launch, steps, cycle

    def once(self, phase: int) -> list[torch.Tensor]:
        self._cycle.set_phase(phase)
        return self._launch()

    def samples(self, count: int) -> list[float]:
        self.once(self._cycle.phases[-1])  # keeps the queue ahead of the device when the first event is recorded
        pairs = []
        for _ in range(count):
            for phase in self._cycle.phases:
                self._cycle.set_phase(phase)
                start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
                start.record()
                self._launch()
                end.record()
                pairs.append((start, end))
        torch.cuda.synchronize()
        times = [start.elapsed_time(end) * 1e6 for start, end in pairs]
        cycle = len(self._cycle.phases)
        return [sum(times[i : i + cycle]) / (cycle * self._steps) for i in range(0, len(times), cycle)]


class _WallRun:
    def __init__(self, level: LevelLaunch, cycle: Cycle, clock_ns: Callable[[], int]) -> None:
        self._level, self._cycle, self._clock_ns = level, cycle, clock_ns

    def once(self, phase: int) -> list[torch.Tensor]:
        self._cycle.set_phase(phase)
        return _as_list(self._level.launch())

    def samples(self, count: int) -> list[float]:
        return [self._sample() for _ in range(count)]

    def _sample(self) -> float:
        total = 0
        for phase in self._cycle.phases:
            self._cycle.set_phase(phase)
            start = self._clock_ns()
            self._level.launch()
            total += self._clock_ns() - start
        return total / (len(self._cycle.phases) * self._level.steps)


def _captured(level: LevelLaunch) -> tuple[torch.cuda.CUDAGraph, list[torch.Tensor]]:
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(WARM_LAUNCHES):
            level.launch()
    torch.cuda.current_stream().wait_stream(side)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    gc.collect()
    collecting = gc.isenabled()
    gc.disable()  # a finaliser that frees device memory inside a capture ends it
    try:
        with warnings.catch_warnings(), torch.cuda.graph(graph):
            outputs = _as_list(level.launch())
            warnings.filterwarnings("error", message=EMPTY_GRAPH)  # only now: it must not hide an error of the launch
    finally:
        if collecting:
            gc.enable()
    return graph, outputs


def _as_list(outputs: torch.Tensor | Sequence[torch.Tensor]) -> list[torch.Tensor]:
    return [outputs] if isinstance(outputs, torch.Tensor) else list(outputs)


def first_line(error: BaseException) -> str:
    """An error as one line of a row."""
    text = str(error).strip().splitlines()
    return f"{type(error).__name__}: {text[0]}" if text else type(error).__name__
