"""The contract of a page selector: five hooks, the same for every method.

    build    what the method stores of the keys, once per sequence and layer
    score    a number per query head and unit of choice (page, chunk or token)
    combine  one score per KV head from those of its group, or none
    select   the tokens that are attended
    attend   exact softmax attention over them, unless the method says otherwise

Everything is plain torch in fp32.  S steps, H KV heads, G query heads each, N tokens, P pages; other letters as in shapes.py.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import torch

from locks_kernels import selector_cost as cost
from locks_kernels.selectors.rope import Rope
from locks_kernels.shapes import DecodeShape, SelectOptions

Label = Literal["reference", "LOCKS", "as published", "adapted", "floor"]
Granularity = Literal["KV head", "query head"]


@dataclass
class Layer:
    """One attention layer of one sequence, as dense decoding left it.

    keys, values  fp32 [H, N, D]; keys with their positions applied
    prompt        tokens of the prompt; the others were generated
    context       where the question begins: what a compression that has not seen it may look at
    system        tokens before the context, which evicting methods keep
    observed      fp32 [H, G, W, D]: queries of the last W prompt tokens
    rope          rotation of each position, to take it off the keys again
    importance    fp32 [H, N]: KVzip's score of each token; `importances` [layers, H, N] of the whole model
    shared_basis  fp32 [H, D, D]: columns are principal axes of keys of another text, strongest first
    """

    index: int
    keys: torch.Tensor
    values: torch.Tensor
    prompt: int
    context: int
    system: int = 0
    observed: torch.Tensor | None = None
    rope: Rope | None = None
    importance: torch.Tensor | None = None
    importances: torch.Tensor | None = None
    shared_basis: torch.Tensor | None = None
    seed: int = 0

    @property
    def tokens(self) -> int:
        return self.keys.shape[1]

    def pages(self, page_size: int) -> torch.Tensor:
        """The complete pages, [H, P, PAGE, D]."""
        complete = self.tokens // page_size
        return self.keys[:, : complete * page_size].unflatten(1, (complete, page_size))


@dataclass
class Steps:
    """Queries of decode steps.

    queries  fp32 [S, H, G, D], positions applied
    lengths  int64 [S]: tokens that a step sees, the new one included
    """

    queries: torch.Tensor
    lengths: torch.Tensor

    @property
    def scale(self) -> float:
        return self.queries.shape[-1] ** -0.5

    def visible(self, tokens: int) -> torch.Tensor:
        """bool [S, 1, 1, N]: tokens that a step may see."""
        return (torch.arange(tokens) < self.lengths[:, None])[:, None, None]


@dataclass(frozen=True)
class Declaration:
    """What has to be known to compare a method fairly.

    granularity       whose table it is
    forced_in_budget  whether always-kept tokens count inside the budget
    dense_layers      layers that attend everything
    question_visible  whether the cache was compressed after the question was seen; None where nothing is compressed for good
    budget_built      whether what is stored depends on the budget
    """

    label: Label
    granularity: Granularity = "KV head"
    forced_in_budget: bool = True
    dense_layers: tuple[int, ...] = ()
    question_visible: bool | None = None
    budget_built: bool = False


class Selector:
    """One method.  `name` is what a user types."""

    name: str
    declaration: Declaration
    complete_pages_only = False  # what `build` stores changes only when a page of the cache fills

    def missing(self, layer: Layer) -> str | None:
        """Why this layer's data is not enough for the method, or None."""
        return None

    def build(self, layer: Layer, options: SelectOptions, shape: DecodeShape) -> Any:
        raise NotImplementedError

    def score(self, steps: Steps, state: Any) -> torch.Tensor:
        """fp32 [S, H, G, ...]."""
        raise NotImplementedError

    def combine(self, scores: torch.Tensor) -> torch.Tensor:
        raise NotImplementedError

    def select(self, scores: torch.Tensor, steps: Steps, layer: Layer, state: Any, options: SelectOptions) -> torch.Tensor:
        """bool [S, H, 1 or G, N]: tokens attended.  `scores` comes from `score`; this calls `combine`."""
        raise NotImplementedError

    def attend(self, steps: Steps, layer: Layer, state: Any, keep: torch.Tensor) -> torch.Tensor:
        """fp32 [S, H, G, D]."""
        return softmax_attention(steps, layer.keys, layer.values, keep)

    def score_bytes(self, shape: DecodeShape, options: SelectOptions, tokens: int) -> float:
        """Read by `score` per step and KV head of a layer."""
        return 0.0

    def attend_bytes(self, shape: DecodeShape, tokens: float) -> float:
        """Read by `attend` for `tokens` distinct tokens of a KV head of a layer."""
        return cost.attend_bytes(shape, tokens)


def softmax_attention(steps: Steps, keys: torch.Tensor, values: torch.Tensor, keep: torch.Tensor) -> torch.Tensor:
    """Exact attention over the tokens of `keep` [S, H, 1 or G, N]; fp32 [S, H, G, D], zeros where nothing is kept."""
    logits = torch.einsum("shgd,hnd->shgn", steps.queries, keys) * steps.scale
    weights = logits.masked_fill(~keep, float("-inf")).softmax(-1).nan_to_num(0.0)
    return torch.einsum("shgn,hnd->shgd", weights, values)


def page_mass(steps: Steps, pages: torch.Tensor) -> torch.Tensor:
    """log-sum-exp of each page's scaled logits, [S, H, G, P] in nats; pages [H, P, PAGE, D] of keys or what stands for them."""
    keys = pages.flatten(1, 2)
    logits = torch.einsum("shgd,hnd->shgn", steps.queries, keys) * steps.scale
    return logits.unflatten(-1, pages.shape[1:3]).logsumexp(-1)


def best(scores: torch.Tensor, count: int) -> torch.Tensor:
    """bool like `scores`: the `count` largest of the last axis, ties to the lowest index.  -inf is never chosen."""
    order = scores.sort(dim=-1, descending=True, stable=True).indices[..., :count]
    return torch.zeros_like(scores, dtype=torch.bool).scatter_(-1, order, True) & (scores > float("-inf"))
