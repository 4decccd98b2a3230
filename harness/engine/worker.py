"""One engine in a process of its own: started once for a backend, checked, then timed context by context.

The process leads a group of its own, so that whatever the engine started ends with it.  What it has to say goes through a
pipe, one event at a time, and everything that is printed goes to a log.
"""

from __future__ import annotations

import os
import re
import signal
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from harness.case import Model
from harness.engine.cells import BACKENDS
from harness.engine.driver import Engine, VllmEngine
from harness.engine.gate import check, prompt_lengths
from harness.engine.meter import open_meter
from harness.engine.model import write_folder
from harness.engine.texts import SAME_PREFILL_TOLERANCE, TOLERANCE, TRAINED_TOLERANCE, Reference, Text
from harness.engine.window import (
    MOST_SEQUENCES,
    DoesNotFit,
    Ladder,
    Timed,
    Uneven,
    Window,
    ladders,
    largest_batch,
    prompt,
    slack_tokens,
)

WATCH_SECONDS = 0.5
Cell = tuple[int, int | None]  # context and batch; None: as many as fit


@dataclass(frozen=True)
class EngineJob:
    """Everything that one engine is asked.

    model         geometry; of a preset where there is no `model_folder` of the user's
    longest       context that the weights are for, None for random ones
    cells         to be timed; none only asks for the texts
    settings_of   all cells of the command: they decide how the engine is set up, so that it is the same for every backend
    arguments     of vllm.LLM, all but those that follow from the cells
    environment   variables to set before vLLM is imported; None removes one
    reference     to compare its texts with
    stop_at       of time.time(): no cell begins after it
    """

    backend: str
    sparse: bool
    model: Model
    model_folder: str | None
    longest: int | None
    dtype: str
    seed: int
    budget: int
    cells: list[Cell]
    settings_of: list[Cell]
    window: Window
    arguments: dict[str, Any]
    environment: dict[str, str | None]
    reference: Reference | None = None
    stop_at: float | None = None
    gpu_uuid: str | None = None


@dataclass(frozen=True)
class Started:
    """The engine is up: what it says about itself, and how long it took."""

    description: dict[str, Any]
    blocks: int
    block_size: int
    seconds: float


@dataclass(frozen=True)
class Checked:
    gate: dict[str, Any]
    texts: list[Text]
    reason: str | None


@dataclass(frozen=True)
class Measuring:
    """batch: as tried."""

    cell: Cell
    batch: int


@dataclass(frozen=True)
class CellTimed:
    cell: Cell
    timed: Timed
    meters: list[dict[str, Any]] = field(default_factory=list)


@dataclass(frozen=True)
class CellFailed:
    """kind: "does not fit" or "uneven"; or "late", where there was no time left."""

    cell: Cell
    kind: str
    reason: str


@dataclass(frozen=True)
class Broken:
    """The engine cannot go on; `error` is the line that says why, as the engine printed or raised it."""

    when: str
    error: str


EngineEvent = Started | Checked | Measuring | CellTimed | CellFailed | Broken


def serve(pipe: Connection, job: EngineJob, log: str) -> None:
    """The process's side: events out, then the end of the pipe."""
    os.setsid()
    threading.Thread(target=_end_with, args=(os.getppid(),), daemon=True).start()
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    with open(log, "ab") as file:
        os.dup2(file.fileno(), sys.stdout.fileno())
        os.dup2(file.fileno(), sys.stderr.fileno())
    for name, value in job.environment.items():
        os.environ.pop(name, None) if value is None else os.environ.__setitem__(name, value)
    run(job, pipe.send, VllmEngine, Path(log))
    pipe.close()


def _end_with(parent: int) -> None:
    """A sweep that was killed leaves no engine behind on the GPU: the processes that vLLM started are of this group."""
    while os.getppid() == parent:
        time.sleep(WATCH_SECONDS)
    os.killpg(0, signal.SIGKILL)


def run(
    job: EngineJob,
    say: Callable[[EngineEvent], None],
    make_engine: Callable[[dict[str, Any]], Engine],
    log: Path | None = None,
    clock_ns: Callable[[], int] = time.perf_counter_ns,
    open_meter: Callable[[str | None], Callable[[], dict[str, Any]]] = open_meter,
) -> None:
    """Start, check and time one engine; every failure is an event."""
    when = "while the engine started"
    try:
        start = time.monotonic()
        engine = make_engine(_arguments(job))
        description = engine.describe()
        if not description["layers"]:
            raise RuntimeError(
                "no attention layer of the engine has a cache to look at: this version of vLLM is not known here"
            )
        if another := BACKENDS[job.backend].another(description["layers"]):
            raise RuntimeError(another)
        say(Started(description, engine.blocks, engine.block_size, time.monotonic() - start))
        when = "while its texts were checked"
        lengths = prompt_lengths(job.budget, max(ctx for ctx, _ in job.settings_of))
        texts = None if job.reference is None else job.reference.texts
        gate = check(engine, description["layers"], job.sparse, texts, lengths, _prompts(job, 0), _tolerance(job))
        say(Checked(gate.record, gate.texts, gate.reason))
        if gate.reason is None:
            when = "while it was timed"
            meter = open_meter(job.gpu_uuid)
            for ctx, batches in ladders(job.cells):
                _climb(job, engine, ctx, batches, say, clock_ns, meter)
        when = "while it was closed"
        engine.close()
    except Exception as error:
        say(Broken(when, root_cause(error, log)))


