"""The Triton kernels as the stages of a decode step.  Imports triton only when an object is made."""

from __future__ import annotations

import importlib.util
import os
from dataclasses import dataclass
from typing import TYPE_CHECKING, cast

import torch

from locks_kernels.cache import PagedCache, Sequences
from locks_kernels.shapes import MAX_SEQUENCES, DecodeShape, SelectOptions, ShapeError

if TYPE_CHECKING:
    from locks_kernels.attend import AttendWorkspace
    from locks_kernels.decode import Stages
    from locks_kernels.select import SelectWorkspace


@dataclass
class Workspace:
    """What the layers of a model may share.

    scores  fp32  [B, HQ, P]   natural log; what `score` wrote last, only its scored pages are current
    lse     fp32  [B, HQ]      natural log-sum-exp of what `attend` read last
    """

    shape: DecodeShape
    options: SelectOptions
    scores: torch.Tensor
    lse: torch.Tensor
    select: SelectWorkspace
    attend: AttendWorkspace


class TritonStages:
    """All stages on Triton; after construction nothing is allocated and no device value is read.

    tables  int32  [B, H, K]   this layer's own, also when the rest of the workspace is shared
    """

    append_score = whole_step = None

    def __init__(self, cache: PagedCache, sequences: Sequences, options: SelectOptions, share: Stages | None = None) -> None:
        from locks_kernels import attend, build, score, select

        self._attend, self._build, self._score, self._select = attend, build, score, select
        self.cache, self.sequences, self.options = cache, sequences, options
        shape, batch, device = cache.shape, sequences.batch, cache.keys.device
        self.table_pages = options.table_pages(shape.page_size)
        self.tables = torch.full((batch, shape.kv_heads, self.table_pages), -1, dtype=torch.int32, device=device)
        size = (batch, shape.query_heads, sequences.max_pages)
        if share is not None:
            self.workspace: Workspace = cast(TritonStages, share).workspace
            if (self.workspace.shape, self.workspace.options, self.workspace.scores.shape) != (shape, options, size):
                raise ShapeError("layers that share a workspace must agree in shape, options, batch and table width")
            return
        self.workspace = Workspace(
            shape,
            options,
            scores=torch.full(size, float("-inf"), dtype=torch.float32, device=device),
            lse=torch.empty(batch, shape.query_heads, dtype=torch.float32, device=device),
            select=select.SelectWorkspace.allocate(shape, options, sequences),
            attend=attend.AttendWorkspace.allocate(shape, batch, self.table_pages, device),
        )

    @property
    def scores(self) -> torch.Tensor:
        return self.workspace.scores

    @staticmethod
    def unsupported(cache: PagedCache, sequences: Sequences | None = None) -> str | None:
        """Why this cache cannot be served: no triton, a CPU without Triton's interpreter, or more sequences than a grid has."""
        if importlib.util.find_spec("triton") is None:
            return "triton is not installed; pip install triton (Linux), or use kernels='reference'"
        if cache.keys.device.type == "cpu" and os.environ.get("TRITON_INTERPRET") != "1":
            return "the cache is on the CPU; set TRITON_INTERPRET=1 to interpret the kernels there (slow)"
        if sequences is not None and sequences.batch > MAX_SEQUENCES:
            return f"{sequences.batch} sequences in a batch; at most {MAX_SEQUENCES}"
        return None

    def build(self, page_ids: torch.Tensor) -> None:
        self._build.build(self.cache, page_ids)

    def finalise_slots(self, slots: torch.Tensor) -> None:
        self._build.finalise_slots(self.cache, slots)

    def append_finalise(self, keys: torch.Tensor, values: torch.Tensor) -> None:
        self._build.append_finalise(self.cache, self.sequences, keys, values)

    def score(self, query: torch.Tensor, summaries_ready: bool = True) -> None:
        self._score.score(query, self.cache, self.sequences, self.options.recent_pages, self.table_pages, self.workspace.scores)

    def select(self) -> None:
        self._select.select(
            self.workspace.scores, self.sequences, self.cache.shape, self.options, self.tables, self.workspace.select
        )

    def attend(self, query: torch.Tensor, out: torch.Tensor) -> None:
        self._attend.attend(query, self.cache, self.sequences, self.tables, out, self.workspace.lse, self.workspace.attend)
