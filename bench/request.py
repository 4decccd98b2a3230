"""The options of `latency`, or the axes of a suite -> the cases of a sweep, every one checked before anything is measured."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, cast

from bench import arguments
from harness.case import Case, Level
from harness.engine.cells import CPU_BLOCK, LEVEL, MAX, EngineCase, parse_engine_args
from harness.engine.model import read_folder
from harness.errors import UserError
from harness.memory import local_shape
from harness.presets import find_model, nearest
from locks_kernels.shapes import Combine, SelectOptions

Device = Literal["cuda", "cpu"]
DEFAULT_CTX = {"cuda": "8K,32K,128K", "cpu": "2K"}
DEFAULT_BUDGET = {"cuda": "2048", "cpu": "512"}
LEVELS = ("attention", "token", "engine")
DEFAULT_MODEL = {"cuda": "llama-3.1-8b", "cpu": "smollm2-135m"}  # of level engine; a CPU holds no large one
MAX_SEED = 2**63 - 1  # of torch's generators


@dataclass(frozen=True)
class Request:
    """What the user asked for, as typed; None where the device decides."""

    ctx: str | None
    batch: str
    model: str | None
    level: str
    budget: str | None
    kv: str
    combine: str
    rank: int
    page_size: int
    dtype: str
    seed: int
    model_path: str | None = None
    engine_args: str = "{}"


def cases(request: Request, device: Device) -> list[Case]:
    """All cells, by context, then batch.  UserError or ShapeError for the first that cannot be."""
    if request.level not in LEVELS:
        raise UserError(f"unknown level {request.level!r}; {nearest(request.level, LEVELS)}")
    if request.level != LEVEL and (request.model_path is not None or request.engine_args != "{}"):
        raise UserError("--model-path and --engine-args are for --level engine; leave them out or add it")
    if not 0 <= request.seed <= MAX_SEED:
        raise UserError(f"seed {request.seed} is out of range; use 0 to {MAX_SEED}")
    select = SelectOptions(
        budget_tokens=arguments.size(DEFAULT_BUDGET[device] if request.budget is None else request.budget, "--budget"),
        combine=cast(Combine, request.combine),
    )
    engine = request.level == LEVEL
    contexts = arguments.sizes(DEFAULT_CTX[device] if request.ctx is None else request.ctx, "--ctx")
    made, extra = _engine_case(request, contexts) if engine else (Case, {})
    model = extra.pop("model", None) or find_model(_model_name(request, device))
    page_size = CPU_BLOCK if engine and device == "cpu" and request.page_size == 16 else request.page_size
    result = []
    for ctx in contexts:
        for batch in _batches(request):
            case = made(
                level=cast(Level, request.level),
                model=model,
                ctx=ctx,
                batch=batch or 1,
                select=select,
                page_size=page_size,
                rank=request.rank,
                dtype=request.dtype,
                kv=MAX if batch is None else request.kv,
                seed=request.seed,
                device=device,
                **extra,
            )
            _ = case.shape() if engine else local_shape(case)
            _check_context(case)
            result.append(case)
    return result


def device_of(asked: str) -> Device:
    """The device to measure on; UserError if there is no GPU and one was asked for."""
    if asked not in ("auto", "cuda", "cpu"):
        raise UserError(f"unknown device {asked!r}; use auto, cuda or cpu")
    if asked == "cpu":
        return "cpu"
    import torch

    if torch.cuda.is_available():
        return "cuda"
    if asked == "cuda":
        raise UserError("no CUDA GPU can be used here; `locks-bench doctor` says why, --device cpu runs without one")
    return "cpu"


def _model_name(request: Request, device: Device) -> str:
    return request.model or DEFAULT_MODEL[device if request.level == LEVEL else "cuda"]


def _batches(request: Request) -> list[int | None]:
    """As typed; None for "max", as many sequences as an engine's cache holds."""
    texts = list(dict.fromkeys(part.strip() for part in request.batch.split(",")))
    if request.level != LEVEL and MAX in texts:
        raise UserError("--batch max is for --level engine, whose cache has a size; use numbers such as 1,16")
    numbers = [None if text == MAX else arguments.size(text, "--batch") for text in texts]
    return sorted(dict.fromkeys(numbers), key=lambda number: number is None)  # as typed, with the largest at the end


def _engine_case(request: Request, contexts: list[int]) -> tuple[type[Case], dict[str, Any]]:
    """The class of the cells, and the fields that only they have; with the model where it is a folder."""
    if request.kv != "auto":
        raise UserError("--kv is not for --level engine, which plans its own cache; use --batch max to fill it")
    fields: dict[str, Any] = {"engine_args": parse_engine_args(request.engine_args)}
    if request.model_path is not None:
        if request.model is not None:
            raise UserError("--model and --model-path are both given; use one of them")
        fields["model"], fields["weights"], longest = read_folder(Path(request.model_path))
        if max(contexts) > longest:
            raise UserError(
                f"--ctx {max(contexts)} is above the {longest} tokens that the model in --model-path is made for; "
                f"use --ctx {longest} or less"
            )
    return EngineCase, fields


def _check_context(case: Case) -> None:
    if case.ctx < case.page_size:
        raise UserError(f"--ctx {case.ctx} is less than one page of {case.page_size} tokens; use a longer context")
    case.select.kept_pages(case.page_size)
    if case.select.budget_tokens > case.ctx:
        raise UserError(
            f"budget of {case.select.budget_tokens} tokens is above the context of {case.ctx}; "
            f"use --budget {max(case.ctx // 4, 1)} or less, or a longer --ctx"
        )
