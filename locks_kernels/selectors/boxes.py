"""Scores from an axis-aligned box around the keys of a page: S = sum_i max(q_i low_i, q_i high_i) / sqrt(D).

Quest (Tang et al. 2024): the box holds every key, so S bounds every logit from above.  Cuboid mean (ArkVale, Chen et al. 2024):
centre plus and minus the mean absolute deviation, no bound.
"""

from __future__ import annotations

from typing import TypeAlias

import torch

from locks_kernels import selector_cost as cost
from locks_kernels.selectors.base import Declaration, Layer, Steps, best
from locks_kernels.selectors.pages import PageSelector, PageState
from locks_kernels.shapes import DecodeShape, SelectOptions

Box: TypeAlias = tuple[torch.Tensor, torch.Tensor]  # low, high: [H, P, D]


def box_scores(steps: Steps, box: Box) -> torch.Tensor:
    low, high = box
    positive = torch.einsum("shgd,hpd->shgp", steps.queries.clamp_min(0.0), high)
    return (positive + torch.einsum("shgd,hpd->shgp", steps.queries.clamp_max(0.0), low)) * steps.scale


class QuestGroup(PageSelector):
    """One table per KV head by share of exp(S), sink and recent page as in every other method here."""

    name = "quest-group"
    declaration = Declaration("adapted")

    def summary(self, pages: torch.Tensor, layer: Layer) -> Box:
        return pages.amin(2), pages.amax(2)

    def page_scores(self, steps: Steps, summary: Box) -> torch.Tensor:
        return box_scores(steps, summary)

    def page_bytes(self, shape: DecodeShape) -> int:
        return cost.PAGE_BYTES["min-max"](shape)


class Quest(PageSelector):
    """As its evaluation runs: a table per query head, max(3, b / PAGE) pages, the open page competes like any other, nothing
    is forced, layers 0 and 1 are dense.
    """

    name = "quest"
    declaration = Declaration("as published", granularity="query head", dense_layers=(0, 1))
    how = "none"
    complete_pages_only = False  # the open page has a box, too

    def build(self, layer: Layer, options: SelectOptions, shape: DecodeShape) -> PageState:
        tail = -layer.tokens % shape.page_size
        low, high = (
            torch.nn.functional.pad(layer.keys, (0, 0, 0, tail), value=fill).unflatten(1, (-1, shape.page_size))
            for fill in (float("inf"), float("-inf"))
        )
        return PageState(shape.page_size, (layer.keys, (low.amin(2), high.amax(2))))

    def page_scores(self, steps: Steps, summary: tuple[torch.Tensor, Box]) -> torch.Tensor:
        """The box of a step's last page holds only the tokens that the step sees."""
        keys, (low, high) = summary
        page_size = -(-keys.shape[1] // low.shape[1])
        scores = box_scores(steps, (low, high))
        for s, length in enumerate(steps.lengths.tolist()):
            page = (length - 1) // page_size
            seen = keys[:, page * page_size : length]
            one = Steps(steps.queries[s : s + 1], steps.lengths[s : s + 1])
            scores[s, ..., page] = box_scores(one, (seen.amin(1, keepdim=True), seen.amax(1, keepdim=True)))[0, ..., 0]
        return scores

    def select(
        self, scores: torch.Tensor, steps: Steps, layer: Layer, state: PageState, options: SelectOptions
    ) -> torch.Tensor:
        pages = (steps.lengths + state.page_size - 1) // state.page_size
        outside = (torch.arange(scores.shape[-1]) >= pages[:, None])[:, None, None]
        table = best(scores.masked_fill(outside, float("-inf")), max(3, options.budget_tokens // state.page_size))
        return table.repeat_interleave(state.page_size, -1)[..., : layer.tokens] & steps.visible(layer.tokens)

    def page_bytes(self, shape: DecodeShape) -> int:
        return cost.PAGE_BYTES["min-max"](shape)


class QuestAllLayers(Quest):
    """The same with no dense layer, as LOCKS runs."""

    name = "quest-all-layers"
    declaration = Declaration("adapted", granularity="query head")


class CuboidMean(QuestGroup):
    """Centre plus and minus the mean absolute deviation of each channel."""

    name = "cuboid-mean"
    declaration = Declaration("adapted")

    def summary(self, pages: torch.Tensor, layer: Layer) -> Box:
        centre = pages.mean(2)
        radius = (pages - centre[:, :, None]).abs().mean(2)
        return centre - radius, centre + radius

    def page_bytes(self, shape: DecodeShape) -> int:
        return cost.PAGE_BYTES["cuboid-mean"](shape)
