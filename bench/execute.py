"""Measure what a command asked for, and show it: what `latency` and `sweep` have in common."""

from __future__ import annotations

import shlex
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from bench import output
from harness.case import Case
from harness.store import Store
from reports.rows import rows

if TYPE_CHECKING:
    from harness.record import Record
    from harness.run import Event, RunOptions

Backends = Sequence[str] | Callable[[Case], Sequence[str]]  # of all cases, or of one


@dataclass(frozen=True)
class Wishes:
    """Options of both commands, as typed; time_budget_s in seconds; model_path: of level engine."""

    store: str
    json_to: str | None
    time_budget_s: float | None
    strict: bool
    model_path: str | None = None


def execute(cases: Sequence[Case], backends: Backends, store: Store, wishes: Wishes) -> None:
    """Run the sweep with a progress bar; the table or JSON at its end.  Exit code 1 under --strict for any row not OK."""
    from bench.progress import Progress
    from harness.run import RunOptions

    options = RunOptions(time_budget_s=wishes.time_budget_s, command=shlex.join(["locks-bench", *sys.argv[1:]]))
    rows_expected = sum(len(backends(case) if callable(backends) else backends) for case in cases)
    with Progress(rows_expected) as progress:
        try:
            records = _measure(cases, backends, store, options, wishes, progress.on_event)
        except KeyboardInterrupt:
            output.say(f"stopped; what was measured is in {wishes.store}, and the same command goes on from there")
            raise
    output.show_rows(rows(records), wishes.json_to)
    for line in progress.closing_lines(wishes.store):
        output.say(line)
    if wishes.strict and (progress.left_out or any(record.outcome != "OK" for record in records)):
        raise typer.Exit(1)


def _measure(
    cases: Sequence[Case],
    backends: Backends,
    store: Store,
    options: RunOptions,
    wishes: Wishes,
    on_event: Callable[[Event], None],
) -> list[Record]:
    """Cells of level engine by their own runner, which shares an engine between them; the others before them."""
    from harness.engine.cells import EngineCase
    from harness.run import run_sweep

    begun = time.monotonic()
    engine_cases = [case for case in cases if isinstance(case, EngineCase)]
    records = run_sweep([case for case in cases if case not in engine_cases], backends, store, options, on_event)
    if engine_cases:
        from harness.engine.run import EngineOptions, run_engines

        if options.time_budget_s is not None:
            options = replace(options, time_budget_s=options.time_budget_s - (time.monotonic() - begun))
        records += run_engines(
            engine_cases, backends, store, options, EngineOptions.of(Path(wishes.store), wishes.model_path), on_event
        )
    return records


def open_store(directory: str) -> Store:
    """The store to append to; UserError before anything is measured."""
    return Store(Path(directory), output.say)
