"""The spectral summary without its quantisation, for what the theory says about it."""

from __future__ import annotations

import torch


def spectral_keys(pages: torch.Tensor, rank: int) -> torch.Tensor:
    """Keys [..., PAGE, D] with their deviations from the page's centroid cut to the `rank` leading directions."""
    pages = pages.float()
    centroid = pages.mean(-2, keepdim=True)
    left, singular, right = torch.linalg.svd(pages - centroid, full_matrices=False)
    return centroid + left[..., :rank] * singular[..., None, :rank] @ right[..., :rank, :]


def spectral_energy(pages: torch.Tensor, ranks: tuple[int, ...]) -> list[float]:
    """Mean share of a page's variance that its leading directions carry, one number per rank."""
    pages = pages.float()
    energy = torch.linalg.svdvals(pages - pages.mean(-2, keepdim=True)).square()
    return [float((energy[..., :rank].sum(-1) / energy.sum(-1).clamp_min(1e-30)).mean()) for rank in ranks]
