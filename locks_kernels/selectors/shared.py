"""Keys in a basis that all pages share: the ablation of where a basis comes from, with LOCKS' score and combination.

loki        principal axes of the keys of another text, per layer and KV head (Loki, Singhania et al. 2024), no mean removed
shared-svd  leading right singular vectors of this very sequence's keys, found after prefill; centred: of keys less their mean,
            which is the same for all pages and so has no say in the choice
"""

from __future__ import annotations

import torch

from locks_kernels import selector_cost as cost
from locks_kernels.reference import quantise
from locks_kernels.selectors.base import Declaration, Layer, Steps, page_mass
from locks_kernels.selectors.pages import PageSelector
from locks_kernels.shapes import DecodeShape

LOCKS_RANK = 8  # whose bytes the quantised ones may use


class SharedBasis(PageSelector):
    """scope: "global" or "sequence".  rank None: as many as LOCKS' bytes afford at `bits`.  centred: for "sequence" alone."""

    def __init__(self, scope: str, rank: int | None, bits: int = 16, centred: bool = False) -> None:
        self.scope, self.rank, self.bits, self.centred = scope, rank, bits, centred
        stem = "loki-page" if scope == "global" else "shared-svd"
        self.name = (f"{stem}-r{rank}" if bits == 16 else f"{stem}-int{bits}") + ("-centred" if centred else "")
        self.declaration = Declaration("adapted")

    def missing(self, layer: Layer) -> str | None:
        if self.scope == "global" and layer.shared_basis is None:
            return "needs principal axes of another text; traces of a model bring them"
        return None

    def rank_of(self, shape: DecodeShape) -> int:
        if self.rank is not None:
            return min(self.rank, shape.head_dim)
        return cost.shared_rank(shape, cost.locks_page_bytes(shape, LOCKS_RANK), self.bits)

    def summary(self, pages: torch.Tensor, layer: Layer) -> torch.Tensor:
        """Keys after their way through the basis, [H, P, PAGE, D]."""
        heads, _, page_size, head_dim = pages.shape
        prompt = layer.keys[:, : layer.prompt]
        mean = prompt.mean(1)[:, None, None] if self.centred else torch.zeros(())
        if self.scope == "global":
            assert layer.shared_basis is not None  # `missing` was asked
            axes = layer.shared_basis
        else:
            axes = principal_axes(prompt - mean.squeeze(1) if self.centred else prompt)
        rank = self.rank_of(DecodeShape(heads, heads, head_dim, page_size))
        axes = axes[:, :, :rank]
        coefficients = torch.einsum("hptd,hdr->hptr", pages - mean, axes)
        if self.bits < 16:
            packed, scale = quantise(coefficients, 2 ** (self.bits - 1) - 1, -1)
            coefficients = packed.float() * scale.float()[..., None]
        return torch.einsum("hptr,hdr->hptd", coefficients, axes) + mean

    def page_scores(self, steps: Steps, summary: torch.Tensor) -> torch.Tensor:
        return page_mass(steps, summary)

    def page_bytes(self, shape: DecodeShape) -> int:
        return cost.shared_page_bytes(shape, self.rank_of(shape), self.bits)


def principal_axes(keys: torch.Tensor) -> torch.Tensor:
    """[H, D, D]: eigenvectors of K'K of keys [H, N, D] as columns, strongest first."""
    return torch.linalg.eigh(keys.mT @ keys).eigenvectors.flip(-1)
