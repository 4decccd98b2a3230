"""Options that several subcommands have in common."""

from __future__ import annotations

from typing import Annotated

import typer

Device = Annotated[str, typer.Option(help="auto, cuda or cpu.")]
RowsJson = Annotated[str | None, typer.Option("--json", metavar="FILE", help="Write the rows as JSON; - is stdout.")]
StoreDirectory = Annotated[
    str, typer.Option(metavar="DIR", help="Where records are kept; what it holds is not measured again.")
]
Strict = Annotated[bool, typer.Option("--strict", help="Exit with 1 if a row is not OK or was left out.")]
TimeBudget = Annotated[str | None, typer.Option(help="Bound on the whole sweep, such as 10m: no case begins after it.")]
