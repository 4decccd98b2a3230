"""ShadowKV (Sun et al. 2024): landmarks choose chunks, low-rank keys are rebuilt, outliers and a local window are exact."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from locks_kernels import selector_cost as cost
from locks_kernels.selectors.base import Declaration, Layer, Selector, Steps, best, softmax_attention
from locks_kernels.selectors.moments import Centroid, mean_scores
from locks_kernels.selectors.pages import combine_group
from locks_kernels.shapes import DecodeShape, SelectOptions


@dataclass
class ShadowState:
    """landmarks [H, C, D]; exact: bool [H, N], outliers, local window and generated tokens; keys: fp32 [H, N, D], rebuilt."""

    landmarks: torch.Tensor
    outlier: torch.Tensor
    exact: torch.Tensor
    keys: torch.Tensor


class ShadowKV(Selector):
    """As published: chunks of 8, 48 outlier chunks, rank 160 of the unrotated keys over all KV heads of a layer.

    Outliers, the local window and generated tokens are attended on top of the budget.
    """

    name = "shadowkv"
    declaration = Declaration("as published", forced_in_budget=False, question_visible=True)

    def missing(self, layer: Layer) -> str | None:
        if layer.rope is None:
            return "needs the rotation of each position; traces of a model bring it"
        chunks = layer.prompt // cost.SHADOW_CHUNK - cost.SHADOW_LOCAL
        if chunks <= cost.SHADOW_OUTLIERS:
            return f"needs a prompt of more than {(cost.SHADOW_OUTLIERS + cost.SHADOW_LOCAL) * cost.SHADOW_CHUNK} tokens"
        return None

    def build(self, layer: Layer, options: SelectOptions, shape: DecodeShape) -> ShadowState:
        chunk = cost.SHADOW_CHUNK
        chunks = layer.prompt // chunk - cost.SHADOW_LOCAL
        covered = chunks * chunk
        keys = layer.keys[:, :covered].unflatten(1, (chunks, chunk))
        landmarks = keys.mean(2)
        likeness = torch.cosine_similarity(keys, landmarks[:, :, None], dim=-1).amin(-1)  # [H, C]
        outlier = best(-likeness, cost.SHADOW_OUTLIERS)
        exact = torch.ones(layer.keys.shape[:2], dtype=torch.bool)
        exact[:, :covered] = outlier.repeat_interleave(chunk, -1)
        rebuilt = torch.where(exact[..., None], layer.keys, _low_rank(layer))
        return ShadowState(landmarks, outlier, exact, rebuilt)

    def score(self, steps: Steps, state: ShadowState) -> torch.Tensor:
        """Softmax over landmarks, [S, H, G, C]; outlier chunks are no candidates."""
        logits = mean_scores(steps, state.landmarks)
        return logits.masked_fill(state.outlier[None, :, None], float("-inf")).softmax(-1)

    def combine(self, scores: torch.Tensor) -> torch.Tensor:
        return combine_group(scores, "max")

    def select(
        self, scores: torch.Tensor, steps: Steps, layer: Layer, state: ShadowState, options: SelectOptions
    ) -> torch.Tensor:
        combined = self.combine(scores).masked_fill(state.outlier[None, :, None], float("-inf"))
        chosen = best(combined, options.budget_tokens // cost.SHADOW_CHUNK).repeat_interleave(cost.SHADOW_CHUNK, -1)
        chosen = torch.nn.functional.pad(chosen, (0, layer.tokens - chosen.shape[-1]))
        return (chosen | state.exact[None, :, None]) & steps.visible(layer.tokens)

    def attend(self, steps: Steps, layer: Layer, state: ShadowState, keep: torch.Tensor) -> torch.Tensor:
        return softmax_attention(steps, state.keys, layer.values, keep)

    def score_bytes(self, shape: DecodeShape, options: SelectOptions, tokens: int) -> float:
        return cost.ShadowKV.score_bytes(shape, tokens)

    def attend_bytes(self, shape: DecodeShape, tokens: float) -> float:
        return cost.ShadowKV.attend_bytes(shape, tokens)


def _low_rank(layer: Layer) -> torch.Tensor:
    """Keys [H, N, D]: the prompt's after a truncated SVD of the unrotated [tokens, H * D], generated ones as they are."""
    assert layer.rope is not None  # `missing` was asked
    heads, _, head_dim = layer.keys.shape
    plain = layer.rope.remove(layer.keys[:, : layer.prompt]).transpose(0, 1).flatten(1)
    axes = torch.linalg.eigh(plain.T @ plain).eigenvectors.flip(-1)[:, : cost.SHADOW_RANK]
    rebuilt = (plain @ axes @ axes.T).unflatten(1, (heads, head_dim)).transpose(0, 1)
    return torch.cat((layer.rope.apply(rebuilt), layer.keys[:, layer.prompt :]), 1)


class Landmarks(Centroid):
    """ShadowKV's choice alone, at the cache's page size, with exact keys: centroids, the group's largest share."""

    name = "shadowkv-landmarks"
    declaration = Declaration("adapted")

    def combine(self, scores: torch.Tensor) -> torch.Tensor:
        return combine_group(scores.softmax(-1), "max")
