"""The ceiling: every key is read, so that only paging and the budget are lost."""

from __future__ import annotations

import torch

from locks_kernels import selector_cost as cost
from locks_kernels.selectors.base import Declaration, Layer, Steps, page_mass
from locks_kernels.selectors.pages import PageSelector
from locks_kernels.shapes import DecodeShape


class Oracle(PageSelector):
    """Exact attention mass of each page: S = logsumexp_t q.k_t / sqrt(D)."""

    name = "oracle"
    declaration = Declaration("reference")

    def summary(self, pages: torch.Tensor, layer: Layer) -> torch.Tensor:
        return pages

    def page_scores(self, steps: Steps, summary: torch.Tensor) -> torch.Tensor:
        return page_mass(steps, summary)

    def page_bytes(self, shape: DecodeShape) -> int:
        return cost.PAGE_BYTES["oracle"](shape)


class TokenMax(Oracle):
    """The largest logit of each page instead of its mass."""

    name = "oracle-token-max"

    def page_scores(self, steps: Steps, summary: torch.Tensor) -> torch.Tensor:
        logits = torch.einsum("shgd,hptd->shgpt", steps.queries, summary)
        return logits.amax(-1) * steps.scale
