"""`locks-bench latency`: how long one decode step takes, for every backend, context and batch asked for."""

from __future__ import annotations

from typing import Annotated

import typer

from bench import arguments, output, request
from bench.execute import Wishes, execute, open_store
from bench.options import Device, RowsJson, StoreDirectory, Strict, TimeBudget
from harness import backends as known_backends
from harness.engine import cells as engine
from reports.table import NO_CLAIM


def latency(
    ctx: Annotated[str | None, typer.Option(help="Contexts, such as 8K,1M.  [default: 8K,32K,128K; cpu: 2K]")] = None,
    batch: Annotated[str, typer.Option(help="Batches, such as 1,16; level engine: max fills the cache.")] = "1",
    model: Annotated[
        str | None,
        typer.Option(
            help="Preset of `list`, or a shape HQxHxD such as 32x8x128.  [default: llama-3.1-8b; engine on cpu: smollm2-135m]",
            show_default=False,
        ),
    ] = None,
    level: Annotated[
        str, typer.Option(help="attention: one layer.  token: a whole decode step.  engine: inside vLLM.")
    ] = "attention",
    backends: Annotated[
        str,
        typer.Option(
            help="Names of `list`, or all; engine on a CPU: cpu-attn.  [default: fa3,flashinfer,locks; cpu: sdpa,locks]",
            show_default=False,
        ),
    ] = "default",
    budget: Annotated[str | None, typer.Option(help="Tokens that LOCKS attends.  [default: 2048; cpu: 512]")] = None,
    kv: Annotated[str, typer.Option(help="Memory plan: auto, resident, layers=k, pooled, tp=n.")] = "auto",
    combine: Annotated[str, typer.Option(help="How a group's heads vote: share (paper), peak (author's code).")] = "share",
    rank: Annotated[int, typer.Option(help="Rank of the page summaries: 2, 4, 8.")] = 8,
    page_size: Annotated[int, typer.Option(help="Tokens per page: 16, 32, 64.")] = 16,
    dtype: Annotated[str, typer.Option(help="bfloat16 or float16.")] = "bfloat16",
    model_path: Annotated[
        str | None, typer.Option(metavar="DIR", help="Level engine: a local model folder with its weights.")
    ] = None,
    engine_args: Annotated[
        str, typer.Option(metavar="JSON", help="Level engine: more arguments of vllm.LLM, the same for all backends.")
    ] = "{}",
    device: Device = "auto",
    seed: Annotated[int, typer.Option(help="Seed of contents, page order and order of rounds.")] = 0,
    store: StoreDirectory = "results",
    json_to: RowsJson = None,
    time_budget: TimeBudget = None,
    strict: Strict = False,
) -> None:
    """Measure the latency of one decode step."""
    asked = request.Request(
        ctx, batch, model, level, budget, kv, combine, rank, page_size, dtype, seed, model_path, engine_args
    )
    seconds = arguments.seconds(time_budget, "--time-budget") if time_budget is not None else None
    output.check_target(json_to)
    used = request.device_of(device)
    cases = request.cases(asked, used)
    chosen = (engine.resolve if level == engine.LEVEL else known_backends.resolve)(backends, used)
    kept = open_store(store)
    if used == "cpu" and json_to == output.STDOUT:
        output.say(NO_CLAIM)
    execute(cases, chosen, kept, Wishes(store, json_to, seconds, strict, model_path))
