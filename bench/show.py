"""`locks-bench show`: the rows of stored records."""

from __future__ import annotations

from collections.abc import Container
from typing import Annotated

import typer

from bench import arguments, output
from bench.options import RowsJson
from harness.errors import UserError
from harness.store import load
from reports.rows import rows


def show(
    stores: Annotated[list[str], typer.Argument(metavar="STORE...", help="Stores, folders of stores, or .jsonl files.")],
    ctx: Annotated[str | None, typer.Option(help="Only these contexts, such as 8K,1M.")] = None,
    batch: Annotated[str | None, typer.Option(help="Only these batches.")] = None,
    model: Annotated[str | None, typer.Option(help="Only these models.")] = None,
    level: Annotated[str | None, typer.Option(help="Only these levels.")] = None,
    backend: Annotated[str | None, typer.Option("--backend", "--backends", help="Only these backends.")] = None,
    json_to: RowsJson = None,
) -> None:
    """Show the rows of stored records: same columns and --json as `latency`."""
    output.check_target(json_to)
    wanted: dict[str, Container[object]] = {}
    if ctx is not None:
        wanted["ctx"] = arguments.sizes(ctx, "--ctx")
    if batch is not None:
        wanted["batch"] = arguments.sizes(batch, "--batch")
    for name, text in (("model", model), ("level", level), ("backend", backend)):
        if text is not None:
            wanted[name] = arguments.names(text)
    # Filtered after rows() has compared each with its dense rivals, which the filter may leave out.
    table = rows(load(stores, output.say))
    kept = [row for row in table if all(row[name] in values for name, values in wanted.items())]
    if not table:
        raise UserError("these stores hold no records yet; `locks-bench latency --store DIR` makes some")
    if not kept:
        raise UserError(f"none of the {len(table)} rows there match; the same command without filters shows them")
    # Cells of one case stand together, whichever run measured them.
    output.show_rows(sorted(kept, key=lambda row: (row["level"], row["model"], row["ctx"], row["batch"])), json_to)
