"""Rival page scores between the appending and the selection of LOCKS: the same step, another summary.

Selection and attention are those of the best kernels that the device runs, so that a rival loses nothing there.
"""

from __future__ import annotations

import importlib
from typing import Any, ClassVar

import torch

from locks_kernels import page_tokens, page_vectors, reference
from locks_kernels.cache import PagedCache, Sequences
from locks_kernels.decode import Stages, stages_class, step_launches
from locks_kernels.page_tokens import PageTokens
from locks_kernels.page_vectors import PageVectors
from locks_kernels.shapes import SelectOptions


class SelectorStages:
    """One layer.  kernels: "triton" or "reference"; `selection` names whose selection and attention run."""

    plain: ClassVar[Any] = page_vectors  # the method in plain torch ...
    kernels_build: ClassVar[str] = "locks_kernels.page_vectors_build"  # ... and its kernels
    kernels_score: ClassVar[str] = "locks_kernels.page_vectors_score"
    append_score = whole_step = None

    def __init__(
        self,
        form: str,
        cache: PagedCache,
        sequences: Sequences,
        options: SelectOptions,
        kernels: str,
        share: SelectorStages | None = None,
        summaries: Any = None,
    ) -> None:
        self.cache, self.sequences, self.options, self.kernels = cache, sequences, options, kernels
        self.summaries = summaries or self.allocate(form)
        wanted = "auto" if kernels == "triton" and cache.keys.device.type == "cuda" else kernels
        self.selection, stages = stages_class(wanted, cache, sequences)
        self.inner: Stages = stages(cache, sequences, options, share.inner if share else None)
        self.partial: torch.Tensor | None = None
        if kernels == "triton":
            self._build = importlib.import_module(self.kernels_build)
            self._score = importlib.import_module(self.kernels_score)
            self._share_out = importlib.import_module(SelectorStages.kernels_score).share_out
        if self.selection == "cuda":
            programs, _ = self.programs()
            size = (sequences.batch, cache.shape.query_heads, programs, 2)
            own = torch.empty(size, dtype=torch.float32, device=cache.keys.device)
            self.partial = share.partial if share else own

    @property
    def tables(self) -> torch.Tensor:
        return self.inner.tables

    def allocate(self, form: str) -> Any:
        return PageVectors.allocate(self.cache, form)

    def programs(self) -> tuple[int, int]:
        """Programs of the scorer per sequence and KV head, and the pages that each takes."""
        programs, per_program = self._score.programs_of(self.cache.shape, self.sequences)
        return programs, self._score.BLOCK_P * per_program

    def complete_pages(self) -> torch.Tensor:
        """Physical ids of every complete page that a sequence holds.  Looks at `seq_lens` from the host."""
        complete = (self.sequences.seq_lens // self.cache.shape.page_size)[:, None]
        logical = torch.arange(self.sequences.max_pages, device=complete.device)
        return self.sequences.block_table[logical < complete].unique()

    def prefill(self) -> None:
        """Summarise every complete page that a sequence holds.  Not for capture."""
        for part in self.complete_pages().split(1 << 14):
            (page_vectors if self.kernels == "reference" else self._build).build(self.cache, self.summaries, part)

    def append_finalise(self, keys: torch.Tensor, values: torch.Tensor) -> None:
        if self.kernels == "reference":
            reference.append(self.cache, self.sequences, keys, values)
            self.plain.finalise(self.cache, self.summaries, self.sequences)
        else:
            self._build.append_finalise(self.cache, self.summaries, self.sequences, keys, values)

    def score(self, query: torch.Tensor) -> None:
        shape, recent = self.cache.shape, self.options.recent_pages
        if self.kernels == "reference":
            self.inner.scores = self.plain.score(query, shape, self.summaries, self.sequences, recent)  # type: ignore[attr-defined]
        else:
            kept = self.options.kept_pages(shape.page_size)
            out = self.inner.scores  # type: ignore[attr-defined]
            self._score.score(query, shape, self.summaries, self.sequences, recent, kept, out, self.partial)
            if self.partial is not None:
                parts = self.inner.partials  # type: ignore[attr-defined]
                self._share_out(self.partial, shape, self.sequences, recent, parts, self.programs()[1])

    def select(self) -> None:
        self.inner.select()

    def attend(self, query: torch.Tensor, out: torch.Tensor) -> None:
        self.inner.attend(query, out)

    def step(self, query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
        """As LocksDecoder.step."""
        for launch in step_launches(self, query, keys, values, out).values():
            launch()
        return out


class TokenStages(SelectorStages):
    """The same with a row per token instead of vectors per page (page_tokens)."""

    plain: ClassVar[Any] = page_tokens
    kernels_build: ClassVar[str] = "locks_kernels.page_tokens_score"
    kernels_score: ClassVar[str] = "locks_kernels.page_tokens_score"

    def allocate(self, form: str) -> PageTokens:
        return PageTokens.allocate(self.cache, form)

    def programs(self) -> tuple[int, int]:
        width = self.summaries.rows.shape[-1]
        block, programs, per_program = self._score.blocks_of(self.cache.shape, self.sequences, width)
        return programs, block * per_program

    def prefill(self) -> None:
        ids = self.complete_pages()
        page_tokens.calibrate(self.cache, self.summaries, ids)
        page_tokens.build(self.cache, self.summaries, ids)
