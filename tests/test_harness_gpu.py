"""The measuring core on a real GPU: what no fake can show."""

from __future__ import annotations

import pytest
import torch
from harness_fakes import tiny_case

from harness.backend import Backend, Launch
from harness.backends.fa3 import Fa3
from harness.backends.flashinfer import FlashInfer
from harness.backends.locks import Locks, LocksCuda, LocksTriton
from harness.backends.sdpa import Sdpa
from harness.case import Case
from harness.level import LevelLaunch, attention_launch
from harness.measure import Bench, measure_case
from harness.memory import DeviceMemory, plan_memory
from harness.presets import find_model
from harness.record import Outcome, Record
from harness.roof import read_roof_tbps
from harness.stats import median_interval
from harness.stopping import StoppingRule
from harness.timer import CaptureError, Cycle, GraphTimer
from harness.workload import Workload
from locks_kernels.decode import WHOLE_STEP
from locks_kernels.shapes import SelectOptions

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

QUICK = StoppingRule(rounds=5, timed_s=0.05, limit_s=2.0, warm_s=0.5)


def measure(case: Case, *backends: type[Backend]) -> dict[str, Record]:
    made = {backend.name: backend() for backend in backends}
    plan = plan_memory(case, DeviceMemory.now("cuda"))
    bench = Bench(GraphTimer(), QUICK, {}, "test", read_roof_tbps("cuda"))
    records = measure_case(case, plan, made, dict.fromkeys(made, "key"), bench, lambda name: None)
    return {record.backend: record for record in records}


def llama(ctx: int, batch: int = 1, **changes: object) -> Case:
    return Case("attention", find_model("llama-3.1-8b"), ctx, batch, SelectOptions(2048), **changes)  # type: ignore[arg-type]


def latency(record: Record) -> float:
    assert record.outcome is Outcome.OK, (record.outcome, record.reason, record.gate)
    return median_interval(record.rounds_ns or [])[0]


class LooksFromTheHost(Sdpa):
    name = "looks-from-the-host"

    def prepare(self, workload: Workload, copy: int) -> Launch:
        launch = super().prepare(workload, copy)

        def looking() -> torch.Tensor:
            out = launch()
            out.sum().item()
            return out

        return looking


def test_capture_failure_is_typed_and_the_next_backend_still_runs() -> None:
    records = measure(llama(8192), LooksFromTheHost, Sdpa)
    failed = records["looks-from-the-host"]
    assert failed.outcome is Outcome.CAPTURE_FAILED and failed.eager_ns and failed.rounds_ns is None
    assert latency(records["sdpa"]) > 0


def test_a_launch_on_another_stream_is_no_measurement() -> None:
    x = torch.ones(1 << 20, device="cuda")

    def legacy() -> torch.Tensor:
        with torch.cuda.stream(torch.cuda.default_stream()):
            return x + 1

    with pytest.raises(CaptureError):
        GraphTimer().capture(LevelLaunch(legacy, 1), Cycle(lambda phase: None))
    torch.cuda.synchronize()
    run = GraphTimer().capture(LevelLaunch(lambda: x + 1, 1), Cycle(lambda phase: None))
    assert run.samples(3)[0] > 0


def test_a_copy_runs_near_the_roof() -> None:
    source = torch.ones(1 << 29, dtype=torch.bfloat16, device="cuda")
    target = torch.empty_like(source)
    level = attention_launch([lambda: target.copy_(source)] * 2)
    nanoseconds = min(GraphTimer().capture(level, Cycle(lambda phase: None)).samples(5))
    assert 0.4 < 2 * source.nbytes / nanoseconds / 1e3 / read_roof_tbps("cuda") < 1.05


def test_same_cell_twice_agrees_with_another_between() -> None:
    first, _, third = (latency(measure(llama(ctx), Sdpa)["sdpa"]) for ctx in (8192, 16384, 8192))
    assert third == pytest.approx(first, rel=0.03)


@pytest.mark.parametrize("ctx", [4096, 4099, 32768])
@pytest.mark.parametrize("backend", [LocksTriton, LocksCuda, FlashInfer, Fa3])
def test_backends_pass_the_gate(backend: type[Backend], ctx: int) -> None:
    record = measure(llama(ctx, 2), backend)[backend.name]
    if record.outcome is Outcome.SKIPPED:
        pytest.skip(record.reason or "")
    assert latency(record) > 0
    if issubclass(backend, Locks):
        launches = ["append_finalise"] if backend is LocksTriton else []
        assert record.resolved["launches"] in ([*launches, "score", "select", "attend"], [WHOLE_STEP])
        assert list(record.stages_ns or {}) == record.resolved["launches"]


def test_pooled_sequences() -> None:
    records = measure(llama(16384, 8, kv="pooled"), Fa3, FlashInfer, LocksTriton)
    assert records["fa3"].outcome is Outcome.SKIPPED
    assert records["locks-triton"].outcome is Outcome.OK and records["locks-triton"].cache_state == "pooled"


def test_other_geometries() -> None:
    for changes in ({"dtype": "float16"}, {"page_size": 32, "select": SelectOptions(128)}):
        record = measure(tiny_case(2050, device="cuda", **changes), LocksTriton)["locks-triton"]
        assert record.outcome is Outcome.OK, record.reason
