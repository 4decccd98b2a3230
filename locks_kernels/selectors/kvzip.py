"""KVzip (Kim et al. 2025): eviction that has not seen the question, by how much a repetition of the context attends to it."""

from __future__ import annotations

from typing import Literal

import torch

from locks_kernels.selectors.base import Declaration, Layer, Selector, Steps, best
from locks_kernels.shapes import DecodeShape, SelectOptions


class KVzip(Selector):
    """level "pair": one threshold for the whole model, so heads keep different numbers of tokens; "pair-uniform": per head.

    The budget is what stays of the context; the system prompt, the question and generated tokens stay on top of it.
    """

    def __init__(self, level: Literal["pair", "pair-uniform"]) -> None:
        self.level = level
        self.name = f"kvzip-{level}"
        self.declaration = Declaration("as published", forced_in_budget=False, question_visible=False, budget_built=True)

    def missing(self, layer: Layer) -> str | None:
        if layer.importance is None or layer.importances is None:
            return "needs the model to repeat its context; traces of a model bring that with --kvzip"
        return None

    def build(self, layer: Layer, options: SelectOptions, shape: DecodeShape) -> torch.Tensor:
        """bool [H, N]: what survives."""
        assert layer.importance is not None and layer.importances is not None  # `missing` was asked
        context = slice(layer.system, layer.context)
        keep = torch.ones(layer.keys.shape[:2], dtype=torch.bool)
        count = min(options.budget_tokens, layer.context - layer.system)
        if self.level == "pair-uniform":
            keep[:, context] = best(layer.importance[:, context], count)
            return keep
        everything = layer.importances[:, :, context]
        total = count * everything.shape[0] * everything.shape[1]
        if total < everything.numel():
            threshold = everything.flatten().topk(total + 1).values[-1]  # ties at the threshold are dropped, as published
            keep[:, context] = layer.importance[:, context] > threshold
        return keep

    def score(self, steps: Steps, state: torch.Tensor) -> torch.Tensor:
        """Nothing is scored at decode time: the survivors, [S, H, G, N]."""
        return state[None, :, None].expand(*steps.queries.shape[:3], -1)

    def combine(self, scores: torch.Tensor) -> torch.Tensor:
        return scores[:, :, :1]

    def select(
        self, scores: torch.Tensor, steps: Steps, layer: Layer, state: torch.Tensor, options: SelectOptions
    ) -> torch.Tensor:
        return self.combine(scores) & steps.visible(layer.tokens)
