"""RocketKV (Behnam et al. 2025): eviction after prefill, then a sparse choice of tokens every step; a budget is traffic."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from locks_kernels.selector_cost import RocketPlan
from locks_kernels.selectors.base import Declaration, Layer, Selector, Steps, best
from locks_kernels.shapes import DecodeShape, SelectOptions

WINDOW = 32  # last prompt queries that vote for what stays
POOL = 63  # neighbours of a token that stay with it
HIDDEN = torch.finfo(torch.float32).min


@dataclass
class RocketState:
    """order: int64 [H, n] surviving tokens in order, then generated ones; keys: [H, n, D]; tokens of a prompt: `prompt`."""

    plan: RocketPlan
    order: torch.Tensor
    keys: torch.Tensor


class RocketKV(Selector):
    """As published.  evict=False: the second stage on the full cache, a peer that loses nothing for good."""

    def __init__(self, evict: bool = True) -> None:
        self.evict = evict
        self.name = "rocketkv" if evict else "rocketkv-second-stage"
        label, visible = ("as published", True) if evict else ("adapted", None)
        self.declaration = Declaration(label, question_visible=visible, budget_built=True)  # type: ignore[arg-type]

    def missing(self, layer: Layer) -> str | None:
        if self.evict and (layer.observed is None or layer.observed.shape[2] < WINDOW):
            return f"needs the queries of the last {WINDOW} prompt tokens; traces of a model bring them"
        return None

    def build(self, layer: Layer, options: SelectOptions, shape: DecodeShape) -> RocketState:
        new = layer.tokens - layer.prompt
        plan = RocketPlan.of(layer.tokens, options.budget_tokens, shape.head_dim, new, self.evict)
        survivors = torch.arange(layer.prompt).expand(layer.keys.shape[0], -1)
        if self.evict:
            survivors = _survivors(layer, min(layer.prompt, max(plan.capacity - new, WINDOW)))
        generated = torch.arange(layer.prompt, layer.tokens).expand(layer.keys.shape[0], -1)
        order = torch.cat((survivors, generated), 1)
        keys = layer.keys.gather(1, order[..., None].expand(-1, -1, layer.keys.shape[2]))
        return RocketState(plan, order, keys)

    def score(self, steps: Steps, state: RocketState) -> torch.Tensor:
        """Shares of chunks by the strongest channels, repeated to tokens: [S, H, G, n].

        A chunk holds its channel-wise maximum in the direction of the group's summed query; only tokens that a step sees count.
        """
        total = steps.queries.sum(2)  # [S, H, D]
        channels = steps.queries.abs().mean(2).topk(state.plan.channels, dim=-1).indices  # [S, H, r]
        out = []
        for s, length in enumerate(steps.lengths.tolist()):
            count = int((state.order[0] < length).sum())
            signed = state.keys[:, :count] * total[s].sign()[:, None]
            tail = -count % state.plan.chunk
            signed = torch.nn.functional.pad(signed, (0, 0, 0, tail), value=HIDDEN)
            boxes = signed.unflatten(1, (-1, state.plan.chunk)).amax(2) * total[s].sign()[:, None]
            picked = channels[s][:, None]
            part = boxes.gather(2, picked.expand(-1, boxes.shape[1], -1))  # [H, C, r]
            query = steps.queries[s].gather(2, picked.expand(-1, steps.queries.shape[2], -1))  # [H, G, r]
            share = query.abs().sum(-1, keepdim=True) / steps.queries[s].abs().sum(-1, keepdim=True).clamp_min(1e-30)
            temperature = (steps.queries.shape[-1] * share).sqrt().clamp_min(1e-30)
            shares = (query @ part.mT / temperature).softmax(-1)
            tokens = shares.repeat_interleave(state.plan.chunk, -1)[..., :count]
            out.append(torch.nn.functional.pad(tokens, (0, state.order.shape[1] - count), value=float("-inf")))
        return torch.stack(out)

    def combine(self, scores: torch.Tensor) -> torch.Tensor:
        return scores.mean(2, keepdim=True)

    def select(
        self, scores: torch.Tensor, steps: Steps, layer: Layer, state: RocketState, options: SelectOptions
    ) -> torch.Tensor:
        chosen = best(self.combine(scores), state.plan.attended)
        keep = torch.zeros(*chosen.shape[:3], layer.tokens, dtype=torch.bool)
        return keep.scatter_(-1, state.order[None, :, None].expand_as(chosen), chosen) & steps.visible(layer.tokens)

    def score_bytes(self, shape: DecodeShape, options: SelectOptions, tokens: int) -> float:
        return RocketPlan.of(tokens, options.budget_tokens, shape.head_dim, evict=self.evict).score_bytes(shape)


def _survivors(layer: Layer, count: int) -> torch.Tensor:
    """Ascending prompt tokens [H, count] that stay: the last WINDOW, and those that their queries attend to most."""
    assert layer.observed is not None  # `missing` was asked
    observed = layer.observed[:, :, -WINDOW:]
    first = layer.prompt - WINDOW
    logits = torch.einsum("hgwd,hnd->hgwn", observed, layer.keys[:, : layer.prompt]) * observed.shape[-1] ** -0.5
    ahead = torch.arange(layer.prompt) > (first + torch.arange(WINDOW))[:, None]
    votes = logits.masked_fill(ahead, float("-inf")).softmax(-1).sum((1, 2))[:, :first]  # [H, first]
    pooled = torch.nn.functional.max_pool1d(votes, POOL, 1, POOL // 2)
    stay = best(pooled, count - WINDOW)
    chosen = stay.nonzero()[:, 1].view(len(stay), -1)
    window = torch.arange(first, layer.prompt).expand(len(stay), -1)
    return torch.cat((chosen, window), 1)
