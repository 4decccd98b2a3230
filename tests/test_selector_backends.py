"""Timed rivals: through the same gate as LOCKS, with bytes that add up."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from harness_fakes import bench, tiny_case, tiny_plan, tiny_workload
from kernel_cases import DEVICE

from harness import backends
from harness.backend import Backend
from harness.backends.selectors import Centroid, CuboidMean, MeanStdScalar, MeanStdVector, QuestGroup
from harness.backends.window import SlidingWindow
from harness.case import Case
from harness.measure import measure_case
from harness.record import Outcome
from harness.timer import Cycle
from harness.verify import Gate, Incorrect, check_eager
from locks_kernels import page_vectors, reference
from locks_kernels.cache import Sequences
from locks_kernels.selectors import SELECTORS
from locks_kernels.shapes import DecodeShape, SelectOptions

RIVALS = [QuestGroup, CuboidMean, MeanStdVector, MeanStdScalar, Centroid]


def gated(backend: Backend, case: Case | None = None) -> Gate:
    workload = tiny_workload(case)
    launches = [backend.prepare(workload, copy) for copy in range(workload.plan.launches)]
    gate = Gate(workload)
    check_eager(gate, workload, backend, launches, Cycle(workload.set_phase, tuple(workload.phases)))
    return gate


@pytest.mark.parametrize("ctx", [320, 327, 65])
@pytest.mark.parametrize("backend", RIVALS)
def test_rivals_pass_the_gate(backend: Callable[[], Backend], ctx: int) -> None:
    checks = gated(backend(), tiny_case(ctx)).record()["checks"]
    assert {"tables_sound", "kept_mass_of_best", "summary_error", "new_tokens_written"} <= set(checks)


@pytest.mark.parametrize("ctx", [320, 327, 65, 40])
def test_window_passes_the_gate(ctx: int) -> None:
    assert gated(SlidingWindow(), tiny_case(ctx)).record()["checks"]["tables_are_the_window"] is True


@pytest.mark.parametrize("tokens", [[16 * 9, 16 * 9 + 1, 5, 0], [64, 65, 80, 81]])
def test_window_kernel_is_the_reference(tokens: list[int]) -> None:
    window = pytest.importorskip("locks_kernels.window").window
    shape, options = DecodeShape(4, 2, 64), SelectOptions(budget_tokens=80, sink_pages=2)
    lens = torch.tensor(tokens, dtype=torch.int32, device=DEVICE)
    sequences = Sequences(torch.zeros(4, 10, dtype=torch.int32, device=DEVICE), lens)
    tables = torch.full((4, 2, 5), 99, dtype=torch.int32, device=DEVICE)
    window(tables, sequences, shape, options)
    score = torch.arange(10, dtype=torch.float32, device=DEVICE).expand(4, 2, -1)
    assert torch.equal(tables, reference.select(score, sequences, shape, options))


def test_a_rival_with_stale_summaries_gets_no_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(page_vectors, "finalise", lambda *arguments: None)
    with pytest.raises(Incorrect, match="summary_error"):
        gated(QuestGroup(), tiny_case(320))


def test_a_rival_that_keeps_other_pages_gets_no_time(monkeypatch: pytest.MonkeyPatch) -> None:
    real = page_vectors.score

    class Backwards(QuestGroup):
        def prepare(self, workload: Any, copy: int) -> Any:
            launch = super().prepare(workload, copy)

            def turned() -> torch.Tensor:
                with pytest.MonkeyPatch.context() as patch:
                    patch.setattr(page_vectors, "score", lambda *arguments: -real(*arguments))
                    return launch()

            return turned

    with pytest.raises(Incorrect, match=r"mass|score"):
        gated(Backwards(), tiny_case(640))


@pytest.mark.parametrize("backend", RIVALS)
def test_rivals_are_measured_like_everybody(backend: type[Backend]) -> None:
    case = tiny_case()
    record = measure_case(case, tiny_plan(case), {backend.name: backend()}, {backend.name: "key"}, bench(), lambda name: None)[
        0
    ]
    assert record.outcome is Outcome.OK, record.reason
    assert record.resolved["label"] == "adapted"


@pytest.mark.parametrize("backend", RIVALS)
def test_names_and_bytes_are_those_of_fidelity(backend: type[Backend]) -> None:
    assert backend.name in SELECTORS and backend.name in backends.names()
    case = tiny_case(640)
    parts, stages = backend().bytes(case), backend().stage_bytes(case)
    assert sum(parts.values()) == sum(stages.values())
    shape = case.shape()
    wanted = SELECTORS[backend.name].score_bytes(shape, case.select, case.ctx) * shape.kv_heads * case.batch
    assert parts["summary"] == wanted
