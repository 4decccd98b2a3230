"""What a CUDA graph holds is what was launched: torch itself is faked, since only a GPU captures."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from harness_fakes import tiny_case, tiny_workload

from harness.level import LevelLaunch
from harness.timer import CaptureError, Cycle, GraphTimer
from harness.verify import Gate, Incorrect, check_graph

CYCLE = Cycle(lambda phase: None)


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """Stands for torch.cuda; `at_end` is what ending a capture does."""
    stream = SimpleNamespace(wait_stream=lambda other: None)
    fake = SimpleNamespace(
        at_end=lambda: None,
        Stream=lambda: stream,
        current_stream=lambda: stream,
        stream=lambda chosen: contextlib.nullcontext(),
        synchronize=lambda: None,
        CUDAGraph=lambda: SimpleNamespace(replay=lambda: None),
    )

    @contextlib.contextmanager
    def graph(captured: object) -> Iterator[None]:
        try:
            yield
        finally:
            fake.at_end()

    fake.graph = graph
    monkeypatch.setattr(torch, "cuda", fake)
    monkeypatch.setattr(torch, "OutOfMemoryError", MemoryError)
    return fake


def empty() -> None:
    warnings.warn("The CUDA Graph is empty. This usually means that the graph was attempted to be captured", stacklevel=1)


def legacy_stream() -> None:
    raise RuntimeError("CUDA error: operation would make the legacy stream depend on a capturing blocking stream")


@pytest.mark.parametrize(("behaviour", "reason"), [(empty, "is empty"), (legacy_stream, "legacy stream")])
def test_work_outside_the_graph_is_no_measurement(cuda: SimpleNamespace, behaviour: Any, reason: str) -> None:
    cuda.at_end = behaviour
    with pytest.raises(CaptureError, match=reason):
        GraphTimer().capture(LevelLaunch(lambda: torch.ones(1), 1), CYCLE)
    cuda.at_end = lambda: None
    assert GraphTimer().capture(LevelLaunch(lambda: torch.ones(1), 1), CYCLE).once(0)


def test_an_error_of_the_launch_is_not_hidden_by_the_empty_graph(cuda: SimpleNamespace) -> None:
    cuda.at_end = empty
    launches = iter([torch.ones(1)] * 3)
    with pytest.raises(CaptureError, match="StopIteration"), pytest.warns(UserWarning, match="empty"):
        GraphTimer().capture(LevelLaunch(lambda: next(launches), 1), CYCLE)


def test_other_warnings_stay_warnings(cuda: SimpleNamespace) -> None:
    cuda.at_end = lambda: warnings.warn("slow", stacklevel=1)
    with pytest.warns(UserWarning, match="slow"):
        assert GraphTimer().capture(LevelLaunch(lambda: torch.ones(1), 1), CYCLE)


class Outputs:
    """A run with static outputs, of which a replay writes only some: the other launch went past the graph."""

    def __init__(self, written: int) -> None:
        self.outputs, self.written = [torch.ones(2, 4), torch.ones(2, 4)], written

    def once(self, phase: int) -> list[torch.Tensor]:
        for output in self.outputs[: self.written]:
            output.fill_(1)
        return self.outputs

    def samples(self, count: int) -> list[float]:
        return [1.0] * count


def test_a_launch_that_the_graph_lacks_is_incorrect() -> None:
    workload = tiny_workload(tiny_case())
    check_graph(Gate(workload), Outputs(2), Outputs(2), CYCLE, "attention")
    with pytest.raises(Incorrect, match="graph_finite"):
        check_graph(Gate(workload), Outputs(1), Outputs(2), CYCLE, "attention")
