"""`locks-bench`: the subcommands put together, and the one place where errors become text and exit codes."""

from __future__ import annotations

import contextlib
import errno
import sys

import typer

from bench.compare import compare
from bench.doctor import doctor
from bench.fidelity import fidelity
from bench.gate import gate
from bench.latency import latency
from bench.listing import list_
from bench.profile import profile
from bench.report import report
from bench.show import show
from bench.sweep import sweep
from harness.errors import UserError
from locks_kernels.shapes import ShapeError

app = typer.Typer(
    name="locks-bench",
    help="Trustworthy numbers on LOCKS sparse decode attention against dense rivals.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,  # which takes "[default: ...]" in a help text for markup, and drops it
)
app.command()(latency)
app.command()(sweep)
app.command()(show)
app.command()(report)
app.command()(compare)
app.command()(fidelity)
app.command()(gate)
app.command()(profile)
app.command("list")(list_)
app.command()(doctor)


def main() -> None:
    """Entry point.  Exit codes: 0 done, 1 a row is not OK under --strict, 2 bad input or a machine that cannot do it;
    `compare` and `gate` tell theirs in their --help."""
    try:
        app()
    except (UserError, ShapeError) as error:
        print(f"error: {' '.join(str(error).split())}", file=sys.stderr)
        sys.exit(2)
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise
        where = f" ({error.filename})" if error.filename else ""
        print(f"error: no space left to write to{where}; make room, then run the same command again", file=sys.stderr)
        with contextlib.suppress(OSError):
            sys.stdout.close()  # what is left in it cannot be written either
        sys.exit(2)


if __name__ == "__main__":
    main()
