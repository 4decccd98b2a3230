"""The kernels as a pytest-benchmark suite, in GPU time, after the same gate as every row.

    pytest ci/bench_kernels.py --benchmark-json new.json
    pytest-benchmark compare old.json new.json

A time is that of one step of one layer, by CUDA events around a graph (on a CPU: by the clock).  For verdicts use
`locks-bench compare`: this one knows no A/A comparison and no machine.
"""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch

from harness import backends, workload
from harness.case import Case
from harness.contestant import prepare
from harness.measure import blank_record
from harness.memory import DeviceMemory, plan_memory
from harness.presets import find_model
from harness.stopping import StoppingRule
from harness.worker import timer
from locks_kernels.shapes import SelectOptions

GPU = torch.cuda.is_available()
ROUNDS = 30 if GPU else 5
CASES = [("llama-3.1-8b", 8192, 1, 2048), ("llama-3.1-8b", 131072, 1, 2048), ("llama-3.1-8b", 131072, 16, 2048)]
NAMES = ["flashinfer", "locks-triton", "locks-cuda"] if GPU else ["sdpa", "locks"]


class Clock:
    """Passes only while a kernel runs: pytest-benchmark reads it where it would read the time of the host."""

    seconds = 0.0

    def __call__(self) -> float:
        return self.seconds


CLOCK = Clock()


@pytest.mark.benchmark(timer=CLOCK)
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(("model", "ctx", "batch", "budget"), CASES if GPU else [("4x2x64", 2048, 1, 512)])
def test_step(benchmark: Any, name: str, model: str, ctx: int, batch: int, budget: int) -> None:
    device = "cuda" if GPU else "cpu"
    case = Case("attention", find_model(model), ctx, batch, SelectOptions(budget), device=device)  # type: ignore[arg-type]
    backend = backends.make(name)
    if reason := backend.unavailable() or backend.supports(case):
        pytest.skip(reason)
    plan = plan_memory(case, DeviceMemory.now(device))
    record = blank_record(case, plan, name, backend, key="", command="", environment={})
    data = workload.build(case, plan, device)
    ready = prepare(case, data, backend, timer(device), StoppingRule(), record, time.perf_counter)

    def step() -> None:
        CLOCK.seconds += ready.run.samples(1)[0] * 1e-9

    benchmark.group = f"{model} {ctx} x {batch}"
    benchmark.extra_info.update(timer=record.timer or timer(device).label, resolved=record.resolved, gate=record.gate)
    benchmark.pedantic(step, rounds=ROUNDS, iterations=1, warmup_rounds=1)
