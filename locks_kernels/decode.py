"""The stages composed into one decode step that a CUDA graph can capture.

`LocksDecoder` holds one layer's state; the kernels behind it are one of KERNELS.  Nothing in `step` looks at a device value
from the host, so a captured step stays right while `seq_lens` and the block table change under it.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from functools import partial
from typing import Protocol

import torch

from locks_kernels import reference
from locks_kernels.cache import PagedCache, Sequences
from locks_kernels.shapes import SelectOptions, ShapeError

WHOLE_STEP = "step"  # the stage that is all of them
KERNELS = ("cuda", "triton", "reference")  # best first; each names a class in _STAGES
_STAGES = {
    "cuda": "locks_kernels.cuda.stages:CudaStages",
    "triton": "locks_kernels.portable:TritonStages",
    "reference": "locks_kernels.decode:ReferenceStages",
}


class Step(Protocol):
    """The parts of a step of one layer, LOCKS's or another selector's; `step_launches` has their order."""

    @property
    def tables(self) -> torch.Tensor:
        """int32 [B, H, K], what `select` wrote last."""
        ...

    @property
    def append_score(self) -> AppendScore | None:
        """`append_finalise` and `score` in one launch, where that is possible: then a step has that instead."""
        ...

    @property
    def whole_step(self) -> WholeStep | None:
        """All of them in one launch, where that is possible and faster."""
        ...

    def append_finalise(self, keys: torch.Tensor, values: torch.Tensor) -> None: ...
    def score(self, query: torch.Tensor) -> None: ...
    def select(self) -> None: ...
    def attend(self, query: torch.Tensor, out: torch.Tensor) -> None: ...


class AppendScore(Protocol):
    def __call__(
        self,
        query: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
        starts_early: bool,
        slots: torch.Tensor | None = None,
    ) -> None:
        """slots: int64 [B]; a sequence whose slot is negative has no new token, whatever its length.  None: all have one."""
        ...


class WholeStep(Protocol):
    def __call__(
        self, query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, out: torch.Tensor, starts_early: bool
    ) -> None: ...


class Stages(Step, Protocol):
    """One implementation of the stages of LOCKS, with the workspace they share.

    Workspace may be shared by the layers of a model (`share`): it carries nothing from one step to the next.
    """

    tables: torch.Tensor

    def __init__(self, cache: PagedCache, sequences: Sequences, options: SelectOptions, share: Stages | None) -> None: ...

    @staticmethod
    def unsupported(cache: PagedCache, sequences: Sequences | None = None) -> str | None:
        """Why this implementation cannot run on this cache's device and shape, nor with this many sequences and pages where
        they are given; None if it can."""
        ...

    def build(self, page_ids: torch.Tensor) -> None: ...
    def score(self, query: torch.Tensor, summaries_ready: bool = True) -> None:
        """`summaries_ready`: the launch before this one, if it still runs, writes no summary that is scored."""
        ...

    def finalise_slots(self, slots: torch.Tensor) -> None: ...


class ReferenceStages:
    """The plain-torch stages; synchronises with the host, so it cannot be captured."""

    tables: torch.Tensor
    append_score = whole_step = None

    def __init__(self, cache: PagedCache, sequences: Sequences, options: SelectOptions, share: Stages | None = None) -> None:
        self.cache, self.sequences, self.options = cache, sequences, options

    @staticmethod
    def unsupported(cache: PagedCache, sequences: Sequences | None = None) -> str | None:
        return None

    def build(self, page_ids: torch.Tensor) -> None:
        reference.build(self.cache, page_ids)

    def append_finalise(self, keys: torch.Tensor, values: torch.Tensor) -> None:
        reference.append(self.cache, self.sequences, keys, values)
        reference.finalise(self.cache, self.sequences)

    def finalise_slots(self, slots: torch.Tensor) -> None:
        reference.finalise_slots(self.cache, slots)

    def score(self, query: torch.Tensor, summaries_ready: bool = True) -> None:
        self.scores = reference.score(query, self.cache, self.sequences, self.options.recent_pages)

    def select(self) -> None:
        combined = reference.combine(self.scores, self.cache.shape.kv_heads, self.options.combine)
        self.tables = reference.select(combined, self.sequences, self.cache.shape, self.options)

    def attend(self, query: torch.Tensor, out: torch.Tensor) -> None:
        out.copy_(reference.attend(query, self.cache, self.sequences, self.tables)[0])


def stages_class(kernels: str, cache: PagedCache, sequences: Sequences | None = None) -> tuple[str, type[Stages]]:
    """The named implementation, or the best one this cache's device can run for "auto"; ShapeError says why not.

    Without `sequences` the answer is for few of them; block tables of any width may still be too wide.
    """
    if kernels != "auto" and kernels not in KERNELS:
        raise ShapeError(f"kernels {kernels!r} are not known; use auto, {', '.join(KERNELS)}")
    reasons = []
    for name in KERNELS if kernels == "auto" else (kernels,):
        module, attribute = _STAGES[name].split(":")
        stages: type[Stages] = getattr(importlib.import_module(module), attribute)
        reason = stages.unsupported(cache, sequences)
        if reason is None:
            return name, stages
        reasons.append(f"{name}: {reason}")
    raise ShapeError("; ".join(reasons))


def step_launches(
    step: Step, query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, out: torch.Tensor, starts_early: bool = False
) -> dict[str, Callable[[], object]]:
    """The launches of one step in their order, by the stage's name.  starts_early: as of LocksDecoder."""
    if step.whole_step is not None:
        return {WHOLE_STEP: partial(step.whole_step, query, keys, values, out, starts_early)}
    first: dict[str, Callable[[], object]]
    if step.append_score is None:
        first = {"append_finalise": partial(step.append_finalise, keys, values), "score": partial(step.score, query)}
    else:
        first = {"score": partial(step.append_score, query, keys, values, starts_early)}
    return {**first, "select": step.select, "attend": partial(step.attend, query, out)}


