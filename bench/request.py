"""The options of `latency`, or the axes of a suite -> the cases of a sweep, every one checked before anything is measured."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, cast

from bench import arguments
from harness.case import Case, Level
from harness.errors import UserError
from harness.memory import local_shape
from harness.presets import find_model, nearest
from locks_kernels.shapes import Combine, SelectOptions

Device = Literal["cuda", "cpu"]
DEFAULT_CTX = {"cuda": "8K,32K,128K", "cpu": "2K"}
DEFAULT_BUDGET = {"cuda": "2048", "cpu": "512"}
LEVELS = ("attention", "token")
MAX_SEED = 2**63 - 1  # of torch's generators


@dataclass(frozen=True)
class Request:
    """What the user asked for, as typed; None where the device decides."""

    ctx: str | None
    batch: str
    model: str
    level: str
    budget: str | None
    kv: str
    combine: str
    rank: int
    page_size: int
    dtype: str
    seed: int


def cases(request: Request, device: Device) -> list[Case]:
    """All cells, by context, then batch.  UserError or ShapeError for the first that cannot be."""
    if request.level not in LEVELS:
        raise UserError(f"unknown level {request.level!r}; {nearest(request.level, LEVELS)}")
    if not 0 <= request.seed <= MAX_SEED:
        raise UserError(f"seed {request.seed} is out of range; use 0 to {MAX_SEED}")
    select = SelectOptions(
        budget_tokens=arguments.size(DEFAULT_BUDGET[device] if request.budget is None else request.budget, "--budget"),
        combine=cast(Combine, request.combine),
    )
    model = find_model(request.model)
    result = []
    for ctx in arguments.sizes(DEFAULT_CTX[device] if request.ctx is None else request.ctx, "--ctx"):
        for batch in arguments.sizes(request.batch, "--batch"):
            case = Case(
                level=cast(Level, request.level),
                model=model,
                ctx=ctx,
                batch=batch,
                select=select,
                page_size=request.page_size,
                rank=request.rank,
                dtype=request.dtype,
                kv=request.kv,
                seed=request.seed,
                device=device,
            )
            local_shape(case)
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


def _check_context(case: Case) -> None:
    if case.ctx < case.page_size:
        raise UserError(f"--ctx {case.ctx} is less than one page of {case.page_size} tokens; use a longer context")
    case.select.kept_pages(case.page_size)
    if case.select.budget_tokens > case.ctx:
        raise UserError(
            f"budget of {case.select.budget_tokens} tokens is above the context of {case.ctx}; "
            f"use --budget {max(case.ctx // 4, 1)} or less, or a longer --ctx"
        )
