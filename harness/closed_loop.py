"""The model itself decodes with a selector: what it answers, and how far its next-token distribution moves from full attention.

Prefill is full attention, the beginning of the answer included, so the first generated token is the same for everybody.  Every
later step goes through the selector's five hooks, in every layer, on the cache that grows with the model's own tokens; a page
is summarised when it has filled.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from harness.trace_capture import OBSERVED, Tokens, importances, rotation
from harness.trace_model import Attend, TraceModel, attending, recording
from locks_kernels.selectors.base import Layer, Selector, Steps
from locks_kernels.selectors.rope import Rope
from locks_kernels.shapes import DecodeShape, SelectOptions

MOST_TOKENS = 48  # generated for one prompt
MORE_TOKENS = 20  # than the right answer has


@dataclass
class Start:
    """A prompt and the beginning of its answer, prefilled.  `cache` is transformers'; decoding grows it and crops it again.

    first, observed, basis, importance: as in harness.traces.Trace
    """

    model: TraceModel
    tokens: Tokens
    cache: Any
    first: int
    observed: list[torch.Tensor]
    rope: Rope
    basis: torch.Tensor | None
    importance: torch.Tensor | None
    seed: int

    @property
    def length(self) -> int:
        """Tokens of the prefill."""
        return self.tokens.first

    @property
    def wanted(self) -> int:
        """Tokens to generate: as many as the right answer has, and more for a model that repeats the beginning first."""
        return min(len(self.tokens.ids) - self.length + MORE_TOKENS, MOST_TOKENS)

    def layer(self, index: int, keys: torch.Tensor, values: torch.Tensor) -> Layer:
        return Layer(
            index=index,
            keys=keys,
            values=values,
            prompt=self.tokens.prompt,
            context=self.tokens.context,
            system=self.tokens.system,
            observed=self.observed[index],
            rope=self.rope,
            importance=None if self.importance is None else self.importance[index],
            importances=self.importance,
            shared_basis=None if self.basis is None else self.basis[index],
            seed=self.seed,
        )


@dataclass
class Course:
    """Tokens generated one after the other, and the log-probabilities fp32 [n, V] of each but the first."""

    tokens: list[int]
    logs: torch.Tensor


@dataclass
class Divergence:
    """A selector's course beside full attention's.

    course  what it generated itself
    first   index of its first token that is not full attention's, None if there is none
    agreed  steps whose likeliest token is full attention's when both are given full attention's tokens;  steps: of them all
    kl      sum over these steps of KL(full attention || selector), nats
    active  the selector attended less than everything in every sparse layer and step
    """

    course: Course
    first: int | None
    agreed: int
    steps: int
    kl: float
    active: bool


@torch.no_grad()
def prefill(model: TraceModel, tokens: Tokens, seed: int, kvzip: bool, basis: torch.Tensor | None) -> Start:
    """One pass over the prompt and the beginning of the answer, and with `kvzip` one more over the context."""
    observed: dict[int, torch.Tensor] = {}
    turns: list[tuple[torch.Tensor, torch.Tensor]] = []

    def hook(layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> None:
        last = query[:, tokens.prompt - OBSERVED : tokens.prompt].float()
        observed[layer] = last.unflatten(0, (key.shape[0], -1)).clone()

    rotary = model.model.model.rotary_emb.register_forward_hook(lambda module, inputs, output: turns.append(output))
    try:
        with recording(hook):
            result = model.model(torch.tensor([tokens.ids[: tokens.first]]), logits_to_keep=1, use_cache=True)
    finally:
        rotary.remove()
    cache = result.past_key_values
    importance = importances(model, tokens, copy.deepcopy(cache)) if kvzip else None
    rope = Rope(*rotation(model, turns[0]), model.interleaved)
    first = int(result.logits[0, -1].argmax())
    return Start(model, tokens, cache, first, [observed[i] for i in sorted(observed)], rope, basis, importance, seed)


class SelectorAttend:
    """A selector in the place of the model's attention, for one course.  Its state of a layer is built anew when a page has
    filled, or at every step where it stores more than complete pages.
    """

    def __init__(self, start: Start, selector: Selector, options: SelectOptions) -> None:
        self.start, self.selector, self.options = start, selector, options
        self.active = True
        self._states: dict[int, tuple[int, Any]] = {}

    def __call__(self, index: int, query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> torch.Tensor | None:
        if index in self.selector.declaration.dense_layers:
            return None
        heads, tokens, head_dim = keys.shape
        shape = DecodeShape(query.shape[0], heads, head_dim)
        layer = self.start.layer(index, keys, values)
        steps = Steps(query[:, 0].unflatten(0, (heads, -1))[None], torch.tensor([tokens]))
        version = tokens // shape.page_size if self.selector.complete_pages_only else tokens
        known, state = self._states.get(index, (-1, None))
        if known != version:
            state = self.selector.build(layer, self.options, shape)
            self._states[index] = version, state
        scores = self.selector.score(steps, state)
        keep = self.selector.select(scores, steps, layer, state, self.options)
        self.active &= bool((keep.sum(-1) < tokens).all())
        return self.selector.attend(steps, layer, state, keep)[0].flatten(0, 1)[:, None]


@torch.no_grad()
def decode(start: Start, attend: Attend | None, given: Sequence[int], count: int, end: Sequence[int] = ()) -> Course:
    """`count` tokens or up to one of `end`: `given` ones first, then the likeliest next ones.  The cache is left as it was
    found.
    """
    tokens, logs = list(given), []
    try:
        with attending(attend or (lambda *_: None)):
            for at in range(count - 1):
                result = start.model.model(torch.tensor([[tokens[at]]]), past_key_values=start.cache, use_cache=True)
                logs.append(result.logits[0, -1].float().log_softmax(-1))
                if at + 1 == len(tokens):
                    tokens.append(int(logs[-1].argmax()))
                if tokens[at + 1] in end:
                    break
    finally:
        if (behind := start.cache.get_seq_length() - start.length) > 0:
            start.cache.crop(-behind)
    return Course(tokens, torch.stack(logs))


def full_attention(start: Start) -> Course:
    """What the model says by itself, at least two tokens."""
    end = start.model.model.generation_config.eos_token_id
    return decode(start, None, [start.first], start.wanted, end if isinstance(end, list) else [end])


def diverge(start: Start, selector: Selector, options: SelectOptions, full: Course) -> Divergence:
    """The selector's own course, and its distributions along full attention's tokens."""
    count = len(full.tokens)
    attend = SelectorAttend(start, selector, options)
    own = along = decode(start, attend, [start.first], count)
    first = next((at for at, pair in enumerate(zip(own.tokens, full.tokens, strict=True)) if len(set(pair)) > 1), None)
    if first is not None and first < count - 1:  # from there on it saw other tokens
        again = SelectorAttend(start, selector, options)
        along = decode(start, again, full.tokens, count)
        attend.active &= again.active
    agreed = int((along.logs.argmax(-1) == torch.tensor(full.tokens[1:])).sum())
    kl = torch.nn.functional.kl_div(along.logs, full.logs, log_target=True, reduction="sum")
    return Divergence(own, first, agreed, count - 1, float(kl.clamp_min(0.0)), attend.active)


def said(start: Start, tokens: Sequence[int]) -> str:
    return str(start.model.tokenizer.decode(list(tokens), skip_special_tokens=True))


def found(answers: Sequence[str], text: str) -> int:
    """How many of the answers the text contains, case left aside: RULER's matching."""
    return sum(answer.casefold() in text.casefold() for answer in answers)
