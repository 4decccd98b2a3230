"""Measure what a command asked for, and show it: what `latency` and `sweep` have in common."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import typer

from bench import output
from harness.case import Case
from harness.store import Store
from reports.rows import rows

Backends = Sequence[str] | Callable[[Case], Sequence[str]]  # of all cases, or of one


@dataclass(frozen=True)
class Wishes:
    """Options of both commands, as typed; time_budget_s in seconds."""

    store: str
    json_to: str | None
    time_budget_s: float | None
    strict: bool


def execute(cases: Sequence[Case], backends: Backends, store: Store, wishes: Wishes) -> None:
    """Run the sweep with a progress bar; the table or JSON at its end.  Exit code 1 under --strict for any row not OK."""
    from bench.progress import Progress
    from harness.run import RunOptions, run_sweep

    options = RunOptions(time_budget_s=wishes.time_budget_s, command=shlex.join(["locks-bench", *sys.argv[1:]]))
    rows_expected = sum(len(backends(case) if callable(backends) else backends) for case in cases)
    with Progress(rows_expected) as progress:
        try:
            records = run_sweep(cases, backends, store, options, progress.on_event)
        except KeyboardInterrupt:
            output.say(f"stopped; what was measured is in {wishes.store}, and the same command goes on from there")
            raise
    output.show_rows(rows(records), wishes.json_to)
    for line in progress.closing_lines(wishes.store):
        output.say(line)
    if wishes.strict and (progress.left_out or any(record.outcome != "OK" for record in records)):
        raise typer.Exit(1)


def open_store(directory: str) -> Store:
    """The store to append to; UserError before anything is measured."""
    return Store(Path(directory), output.say)