def _climb(
    job: EngineJob,
    engine: Engine,
    ctx: int,
    batches: list[int | None],
    say: Callable[[EngineEvent], None],
    clock_ns: Callable[[], int],
    meter: Callable[[], dict[str, Any]],
) -> None:
    slack = slack_tokens(job.window, batches, ctx, engine.chunk_tokens, engine.blocks * engine.block_size)
    readings: list[dict[str, Any]] = []
    ladder: Ladder | None = None
    fits = largest_batch(engine, ctx + slack, MOST_SEQUENCES)
    most = max(batch or fits for batch in batches)
    try:
        for batch in batches:
            cell = (ctx, batch)
            if job.stop_at is not None and time.time() > job.stop_at:
                say(CellFailed(cell, "late", "the time budget was spent"))
                continue
            wanted = fits if batch is None else batch
            say(Measuring(cell, wanted))
            readings.clear()
            try:
                ladder = ladder or Ladder(
                    engine, ctx, job.window, slack, _prompts(job, ctx), clock_ns, most, lambda: readings.append(meter())
                )
                if wanted < 1:
                    raise DoesNotFit(f"not one sequence of {ctx:,} tokens fits in the engine's cache")
                say(CellTimed(cell, ladder.measure(wanted), list(readings)))
            except DoesNotFit as error:
                say(CellFailed(cell, "does not fit", str(error)))
            except Uneven as error:
                say(CellFailed(cell, "uneven", str(error)))
    finally:
        if ladder is not None:
            ladder.close()


def _tolerance(job: EngineJob) -> float:
    """What the engine's texts and those it is compared with may differ by, in nats."""
    if job.model_folder is not None:
        return TRAINED_TOLERANCE
    alike = job.reference is not None and job.reference.backend in BACKENDS[job.backend].prefills_like
    return SAME_PREFILL_TOLERANCE if alike else TOLERANCE


def _arguments(job: EngineJob) -> dict[str, Any]:
    """All arguments of vllm.LLM.  Contexts and batches decide how long a sequence and how many sequences it is made for."""
    known = [batch for _, batch in job.settings_of if batch is not None]
    fills = any(batch is None for _, batch in job.settings_of)
    longest = max(
        ctx + slack_tokens(job.window, batches, ctx, int(job.arguments.get("max_num_batched_tokens", 2048)))
        for ctx, batches in ladders(job.settings_of)
    )
    longest = -(-longest // 64) * 64
    if job.longest is not None:
        longest = min(longest, job.longest)
    arguments = job.arguments | {"max_model_len": longest, "dtype": job.dtype, "seed": job.seed}
    arguments.setdefault("max_num_seqs", max([*known, 2, MOST_SEQUENCES if fills else 0]))
    if job.model_folder is None:
        folder = Path(job.arguments["model"])
        write_folder(job.model, folder, longest, job.dtype)
    return arguments


def _prompts(job: EngineJob, ctx: int) -> Callable[[int, int], list[int]]:
    return lambda number, length: prompt(job.seed, ctx, number, length, job.model.vocabulary)


ERROR_LINE = re.compile(r"\b([A-Za-z_][\w.]*(?:Error|Exception|Exit|Interrupt)): (.+)")
WRAPPERS = ("Engine core initialization failed", "EngineCore encountered an issue", "Engine loop is not running")


def root_cause(error: BaseException, log: Path | None) -> str:
    """One line: of the error itself, or where that only says that the engine process has failed, the last one in its log."""
    text = f"{type(error).__name__}: {next(iter(str(error).strip().splitlines()), '')}"
    if log is None or not log.exists() or not any(wrapper in text for wrapper in WRAPPERS):
        return text
    found = [match for line in log.read_text(errors="replace").splitlines() if (match := ERROR_LINE.search(line))]
    causes = [match[0] for match in found if not any(wrapper in match[0] for wrapper in WRAPPERS)]
    return causes[-1].strip() if causes else text
