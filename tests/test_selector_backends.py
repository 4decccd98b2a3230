"""Timed rivals: through the same gate as LOCKS, with bytes that add up."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from harness_fakes import bench, tiny_case, tiny_plan, tiny_workload
from kernel_cases import DEVICE

from harness import backends
from harness.backend import Backend
from harness.backends.locks import Locks
from harness.backends.locks_variants import LocksR2, LocksR4, LocksR4Peak, LocksR8, LocksR8Peak
from harness.backends.retained import KVzipPairUniform, RandomPages
from harness.backends.selectors import (
    Centroid,
    CuboidMean,
    MeanStdScalar,
    MeanStdVector,
    Oracle,
    QuestGroup,
    SharedSvd8,
    SharedSvd32,
)
from harness.backends.untimed import SAME_STEP, Untimed
from harness.backends.window import SlidingWindow
from harness.case import Case
from harness.measure import measure_case
from harness.record import Outcome, Record
from harness.timer import Cycle
from harness.verify import Gate, Incorrect, check_eager
from locks_kernels import page_tokens, page_vectors, reference
from locks_kernels.cache import Sequences
from locks_kernels.decode import WHOLE_STEP
from locks_kernels.selectors import SELECTORS
from locks_kernels.shapes import DecodeShape, SelectOptions

RIVALS = [QuestGroup, CuboidMean, MeanStdVector, MeanStdScalar, Centroid, Oracle, SharedSvd8, SharedSvd32]
VARIANTS = [LocksR2, LocksR4, LocksR8Peak]
RETAINED = [KVzipPairUniform, RandomPages]


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


def measured(backend: type[Backend], case: Case) -> Record:
    made, key = {backend.name: backend()}, {backend.name: "key"}
    return measure_case(case, tiny_plan(case), made, key, bench(), lambda name: None)[0]


@pytest.mark.parametrize("backend", [*RIVALS, *VARIANTS, *RETAINED])
def test_selectors_are_measured_like_everybody(backend: type[Backend]) -> None:
    record = measured(backend, tiny_case())
    assert record.outcome is Outcome.OK, record.reason
    assert record.resolved["label"] == SELECTORS[backend.name].declaration.label
    assert sum(record.bytes.values()) > 0  # type: ignore[union-attr]


@pytest.mark.parametrize("ctx", [320, 327, 65])
@pytest.mark.parametrize("backend", VARIANTS)
def test_locks_at_other_options_passes_the_gate_and_leaves_the_workload_alone(backend: type[Backend], ctx: int) -> None:
    workload = tiny_workload(tiny_case(ctx))
    before = [cache.summaries.clone() for cache in workload.caches]
    one = backend()
    launches = [one.prepare(workload, copy) for copy in range(workload.plan.launches)]
    if backend is not LocksR8Peak:
        assert all(torch.equal(cache.summaries, was) for cache, was in zip(workload.caches, before, strict=True))
        assert one.bytes(workload.case)["summary"] < LocksR8Peak().bytes(workload.case)["summary"]
        assert one.side_bytes(workload.case) == 2 * {2: 256, 4: 320}[backend.rank]  # type: ignore[attr-defined]
    gate = Gate(workload)
    check_eager(gate, workload, one, launches, Cycle(workload.set_phase, tuple(workload.phases)))
    assert {"tables_sound", "kept_mass_of_best", "summary_error", "new_tokens_written"} <= set(gate.record()["checks"])


def test_a_variant_that_is_what_locks_is_in_a_case_is_not_timed_twice() -> None:
    for backend, changes in ((LocksR8, {}), (LocksR4, {"rank": 4})):
        assert "what `locks` is" in str(backend().supports(tiny_case(**changes)))
    assert "--rank 4 --combine peak" in str(LocksR4Peak().supports(tiny_case()))
    assert LocksR4Peak().side_bytes(tiny_case()) == LocksR8().side_bytes(tiny_case()) == 0


def test_a_variant_with_stale_summaries_gets_no_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reference, "finalise", lambda *arguments: None)
    with pytest.raises(Incorrect, match="summary_error"):
        gated(LocksR4(), tiny_case(320))


def test_a_shared_basis_with_stale_rows_gets_no_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(page_tokens, "finalise", lambda *arguments: None)
    with pytest.raises(Incorrect, match=r"summary_error|score|mass"):
        gated(SharedSvd8(), tiny_case(320))


@pytest.mark.parametrize("backend", RETAINED)
def test_a_table_made_once_is_attended_and_differs_by_head_and_layer(backend: Callable[[], Any]) -> None:
    workload, one = tiny_workload(tiny_case(320)), backend()
    launches = [one.prepare(workload, copy) for copy in range(2)]
    tables = [step.tables.clone() for step in one._inner]
    check_eager(Gate(workload), workload, one, launches, Cycle(workload.set_phase, tuple(workload.phases)))
    assert not torch.equal(*tables) and not torch.equal(tables[0][0, 0], tables[0][0, 1])
    assert (tables[0][..., 0] == 0).all() and (tables[0][..., -1] == 19).all(), "sink and open page"
    assert "divides" in str(one.supports(tiny_case(327)))


def test_every_selector_has_a_row_that_is_timed_or_says_why_not() -> None:
    made = {name: backends.make(name) for name in backends.names()}
    assert set(SELECTORS) <= set(made)
    for name in SELECTORS:
        backend = made[name]
        assert backend.name == name
        if isinstance(backend, Untimed):
            record = measured(type(backend), tiny_case())
            assert record.outcome is Outcome.SKIPPED and record.reason == f"not timed: {backend.reason}"
    assert all(isinstance(made[name], Untimed) and not isinstance(made[same], Untimed) for name, same in SAME_STEP.items())
    timed = {name for name in SELECTORS if not isinstance(made[name], Untimed)}
    assert {"quest-group", "locks-r4", "oracle", "shared-svd-r32", "kvzip-pair-uniform", "random-pages"} <= timed


@pytest.mark.parametrize("backend", [*RIVALS, *VARIANTS])
def test_names_and_bytes_are_those_of_fidelity(backend: type[Backend]) -> None:
    assert backend.name in SELECTORS and backend.name in backends.names()
    case = tiny_case(640)
    parts, stages = backend().bytes(case), backend().stage_bytes(case)
    assert sum(parts.values()) == sum(stages.values())
    shape = case.shape()
    wanted = SELECTORS[backend.name].score_bytes(shape, case.select, case.ctx) * shape.kv_heads * case.batch
    assert parts["summary"] == wanted


def test_stages_of_a_step_in_one_launch_have_its_bytes() -> None:
    backend, case = Locks(), tiny_case(640)
    backend._decoders = [SimpleNamespace(launches=[WHOLE_STEP])]  # type: ignore[list-item]
    assert backend.stage_bytes(case) == {WHOLE_STEP: sum(backend.bytes(case).values())}
