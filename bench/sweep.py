"""`locks-bench sweep`: measure a suite, and go on where it was stopped."""

from __future__ import annotations

from typing import Annotated

import typer

from bench import arguments, output
from bench.execute import Wishes, execute, open_store
from bench.options import Device, RowsJson, StoreDirectory, Strict, TimeBudget
from bench.request import device_of
from bench.suite import load_suite
from harness.errors import UserError
from reports.table import NO_CLAIM


def sweep(
    suite: Annotated[str, typer.Argument(metavar="SUITE", help="Name of a suite (see `list`), or a TOML file.")],
    device: Device = "auto",
    store: StoreDirectory = "results",
    json_to: RowsJson = None,
    time_budget: TimeBudget = None,
    strict: Strict = False,
) -> None:
    """Measure every case of a suite.  Stopped or killed, the same command goes on where it was."""
    asked = load_suite(suite)
    seconds = arguments.seconds(time_budget, "--time-budget") if time_budget is not None else None
    output.check_target(json_to)
    if asked.device == "cuda" and (device == "cpu" or device_of("auto") == "cpu"):
        raise UserError(
            f"suite {asked.name} needs a CUDA GPU; `locks-bench doctor` says whether one can be used here, "
            "`locks-bench sweep smoke` runs on a CPU"
        )
    used = device_of(asked.device or device if device == "auto" else device)
    if asked.device not in (None, used):
        raise UserError(f"suite {asked.name} is for device {asked.device}; leave --device out")
    cells = asked.cells(used)
    kept = open_store(store)
    for skip in asked.skips:
        what = f" of {', '.join(skip.backends)}" if skip.backends else ""
        output.say(
            f"the suite leaves out {', '.join(f'{axis}={value}' for axis, value in skip.where.items())}{what}: {skip.reason}"
        )
    if used == "cpu" and json_to == output.STDOUT:
        output.say(NO_CLAIM)
    execute(list(cells), cells.__getitem__, kept, Wishes(store, json_to, seconds, strict))
