"""What one timed launch does at each level: the seam between a backend and the timer."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from harness.backend import UnsupportedWorkload

if TYPE_CHECKING:
    import torch

    from harness.backend import Backend, Launch
    from harness.case import Case
    from harness.workload import Workload


@dataclass(frozen=True)
class LevelLaunch:
    """Everything that one replay of the captured graph does.

    launch        only launches; returns its output, or one output per layer
    steps         steps of the level in one launch: layers at level attention, tokens at level token
    weight_bytes  model weights read by one launch
    """

    launch: Callable[[], torch.Tensor | Sequence[torch.Tensor]]
    steps: int
    weight_bytes: int = 0


def attention_launch(launches: Sequence[Launch]) -> LevelLaunch:
    """Every copy's attention once."""
    return LevelLaunch(lambda: [launch() for launch in launches], steps=len(launches))


def level_launch(case: Case, workload: Workload, backend: Backend, launches: Sequence[Launch]) -> LevelLaunch:
    """The launch of the case's level, from the launches that `backend.prepare` gave for each copy of the workload."""
    if case.level == "attention":
        return attention_launch(launches)
    if case.level == "engine":
        raise UnsupportedWorkload("level engine is a whole vLLM; measure it with `locks-bench latency --level engine`")
    from harness.token_level import token_launch

    return token_launch(case, workload, backend, launches)
