"""`locks-bench compare`: is NEW faster or slower than BASE, cell by cell?"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from bench import output
from harness.errors import UserError
from harness.store import load
from harness.thresholds import load_thresholds
from harness.verdict import Comparison, ExitCode

Json = Annotated[str | None, typer.Option("--json", metavar="FILE", help="Write the verdicts as JSON; - is stdout.")]
Markdown = Annotated[str | None, typer.Option(metavar="FILE", help="Append a GitHub-flavoured summary to FILE.")]
Thresholds = Annotated[str | None, typer.Option(metavar="TOML", help="Smallest change that counts, by cell.  [default: 1 %]")]


def compare(
    base: Annotated[str, typer.Argument(metavar="BASE", help="Store, folder of stores, or .jsonl file.")],
    new: Annotated[str, typer.Argument(metavar="NEW", help="The same for what is judged.")],
    thresholds: Thresholds = None,
    json_to: Json = None,
    markdown: Markdown = None,
) -> None:
    """Compare two sets of records.  Exit codes: 0 ok, 1 slower, 2 invalid or unclear, 3 not comparable."""
    output.check_target(json_to)
    limits = load_thresholds(Path(thresholds)) if thresholds else []
    before, after = load([base], output.say), load([new], output.say)

    from harness.compare import Rules
    from harness.compare import compare as compared

    result = compared(before, after, Rules(thresholds=limits))
    show_verdicts(result, result.exit_code, json_to, markdown)
    raise typer.Exit(int(result.exit_code))


def show_verdicts(result: Comparison, code: ExitCode, json_to: str | None, markdown: str | None) -> None:
    """Table on stdout, or JSON there; the Markdown is appended, as the summary file of a pipeline asks for."""
    from reports.verdicts import verdict_markdown, verdict_report

    output.show(result.to_dict() | {"exit_code": int(code)}, verdict_report(result, code), json_to)
    if markdown:
        try:
            with Path(markdown).open("a") as file:
                file.write(verdict_markdown(result, code))
        except OSError as error:
            raise UserError(f"--markdown {markdown} cannot be written ({error.strerror}); choose another file") from error
