"""Stores for the report: every outcome, missing values, names that are markup, several machines, old schemas, many rows."""

from __future__ import annotations

import random
from dataclasses import asdict
from typing import Any

from fake_records import case, failed, measured

from harness.fidelity_record import DENOMINATORS, FidelityRecord
from harness.record import Outcome, Record
from locks_kernels.cost import dense_bytes, locks_bytes

ROOF = 4.5
HOSTILE = '<script>alert("x")</script>'
CONTEXTS = (8192, 32768, 131072, 1 << 20)
BATCHES = (1, 4, 16)
FULL = {
    "gpu": {"name": "NVIDIA H200", "sm_count": 132, "l2_bytes": None},
    "commit": "0123456789abcdef",
    "dirty": False,
    "driver": None,
}


def noisy(of: Any, backend: str, microseconds: float, *, rounds: int = 12, samples: int = 4, **changes: Any) -> Record:
    """An OK record whose rounds scatter by about half a percent, seeded by what it is."""
    dice = random.Random(f"{backend} {of.ctx} {of.batch} {changes.get('time')}")
    drawn = [[1e3 * microseconds * dice.gauss(1, 0.005) for _ in range(samples)] for _ in range(rounds)]
    values = {
        "rounds_ns": drawn,
        "environment": FULL,
        "read_roof_tbps": ROOF,
        "stop_reason": "interval: narrow",
        "timer": "cuda_graph",
        "gate": {"relative_error": 0.002, "tolerance": 0.01, "checks": {}},
    }
    return measured(of, backend, microseconds, **(values | changes))


def typical(of: Any, backend: str, **changes: Any) -> Record:
    """A row that looks like one of a GPU: a start-up time and its bytes at some share of the roof."""
    dense = not backend.startswith("locks")
    parts = dense_bytes(of.shape(), of.ctx, of.batch) if dense else locks_bytes(of.shape(), of.select, of.ctx, of.batch)
    start, share = {"fa3": (11, 0.9), "flashinfer": (10, 0.92), "locks": (19, 0.8)}.get(backend, (30, 0.5))
    time = start + sum(parts.values()) / (share * ROOF) / 1e6
    if not dense:
        changes.setdefault(
            "stages_ns", {"score": [0.7e3 * time] * 3, "select": [0.1e3 * time] * 3, "attend": [0.2e3 * time] * 3}
        )
        changes.setdefault(
            "stage_bytes", {"score": parts["summary"], "select": parts["scores"], "attend": parts["selected_kv"]}
        )
    return noisy(of, backend, time, key=f"{backend}-{of.ctx}-{of.batch}-{of.level}-{changes.get('time')}", **changes)


def grid() -> list[Record]:
    """Contexts x batches of four backends, all OK."""
    cases = [case(ctx=ctx, batch=batch) for ctx in CONTEXTS for batch in BATCHES]
    return [typical(of, backend) for of in cases for backend in ("fa3", "flashinfer", "locks", "locks-triton")]


def every_outcome() -> list[Record]:
    """The grid with one row of each way to fail, in place of what was OK, and failures with samples left in them."""
    records = grid()
    failures = [outcome for outcome in Outcome if outcome is not Outcome.OK]
    for place, outcome in zip(range(2, len(records), 5), failures, strict=False):
        before = records[place]
        broken = Record.from_dict(asdict(before))
        broken.outcome, broken.reason = outcome, f"{outcome}: because of <b>this & that</b>"
        broken.rounds_ns = [[7777.0, 7777.0]] * 3  # what no figure may show
        records[place] = broken
    other = {"gpu": {"name": "NVIDIA Another", "sm_count": 80}, "commit": None}
    records += [
        typical(case(ctx=8192), HOSTILE, environment=FULL),
        failed(case(ctx=32768), HOSTILE, Outcome.SKIPPED, HOSTILE, environment=FULL, key="hostile"),
        failed(case(ctx=2048), "fa3", Outcome.CRASHED, None, environment={}, key="bare", timer=None, read_roof_tbps=None),  # type: ignore[arg-type]
        *(typical(case(ctx=ctx, level="token"), backend) for ctx in CONTEXTS for backend in ("fa3", "locks")),
        typical(case(ctx=8192), "fa3", environment=other, time="2026-01-01T00:00:00Z"),
    ]
    return records


