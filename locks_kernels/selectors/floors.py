"""What any method must beat: no choice at all, and a blind one."""

from __future__ import annotations

import torch

from locks_kernels.selectors.base import Declaration, Layer, Steps
from locks_kernels.selectors.pages import PageSelector
from locks_kernels.shapes import DecodeShape


class SlidingWindow(PageSelector):
    """The sink page and the latest pages, at their original positions."""

    name = "sliding-window"
    declaration = Declaration("floor")

    def summary(self, pages: torch.Tensor, layer: Layer) -> int:
        return pages.shape[1]

    def page_scores(self, steps: Steps, summary: int) -> torch.Tensor:
        return torch.arange(summary, dtype=torch.float32).expand(*steps.queries.shape[:3], -1)

    def page_bytes(self, shape: DecodeShape) -> int:
        return 0


class RandomPages(PageSelector):
    """Other pages for every layer and KV head, the same for all steps."""

    name = "random-pages"
    declaration = Declaration("floor")

    def summary(self, pages: torch.Tensor, layer: Layer) -> torch.Tensor:
        generator = torch.Generator().manual_seed(1000 * layer.seed + layer.index)
        return torch.rand(pages.shape[0], 1, pages.shape[1], generator=generator)

    def page_scores(self, steps: Steps, summary: torch.Tensor) -> torch.Tensor:
        return summary.expand(*steps.queries.shape[:3], -1)

    def page_bytes(self, shape: DecodeShape) -> int:
        return 0
