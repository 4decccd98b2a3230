"""Scores from the mean and the spread of a page's keys.

centroid      S = q.mu / sqrt(D): a lower bound of the page's mass less log PAGE (Jensen)
mean + std    S = (q.mu + 0.5 |q| std) / sqrt(D), std one number per page or one per channel (UNIQUE, arXiv 2605.27740)
second order  S = q.mu / sqrt(D) + q' Sigma q / 2D: the Gaussian approximation of the page's mass less log PAGE
              (COBS, arXiv 2607.09052)
"""

from __future__ import annotations

import math
from typing import TypeAlias

import torch

from locks_kernels import selector_cost as cost
from locks_kernels.reference import quantise
from locks_kernels.selectors.base import Declaration, Layer, Steps
from locks_kernels.selectors.pages import PageSelector
from locks_kernels.shapes import DecodeShape

STD_WEIGHT = 0.5
Moments: TypeAlias = tuple[torch.Tensor, torch.Tensor]


def mean_scores(steps: Steps, mean: torch.Tensor) -> torch.Tensor:
    """[S, H, G, P] from means [H, P, D]."""
    return torch.einsum("shgd,hpd->shgp", steps.queries, mean) * steps.scale


class Centroid(PageSelector):
    name = "centroid"
    declaration = Declaration("adapted")

    def summary(self, pages: torch.Tensor, layer: Layer) -> torch.Tensor:
        return pages.mean(2)

    def page_scores(self, steps: Steps, summary: torch.Tensor) -> torch.Tensor:
        return mean_scores(steps, summary)

    def page_bytes(self, shape: DecodeShape) -> int:
        return cost.PAGE_BYTES["centroid"](shape)


class MeanStdVector(PageSelector):
    """One standard deviation per channel, weighed by |q_i|."""

    name = "mean-std-vector"
    declaration = Declaration("adapted")

    def summary(self, pages: torch.Tensor, layer: Layer) -> Moments:
        return pages.mean(2), pages.std(2, correction=0)

    def page_scores(self, steps: Steps, summary: Moments) -> torch.Tensor:
        mean, std = summary
        spread = torch.einsum("shgd,hpd->shgp", steps.queries.abs(), std) * steps.scale
        return mean_scores(steps, mean) + STD_WEIGHT * spread

    def page_bytes(self, shape: DecodeShape) -> int:
        return cost.PAGE_BYTES["mean-std-vector"](shape)


class MeanStdScalar(PageSelector):
    """One standard deviation per page: the root of the mean variance of its channels, weighed by |q|."""

    name = "mean-std-scalar"
    declaration = Declaration("adapted")

    def summary(self, pages: torch.Tensor, layer: Layer) -> Moments:
        return pages.mean(2), pages.var(2, correction=0).mean(-1).sqrt()

    def page_scores(self, steps: Steps, summary: Moments) -> torch.Tensor:
        mean, std = summary
        length = steps.queries.norm(dim=-1, keepdim=True)  # [S, H, G, 1]
        return mean_scores(steps, mean) + STD_WEIGHT * length * std[None, :, None] * steps.scale

    def page_bytes(self, shape: DecodeShape) -> int:
        return cost.PAGE_BYTES["mean-std-scalar"](shape)


class Unique(MeanStdScalar):
    """Pages of half the size and the group's maximum, as published."""

    name = "unique"
    declaration = Declaration("as published")
    how = "max"
    divisor = 2


class SecondOrderFull(PageSelector):
    """With the whole covariance: shows what the formula can do; nothing is saved by storing it."""

    name = "second-order-full"
    declaration = Declaration("reference")

    def summary(self, pages: torch.Tensor, layer: Layer) -> Moments:
        mean = pages.mean(2)
        return mean, (pages - mean[:, :, None]) / math.sqrt(pages.shape[2])

    def page_scores(self, steps: Steps, summary: Moments) -> torch.Tensor:
        """`directions` [H, P, n, D] are such that Sigma = directions' directions."""
        mean, directions = summary
        variance = torch.einsum("shgd,hpnd->shgpn", steps.queries, directions).square().sum(-1) * steps.scale**2
        return mean_scores(steps, mean) + variance / 2

    def page_bytes(self, shape: DecodeShape) -> int:
        return cost.PAGE_BYTES["oracle"](shape)


class SecondOrder(SecondOrderFull):
    """int8 mean and the leading directions of the covariance in int4, each scaled by its standard deviation."""

    name = "second-order"
    declaration = Declaration("adapted")

    def summary(self, pages: torch.Tensor, layer: Layer) -> Moments:
        mean, deviations = super().summary(pages, layer)
        _, sigma, rows = torch.linalg.svd(deviations, full_matrices=False)
        rank = cost.SECOND_ORDER_RANK
        packed, scale = quantise(sigma[..., :rank, None] * rows[..., :rank, :], 7, -1)
        mean_q, mean_scale = quantise(mean, 127, -1)
        return mean_q.float() * mean_scale.float()[..., None], packed.float() * scale.float()[..., None]

    def page_bytes(self, shape: DecodeShape) -> int:
        return cost.PAGE_BYTES["second-order"](shape)
