"""What methods that choose whole pages by a score per page share."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import torch

from locks_kernels.selectors.base import Layer, Selector, Steps, best
from locks_kernels.shapes import DecodeShape, SelectOptions

Combine = Literal["share", "peak", "max", "none"]


def combine_group(scores: torch.Tensor, how: Combine) -> torch.Tensor:
    """Scores [S, H, G, P] in nats (-inf: not scored) to [S, H, 1, P], or as they are for "none".

    share  mean over the group of exp(S) / sum_p exp(S)       peak  sum over the group of exp(S - max_p S)
    max    largest score of the group
    """
    if how == "none":
        return scores
    if how == "max":
        return scores.amax(2, keepdim=True)
    if how == "share":
        return scores.softmax(-1).mean(2, keepdim=True)
    return (scores - scores.amax(-1, keepdim=True)).exp().sum(2, keepdim=True)


@dataclass
class PageState:
    """summary: what the method stores of complete pages of `page_size` tokens."""

    page_size: int
    summary: Any


class PageSelector(Selector):
    """Scores complete pages, keeps sink and recent pages inside the budget, ties to the lowest page.

    how      combination over the group
    divisor  its pages are this much smaller than those of the cache
    """

    how: Combine = "share"
    divisor = 1
    complete_pages_only = True

    def summary(self, pages: torch.Tensor, layer: Layer) -> Any:
        """What is stored of complete pages [H, P, PAGE, D]."""
        raise NotImplementedError

    def page_scores(self, steps: Steps, summary: Any) -> torch.Tensor:
        """[S, H, G, P] in nats."""
        raise NotImplementedError

    def page_bytes(self, shape: DecodeShape) -> int:
        """Read per scored page (of its own size) and KV head."""
        raise NotImplementedError

    def build(self, layer: Layer, options: SelectOptions, shape: DecodeShape) -> PageState:
        page_size = shape.page_size // self.divisor
        return PageState(page_size, self.summary(layer.pages(page_size), layer))

    def score(self, steps: Steps, state: PageState) -> torch.Tensor:
        return self.page_scores(steps, state.summary)

    def combine(self, scores: torch.Tensor) -> torch.Tensor:
        return combine_group(scores, self.how)

    def select(
        self, scores: torch.Tensor, steps: Steps, layer: Layer, state: PageState, options: SelectOptions
    ) -> torch.Tensor:
        sink, recent = options.sink_pages * self.divisor, options.recent_pages * self.divisor
        kept = options.budget_tokens // state.page_size
        pages = (steps.lengths + state.page_size - 1) // state.page_size
        logical = torch.arange(-(-layer.tokens // state.page_size))
        outside = (logical >= (pages - recent)[:, None])[:, None, None]  # neither ranked nor part of a norm
        scores = scores.masked_fill(outside[..., : scores.shape[-1]], float("-inf"))
        combined = self.combine(scores).masked_fill(outside[..., : scores.shape[-1]], float("-inf"))
        combined[..., :sink] = float("-inf")
        chosen = best(combined, kept - sink - recent)
        table = torch.nn.functional.pad(chosen, (0, len(logical) - chosen.shape[-1]))
        table = table | (logical < sink) | outside | (pages <= kept)[:, None, None, None]
        return table.repeat_interleave(state.page_size, -1)[..., : layer.tokens] & steps.visible(layer.tokens)

    def score_bytes(self, shape: DecodeShape, options: SelectOptions, tokens: int) -> float:
        scored = max(shape.pages(tokens) - options.recent_pages, 0)
        return scored * self.divisor * self.page_bytes(shape)