class LocksDecoder:
    """LOCKS for one layer.  `prefill` once, then `step` per token.

    cache, sequences  the layer's paged cache and the batch's tables (see cache.py)
    kernels           "auto", "cuda", "triton" or "reference"; `.kernels` tells which one runs
    share             another layer's decoder whose workspace to use
    starts_early      no kernel that may still run when a step starts writes lengths, block table or summaries, as in a model,
                      where the query's projection is ahead: "cuda" then reads them before that has ended
    """

    def __init__(
        self,
        cache: PagedCache,
        sequences: Sequences,
        options: SelectOptions,
        kernels: str = "auto",
        share: LocksDecoder | None = None,
        starts_early: bool = False,
    ) -> None:
        self.cache, self.sequences, self.options, self.starts_early = cache, sequences, options, starts_early
        self.kernels, stages = stages_class(kernels, cache, sequences)
        self.stages: Stages = stages(cache, sequences, options, share.stages if share else None)

    def prefill(self) -> None:
        """Summarise every complete page that a sequence holds.  Looks at `seq_lens` from the host: not for capture."""
        complete = (self.sequences.seq_lens // self.cache.shape.page_size)[:, None]
        logical = torch.arange(self.sequences.max_pages, device=complete.device)
        self.stages.build(self.sequences.block_table[logical < complete].unique())

    def step(
        self, query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, out: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Append the token at position `seq_lens - 1`, summarise its page if that is now full, and attend.

        query [B, HQ, D], keys and values [B, H, D], out like query: for "cuda" in the cache's type and contiguous, save that
        the rows of the inputs may lie apart, as in a fused projection.
        The caller advances `seq_lens` before (once for all layers).  Sequences of length 0 give zeros.
        """
        out = torch.empty_like(query) if out is None else out
        for launch in step_launches(self.stages, query, keys, values, out, self.starts_early).values():
            launch()
        return out

    @property
    def launches(self) -> list[str]:
        """What a step launches, by stage."""
        token = self.cache.keys  # stands for all tensors: only names are asked for
        return list(step_launches(self.stages, token, token, token, token))

    @property
    def tables(self) -> torch.Tensor:
        """Pages attended by the last step, int32 [B, H, K], ascending, -1 behind the last."""
        return self.stages.tables
