"""`locks-bench sweep`: measure a suite, and go on where it was stopped."""

from __future__ import annotations

from typing import Annotated

import typer

from bench import arguments, output
from bench.execute import Wishes, execute, open_store
from bench.request import device_of
from bench.suite import load_suite
from harness.errors import UserError
from reports.table import NO_CLAIM


def sweep(
    suite: Annotated[str, typer.Argument(metavar="SUITE", help="Name of a suite (see `list`), or a TOML file.")],
    device: Annotated[str, typer.Option(help="auto, cuda or cpu.")] = "auto",
    store: Annotated[str, typer.Option(metavar="DIR", help="Where records are kept; what it holds is not measured again.")] = (
        "results"
    ),
    json_to: Annotated[str | None, typer.Option("--json", metavar="FILE", help="Write the rows as JSON; - is stdout.")] = None,
    time_budget: Annotated[str | None, typer.Option(help="Bound on the whole sweep, such as 10m.")] = None,
    strict: Annotated[bool, typer.Option("--strict", help="Exit with 1 if a row is not OK or was left out.")] = False,
) -> None:
    """Measure every case of a suite.  Stopped or killed, the same command goes on where it was."""
    asked = load_suite(suite)
    seconds = arguments.seconds(time_budget, "--time-budget") if time_budget else None
    output.check_target(json_to)
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
