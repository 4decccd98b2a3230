"""LOCKS (arXiv 2607.24555) at every rank and with both ways to combine a group; and scored in two stages."""

from __future__ import annotations

import torch

from locks_kernels import selector_cost as cost
from locks_kernels.reference import summarise
from locks_kernels.selectors.base import Declaration, Layer, Steps, best, page_mass
from locks_kernels.selectors.pages import PageSelector, PageState
from locks_kernels.shapes import Combine, DecodeShape, SelectOptions
from locks_kernels.summary import SummaryFields


class Locks(PageSelector):
    """Mass of each page from its quantised spectral summary."""

    def __init__(self, rank: int, how: Combine = "share") -> None:
        self.rank, self.how = rank, how
        self.name = f"locks-r{rank}" if how == "share" else f"locks-r{rank}-{how}"
        self.declaration = Declaration("LOCKS")

    def summary(self, pages: torch.Tensor, layer: Layer) -> torch.Tensor:
        """The keys that the summaries stand for: scoring them is the method's score, written the long way."""
        return summarise(pages, self.rank).reconstruct()

    def page_scores(self, steps: Steps, summary: torch.Tensor) -> torch.Tensor:
        return page_mass(steps, summary)

    def page_bytes(self, shape: DecodeShape) -> int:
        return cost.locks_page_bytes(shape, self.rank)


class LocksTwoStage(PageSelector):
    """Rank `first` for all pages, rank `rank` for the best `times` * K of them, of which the best are kept.

    Basis rows are stored strongest first, so the first stage reads a prefix of them.
    """

    def __init__(self, first: int, times: int, rank: int = 8) -> None:
        self.first, self.times, self.rank = first, times, rank
        self.name = f"locks-r{first}x{times}-r{rank}"
        self.declaration = Declaration("LOCKS")

    def build(self, layer: Layer, options: SelectOptions, shape: DecodeShape) -> PageState:
        whole = summarise(layer.pages(shape.page_size), self.rank)
        prefix = SummaryFields(
            whole.basis[..., : self.first, :],
            whole.coefficients[..., : self.first],
            whole.centroid,
            whole.coefficient_scale,
            whole.basis_scale[..., : self.first],
            whole.centroid_scale,
        )
        return PageState(shape.page_size, (prefix.reconstruct(), whole.reconstruct()))

    def page_scores(self, steps: Steps, summary: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        """[2, S, H, G, P]: of both stages.  A kernel makes the second only for the shortlist, which `select` looks at."""
        return torch.stack([page_mass(steps, keys) for keys in summary])

    def select(
        self, scores: torch.Tensor, steps: Steps, layer: Layer, state: PageState, options: SelectOptions
    ) -> torch.Tensor:
        coarse, fine = scores
        kept, sink, recent = options.kept_pages(state.page_size), options.sink_pages, options.recent_pages
        pages = (steps.lengths + state.page_size - 1) // state.page_size
        logical = torch.arange(coarse.shape[-1])
        outside = (logical >= (pages - recent)[:, None])[:, None, None]
        first = self.combine(coarse.masked_fill(outside, float("-inf")))
        shortlist = best(first.masked_fill(outside | (logical < sink), float("-inf")), self.times * kept)
        # Pages that are not on the list keep their coarse mass in the norm and cannot win.
        second = self.combine(torch.where(shortlist, fine, coarse).masked_fill(outside, float("-inf")))
        winners = second.masked_fill(~shortlist, float("-inf"))
        return _Given().select(winners, steps, layer, state, options)

    def score_bytes(self, shape: DecodeShape, options: SelectOptions, tokens: int) -> float:
        return cost.locks_two_stage_bytes(shape, options, tokens, self.rank, self.first, self.times)


class _Given(PageSelector):
    """Selects by scores [S, H, 1, P] that are combined already."""

    how = "none"
