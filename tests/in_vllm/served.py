"""Runs jobs of engine.py and compares what two of them generated."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

ENGINE = Path(__file__).with_name("engine.py")
QUIET = {"HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1", "VLLM_USE_FLASHINFER_SAMPLER": "0"}


def run(
    model: Path,
    rounds: list[dict[str, Any]],
    out: Path,
    settings: object = None,
    watch: bool = False,
    probe: bool = False,
    environment: dict[str, str] | None = None,
    **args: Any,
) -> subprocess.CompletedProcess[str]:
    """One engine with LOCKS_VLLM as `settings` (None: not set; text goes as it is); its result is in `out`."""
    inherited = {name: value for name, value in os.environ.items() if name != "LOCKS_VLLM"}
    environment = inherited | QUIET | (environment or {})
    if settings is not None:
        environment["LOCKS_VLLM"] = settings if isinstance(settings, str) else json.dumps(settings)
    job = {"model": str(model), "args": args, "rounds": rounds, "watch": watch, "probe": probe, "out": str(out)}
    return subprocess.run(
        [sys.executable, str(ENGINE)], input=json.dumps(job), text=True, capture_output=True, env=environment, timeout=1800
    )


def result(model: Path, rounds: list[dict[str, Any]], out: Path, settings: object = None, **more: Any) -> dict[str, Any]:
    done = run(model, rounds, out, settings, **more)
    assert done.returncode == 0, (done.stdout + done.stderr)[-6000:]
    return json.loads(out.read_text()) | {"log": done.stdout + done.stderr}


def differing(one: dict[str, Any], other: dict[str, Any], gap: float) -> list[str]:
    """Where two rounds say different things and rounding does not explain it.

    The first difference of a sequence is explained if each run had the other's token among its likely ones, at most `gap` nats
    behind; what follows then has another past and is not compared.
    """
    wrong = []
    for row, (a, b) in enumerate(zip(one["tokens"], other["tokens"], strict=True)):
        at = next((step for step, (x, y) in enumerate(zip(a, b, strict=True)) if x != y), None)
        if at is None:
            continue
        behind = []  # nats, of the other's token in each run
        for run_, mine, theirs in ((one, a[at], b[at]), (other, b[at], a[at])):
            likely = run_["logprobs"][row][at]
            behind.append(likely[str(mine)] - likely.get(str(theirs), float("-inf")))
        if max(behind) > gap:
            wrong.append(f"row {row}, step {at}: {a[at]} against {b[at]}, behind by {behind[0]:.3f} and {behind[1]:.3f} nats")
    return wrong
