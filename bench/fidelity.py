"""`locks-bench fidelity`: what every selector keeps of real keys at equal budget, beside what it reads for that."""

from __future__ import annotations

import re
import shlex
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from bench import arguments, output
from harness.errors import UserError
from harness.store import FILE, load
from reports import selector_times

PAGE = 16


def fidelity(
    model: Annotated[str, typer.Option(help="smollm2-135m; or synthetic, synthetic-shared: made-up keys.")] = "smollm2-135m",
    model_path: Annotated[str | None, typer.Option(metavar="DIR", help="A Hugging Face model folder instead.")] = None,
    ctx: Annotated[str, typer.Option(help="Tokens of a sample, prompt and answer, such as 4K.")] = "4K",
    budget: Annotated[str, typer.Option(help="Tokens attended, or shares of the context: 512,1%.")] = "512",
    sink_pages: Annotated[int, typer.Option(min=0, max=16, help="First pages kept without looking, inside the budget.")] = 1,
    samples: Annotated[int, typer.Option(min=1, help="Samples; the tasks take turns.")] = 4,
    tasks: Annotated[
        str | None, typer.Option(help="ruler-like tasks, or all.  [default: with carriers; closed loop: easy ones]")
    ] = None,
    selectors: Annotated[str, typer.Option(help="Names, default or all.")] = "default",
    kvzip: Annotated[bool, typer.Option("--kvzip", help="Let the model repeat its context for KVzip (slow).")] = False,
    closed_loop: Annotated[
        bool,
        typer.Option("--closed-loop", help="Let the model itself decode with each selector, instead of looking at traces."),
    ] = False,
    theory: Annotated[bool, typer.Option("--theory/--no-theory", help="Check the theory's bounds on the first sample.")] = True,
    haystack: Annotated[str | None, typer.Option(metavar="FILE", help="Text to hide needles in.  [default: Python's]")] = None,
    traces: Annotated[str | None, typer.Option(metavar="DIR", help="Where traces are kept.  [default: user cache]")] = None,
    seed: Annotated[int, typer.Option(help="Seed of the first sample.")] = 0,
    store: Annotated[
        str, typer.Option(metavar="DIR", help="Where records are kept; what it holds is not made again.")
    ] = "results",
    json_to: Annotated[str | None, typer.Option("--json", metavar="FILE", help="Write the rows as JSON; - is stdout.")] = None,
) -> None:
    """Compare what page selectors keep: recall, attention mass, output error, carrier retention, bytes; or, closed loop, what
    the model answers with them.  Runs on a CPU.
    """
    tokens = arguments.size(ctx, "--ctx")
    budgets = tuple(dict.fromkeys(_budget(part, tokens, sink_pages + 2) for part in budget.split(",")))
    output.check_target(json_to)

    from harness import closed_loop_run, fidelity_run, prompts
    from reports import closed_loop as loop_report
    from reports.fidelity import report, rows, theory_lines

    defaults: Any = closed_loop_run if closed_loop else fidelity_run
    plan = fidelity_run.Plan(
        model=None if model_path else model,
        path=Path(model_path) if model_path else None,
        ctx=tokens,
        samples=samples,
        seed=seed,
        tasks=tuple(prompts.tasks(arguments.names(tasks))) if tasks else defaults.DEFAULT_TASKS,
        selectors=fidelity_run.selectors(arguments.names(selectors), defaults.DEFAULT),
        budgets=budgets,
        haystack=Path(haystack) if haystack else None,
        kvzip=kvzip,
        traces=Path(traces) if traces else None,
        command=shlex.join(["locks-bench", *sys.argv[1:]]),
        sink_pages=sink_pages,
    )
    if closed_loop:
        answered = loop_report.rows(closed_loop_run.run(plan, closed_loop_run.LoopStore(Path(store), output.say), output.say))
        output.show({"rows": answered}, loop_report.report(answered), json_to)
        return
    records = fidelity_run.run(plan, fidelity_run.FidelityStore(Path(store), output.say), output.say)
    table = rows(records)
    times = _times(Path(store), budgets[0])
    for row in table:
        row["latency_us"] = times.of(row["selector"]) if times else None
    told = times.sentence(store) if times else selector_times.none_sentence(store)
    promises = fidelity_run.promises(plan) if theory else None
    data = {"rows": table, "times": times.record() if times else None, "theory": promises}
    output.show(data, report(table, [told, *theory_lines(promises)]), json_to)


def _times(store: Path, budget: int) -> selector_times.Times | None:
    """Those that `latency` left in the same store."""
    return selector_times.find(load([store]), budget) if (store / FILE).exists() else None


def _budget(text: str, tokens: int, least: int) -> int:
    """Tokens of a budget, whole pages of PAGE and at least `least`; a share of the context with a percent sign."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)%", text.strip())
    wanted = round(tokens * float(match[1]) / 100) if match else arguments.size(text, "--budget")
    if wanted < least * PAGE:
        raise UserError(
            f"--budget {text.strip()} is {wanted} tokens at a context of {tokens}; at least {least * PAGE} are needed "
            "for sink, recent and one ranked page"
        )
    if wanted > tokens:
        raise UserError(f"--budget {text.strip()} is {wanted} tokens, above the context of {tokens}; use a smaller budget")
    return wanted // PAGE * PAGE
