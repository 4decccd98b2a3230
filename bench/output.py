"""Where results go: JSON rows to a file or to stdout, tables to stdout, everything else to stderr."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console, RenderableType

from harness.errors import UserError
from reports.rows import Row
from reports.table import latency_report

STDOUT = "-"


def say(line: str) -> None:
    """One line for the person at the terminal."""
    print(line, file=sys.stderr, flush=True)


def check_target(target: str | None) -> None:
    """UserError if --json FILE cannot be written: before an hour of measuring, not after it."""
    if target not in (None, STDOUT):
        try:
            with Path(target).open("a"):
                pass
        except OSError as error:
            raise _unwritable(target, error) from error


def show_rows(table: Sequence[Row], target: str | None) -> None:
    """The table on stdout, or pure JSON there with --json -; with --json FILE both."""
    show(table, latency_report(table), target)


def show(data: object, shown: RenderableType, target: str | None) -> None:
    """`shown` on stdout, `data` as JSON where --json says; only the JSON if that is stdout."""
    text = json.dumps(data, indent=1, allow_nan=False)
    if target == STDOUT:
        print(text)
        return
    if target is not None:
        try:
            Path(target).write_text(text + "\n")
        except OSError as error:
            raise _unwritable(target, error) from error
    print_wide(shown)


def print_wide(shown: RenderableType) -> None:
    """Print without cutting columns, however narrow the terminal or the pipe is."""
    console = Console()
    needed = console.measure(shown, options=console.options.update(width=1000)).maximum
    Console(width=max(console.width, needed)).print(shown)


def _unwritable(target: str, error: OSError) -> UserError:
    return UserError(f"--json {target} cannot be written ({error.strerror}); choose another file, or - for stdout")
