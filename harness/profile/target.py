"""The process that a profiler watches: one case, one backend, and between start and stop of the profiler one step."""

from __future__ import annotations

import contextlib
import json
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from harness import backends, workload
from harness.case import Case
from harness.level import level_launch
from harness.memory import DeviceMemory, SideMemory, plan_memory, tensor_parallel
from harness.profile.ncu import STAGE_PREFIX
from harness.rerun import case_of
from harness.weights import resident_weight_bytes

WARM_STEPS = 3  # compilation and tuning are over by then
Step = dict[str, Callable[[], object]]


def prepare(case: Case, name: str, pooled: bool) -> Step:
    """The launches of one step by stage, warm: at level attention one layer, at level token the whole step.

    One copy of the cache is enough: Nsight Compute flushes the caches, and the other tools say nothing of bytes.
    """
    case = replace(case, kv="pooled" if pooled else case.kv if case.kv.startswith("tp=") else "layers=1")
    weights = resident_weight_bytes(case.model, tensor_parallel(case), case.dtype) if case.level == "token" else 0
    backend = backends.make(name)
    plan = plan_memory(case, DeviceMemory.now(case.device), weights, SideMemory.of(case, [backend]))
    data = workload.build(case, plan, case.device)
    launches = [backend.prepare(data, copy) for copy in range(plan.launches if case.level == "token" else 1)]
    data.set_phase(0)
    step: Step = dict(backend.stages(data, 0)) if case.level == "attention" else {}
    step = step or {"step": level_launch(case, data, backend, launches).launch}
    for _ in range(WARM_STEPS):
        for launch in step.values():
            launch()
    _wait(case)
    return step


def watched(case: Case, step: Step) -> None:
    """One step between start and stop of the CUDA profiler, each stage in an NVTX range."""
    cuda = case.device == "cuda"
    if cuda:
        torch.cuda.profiler.start()
    for name, launch in step.items():
        with torch.cuda.nvtx.range(STAGE_PREFIX + name) if cuda else contextlib.nullcontext():
            launch()
    _wait(case)
    if cuda:
        torch.cuda.profiler.stop()


def traced(case: Case, step: Step, trace: Path) -> list[dict[str, Any]]:
    """One step under torch's profiler: writes a Chrome trace, returns time and launches by kernel (by operator on a CPU)."""
    from torch.profiler import ProfilerActivity, profile, record_function

    cuda = case.device == "cuda"
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if cuda else [])]
    with profile(activities=activities) as profiler:
        for name, launch in step.items():
            with record_function(STAGE_PREFIX + name):
                launch()
        _wait(case)
    profiler.export_chrome_trace(str(trace))
    result = []
    for event in profiler.key_averages():
        own = event.self_device_time_total if cuda else event.self_cpu_time_total
        on_device = str(event.device_type).endswith("CUDA" if cuda else "CPU")
        if own > 0 and on_device and not event.key.startswith(STAGE_PREFIX):
            result.append({"name": event.key, "launches": event.count, "duration_ns": own * 1e3})
    return result


def _wait(case: Case) -> None:
    if case.device == "cuda":
        torch.cuda.synchronize()


def main() -> None:
    """`python -m harness.profile.target JOB`; JOB is a JSON file: case, backend, pooled; for torch's profiler trace, sums."""
    job = json.loads(Path(sys.argv[1]).read_text())
    case = case_of(job["case"])
    step = prepare(case, job["backend"], job["pooled"])
    if job.get("trace"):
        Path(job["sums"]).write_text(json.dumps(traced(case, step, Path(job["trace"]))))
    else:
        watched(case, step)


if __name__ == "__main__":
    main()
