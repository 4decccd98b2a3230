"""`locks-bench gate`: may this build pass?  A suspicion is measured again before it is an alarm."""

from __future__ import annotations

import shlex
import sys
from pathlib import Path
from typing import Annotated

import typer

from bench import output
from bench.compare import Json, Markdown, Thresholds, show_verdicts
from harness.errors import UserError
from harness.record import Record
from harness.store import load
from harness.thresholds import load_thresholds
from harness.verdict import Cell


def gate(
    history: Annotated[str, typer.Argument(metavar="HISTORY", help="Records of the last good runs on this kind of machine.")],
    new: Annotated[str, typer.Argument(metavar="NEW", help="Records of the run that is judged.")],
    thresholds: Thresholds = None,
    vouch: Annotated[float, typer.Option(help="Slow-down that must be ruled out where a cell is unclear; 0.05 is 5 %.")] = 0.05,
    reruns: Annotated[
        str | None, typer.Option(metavar="DIR", help="Where re-runs of suspects are kept.  [default: NEW-reruns]")
    ] = None,
    json_to: Json = None,
    markdown: Markdown = None,
) -> None:
    """Judge a run; what looks slower, or throttled, is measured again in 3 fresh processes.  Exit codes as of `compare`."""
    output.check_target(json_to)
    if not 0.01 <= vouch <= 0.5:
        raise UserError(f"--vouch {vouch:g} is refused; use 0.01 to 0.5, where 0.05 is 5 %")
    limits = load_thresholds(Path(thresholds)) if thresholds else []
    before, after = load([history], output.say), load([new], output.say)

    from harness.compare import Rules
    from harness.gate import GateRules
    from harness.gate import gate as judged

    judged_at = max(record.time for record in after).replace(":", "-")  # re-runs of an older NEW are not those of this one
    kept = Path(reruns or f"{new.rstrip('/')}-reruns") / judged_at

    def rerun(suspects: list[Cell], number: int) -> list[Record]:
        import torch  # only where something must be measured

        from bench.progress import Progress
        from harness.rerun import in_fresh_processes
        from harness.run import RunOptions

        if any(suspect.case["device"] == "cuda" for suspect in suspects) and not torch.cuda.is_available():
            if number == 0:
                output.say("no CUDA device here: run this on the machine of NEW, which can measure its suspects again")
            return []
        options = RunOptions(command=shlex.join(["locks-bench", *sys.argv[1:]]))
        with Progress(total=len(suspects)) as progress:
            return in_fresh_processes(after, kept, options, progress.on_event)(suspects, number)

    result = judged(before, after, rerun, GateRules(Rules(thresholds=limits), vouch))
    show_verdicts(result.comparison, result.exit_code, json_to, markdown)
    if result.suspects:
        output.say(f"measured again in fresh processes: {', '.join(result.suspects)}; records are in {kept}")
    raise typer.Exit(int(result.exit_code))