def two_runs() -> list[Record]:
    """The same cases a day apart: one slower, one lost, the rest alike."""
    cases = [case(ctx=ctx) for ctx in CONTEXTS]
    before = [typical(of, backend, time="2026-01-01T00:00:00Z") for of in cases for backend in ("fa3", "locks")]
    later = FULL | {"commit": "fedcba9876543210"}
    after = [
        typical(of, backend, time="2026-01-02T00:00:00Z", environment=later) for of in cases for backend in ("fa3", "locks")
    ]
    after[1].rounds_ns = [[1.25 * sample for sample in samples] for samples in after[1].rounds_ns or []]
    after[3].outcome, after[3].reason = Outcome.OOM, "out of memory"
    return before + after


def old_schema() -> dict[str, Any]:
    """A record as JSON from before most fields were there."""
    of = case(ctx=8192)
    old_case = {name: value for name, value in asdict(of).items() if name not in ("select", "kv", "device", "rank")}
    return {
        "key": "old",
        "time": "2025-01-01T00:00:00Z",
        "command": "locks-bench latency",
        "case": old_case,
        "backend": "fa3",
        "outcome": "OK",
        "rounds_ns": [[1000.0, 1010.0], [1005.0]],
        "schema": 0,
        "gone_since": True,
    }


def fidelity() -> list[FidelityRecord]:
    """Two samples of two selectors at two budgets; one selector could not run on a third."""
    records = []
    for selector, mass, read in (("locks-r8", 0.8, 1.0), ("quest", 0.88, 3.0)):
        for budget in (512, 2048):
            for sample in (0, 1):
                less = 0.1 if budget == 512 else 0.0
                records.append(
                    FidelityRecord(
                        key=f"{selector}-{budget}-{sample}",
                        time="2026-01-01T00:00:00Z",
                        command="locks-bench fidelity",
                        trace={"model": "llama-3.1-8b", "ctx": 8192, "seed": sample, "agrees": 1.0, "energy": {"8": 0.9}},
                        selector=selector,
                        declaration={
                            **{"label": selector, "granularity": "KV head", "forced_in_budget": True},
                            **{"dense_layers": [], "question_visible": False},
                        },
                        budget=budget,
                        outcome=Outcome.OK,
                        mass=mass + 0.1 * sample - less,
                        oracle_mass=1.0,
                        error=0.05,
                        recall=0.9,
                        retention={name: {"strict": [1, 2], "loose": [2, 2]} for name in DENOMINATORS},
                        attended=float(budget),
                        bytes={"score": read, "attend": 4.0, "full": 100.0},
                        active=True,
                    )
                )
    return records


def many(count: int) -> list[Record]:
    """`count` rows over models, levels, budgets and machines; one in ten failed."""
    records = []
    dice = random.Random(0)
    backends = ("fa3", "flashinfer", "sdpa", "locks", "locks-triton", "locks-cuda")
    for number in range(count):
        place, backend = divmod(number, len(backends))
        group, cell = divmod(place, 36)
        of = case(ctx=8192 << (cell % 6), batch=1 << (cell // 6), level="token" if group % 2 else "attention", seed=group // 4)
        machine = {"gpu": {"name": f"GPU {group // 2 % 2}"}, "commit": "abc"}
        base = {"key": f"row-{number}", "environment": machine, "time": "2026-01-01T00:00:00Z"}
        if dice.random() < 0.1:
            records.append(failed(of, backends[backend], Outcome.OOM, f"out of memory at {of.ctx}", **base))
        else:
            records.append(noisy(of, backends[backend], dice.uniform(10, 1000), rounds=12, samples=8, **base))
    return records
