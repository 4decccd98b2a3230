"""`locks-bench profile`: what a profiler says about one stored row."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Group

from bench import arguments, output
from harness.compare import CONTROL, cell_name, timed
from harness.environment import kernel_sources
from harness.errors import UserError
from harness.record import Record
from harness.store import Store, load


def profile(
    case: Annotated[
        str, typer.Argument(metavar="CASE", help='Words that only one row has, such as "128K x 16 flashinfer", or its key.')
    ],
    tool: Annotated[str, typer.Option(help="ncu: bytes.  nsys: where the time goes.  torch: a trace for a viewer.")] = "ncu",
    store: Annotated[str, typer.Option(metavar="DIR", help="Store with the row, which gets the profile.")] = "results",
    timeout: Annotated[str, typer.Option(help="Bound on the profiled run, such as 10m.")] = "10m",
    json_to: Annotated[
        str | None, typer.Option("--json", metavar="FILE", help="Write the result as JSON; - is stdout.")
    ] = None,
    strict: Annotated[
        bool, typer.Option("--strict", help="Exit with 1 if the profile or its bytes are not as they should.")
    ] = False,
) -> None:
    """Run one stored case once more under a profiler; its bytes stand beside the analytic ones."""
    output.check_target(json_to)
    limit_s = arguments.seconds(timeout, "--timeout")
    record = find_row(load([store], output.say), case)
    if record.environment.get("kernel_sources") != kernel_sources():
        raise UserError(f"the kernels have changed since {cell_name(record)} was measured; measure it again, then profile")

    from harness.profile.result import Status
    from harness.profile.run import joined
    from harness.profile.run import profile as run_profile
    from reports.bytes_table import byte_rows, bytes_report, kernels_report

    found = run_profile(record, tool, Path(store) / "traces", limit_s)
    row = joined(record, found)
    Store(Path(store), output.say).append(row)
    (compared,) = byte_rows([row])
    tables = [kernels_report(found.record())] if found.kernels else []
    output.show({"profile": found.record(), "bytes": compared}, Group(*tables, bytes_report([row])), json_to)
    if found.status is not Status.OK:
        output.say(f"{found.status}: {found.reason}; {found.hint}")
    if found.trace:
        output.say(f"trace: {found.trace}")
    if strict and (found.status is not Status.OK or compared["flag"]):
        raise typer.Exit(1)


def find_row(records: list[Record], wanted: str) -> Record:
    """The one timed row whose key begins with `wanted`, or whose name has all its words in this order."""
    rows = [record for record in records if timed(record) and not record.backend.endswith(CONTROL)]
    latest = {cell_name(record): record for record in rows if record.key.startswith(wanted)} or {
        cell_name(record): record for record in rows if _within(wanted.split(), cell_name(record).split())
    }
    if len(latest) == 1:
        return next(iter(latest.values()))
    if not latest:
        raise UserError(f"no timed row matches {wanted!r} (of {len(rows)}); measure it first, or see `locks-bench show`")
    names = "; ".join(list(latest)[:5])
    raise UserError(f"{len(latest)} rows match {wanted!r}: {names}{' ...' if len(latest) > 5 else ''}; add words")


def _within(words: list[str], name: list[str]) -> bool:
    """Whether all words are in the name, in this order."""
    rest = iter(name)
    return bool(words) and all(word in rest for word in words)
