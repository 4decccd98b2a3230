"""Rival page scores between the appending and the selection of LOCKS: the same step, another summary.

Selection and attention are those of the best kernels that the device runs, so that a rival loses nothing there.
"""

from __future__ import annotations

import importlib

import torch

from locks_kernels import page_vectors, reference
from locks_kernels.cache import PagedCache, Sequences
from locks_kernels.decode import Stages, stages_class
from locks_kernels.page_vectors import PageVectors
from locks_kernels.shapes import SelectOptions


class SelectorStages:
    """One layer.  kernels: "triton" or "reference"; `selection` names whose selection and attention run."""

    def __init__(
        self,
        form: str,
        cache: PagedCache,
        sequences: Sequences,
        options: SelectOptions,
        kernels: str,
        share: SelectorStages | None = None,
        summaries: PageVectors | None = None,
    ) -> None:
        self.cache, self.sequences, self.options, self.kernels = cache, sequences, options, kernels
        self.summaries = summaries or PageVectors.allocate(cache, form)
        wanted = "auto" if kernels == "triton" and cache.keys.device.type == "cuda" else kernels
        self.selection, stages = stages_class(wanted, cache, sequences)
        self.inner: Stages = stages(cache, sequences, options, share.inner if share else None)
        self.partial: torch.Tensor | None = None
        if kernels == "triton":
            self._build = importlib.import_module("locks_kernels.page_vectors_build")
            self._score = importlib.import_module("locks_kernels.page_vectors_score")
        if self.selection == "cuda":
            programs, _ = self._score.programs_of(cache.shape, sequences)
            size = (sequences.batch, cache.shape.query_heads, programs, 2)
            own = torch.empty(size, dtype=torch.float32, device=cache.keys.device)
            self.partial = share.partial if share else own

    @property
    def tables(self) -> torch.Tensor:
        return self.inner.tables

    def prefill(self) -> None:
        """Summarise every complete page that a sequence holds.  Looks at `seq_lens` from the host: not for capture."""
        complete = (self.sequences.seq_lens // self.cache.shape.page_size)[:, None]
        logical = torch.arange(self.sequences.max_pages, device=complete.device)
        ids = self.sequences.block_table[logical < complete].unique()
        for part in ids.split(1 << 14):
            (page_vectors if self.kernels == "reference" else self._build).build(self.cache, self.summaries, part)

    def append_finalise(self, keys: torch.Tensor, values: torch.Tensor) -> None:
        if self.kernels == "reference":
            reference.append(self.cache, self.sequences, keys, values)
            page_vectors.finalise(self.cache, self.summaries, self.sequences)
        else:
            self._build.append_finalise(self.cache, self.summaries, self.sequences, keys, values)

    def score(self, query: torch.Tensor) -> None:
        shape, recent = self.cache.shape, self.options.recent_pages
        if self.kernels == "reference":
            self.inner.scores = page_vectors.score(query, shape, self.summaries, self.sequences, recent)  # type: ignore[attr-defined]
        else:
            kept = self.options.kept_pages(shape.page_size)
            out = self.inner.scores  # type: ignore[attr-defined]
            self._score.score(query, shape, self.summaries, self.sequences, recent, kept, out, self.partial)
            if self.partial is not None:
                parts = self.inner.partials  # type: ignore[attr-defined]
                self._score.share_out(self.partial, shape, self.sequences, recent, parts)

    def select(self) -> None:
        self.inner.select()

    def attend(self, query: torch.Tensor, out: torch.Tensor) -> None:
        self.inner.attend(query, out)

    def step(self, query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
        """As LocksDecoder.step."""
        self.append_finalise(keys, values)
        self.score(query)
        self.select()
        self.attend(query, out)
        return out
