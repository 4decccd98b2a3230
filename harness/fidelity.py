"""What a selector keeps of a trace: attention mass, pages, carriers and output, all against exact attention on the same data.

Open loop: every selector sees the same queries, those of the steps of a given answer.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from harness.traces import Trace
from locks_kernels import selector_cost as cost
from locks_kernels.selectors import SELECTORS
from locks_kernels.selectors.base import Layer, Selector, Steps
from locks_kernels.shapes import DecodeShape, SelectOptions
from locks_kernels.spectral_keys import spectral_energy

RETRIEVAL_MASS = 0.05  # of its attention on the carrier makes a head a retrieval head
ENERGY_RANKS = (1, 2, 4, 8)
Retention = dict[str, dict[str, list[int]]]


@dataclass
class Kept:
    """Sums over what was looked at, for one selector and budget; `heads` counts (step, layer, query head)."""

    heads: int = 0
    mass: float = 0.0
    oracle_mass: float = 0.0
    error: float = 0.0
    units: int = 0
    recall: float = 0.0
    attended: float = 0.0
    score_bytes: float = 0.0
    attend_bytes: float = 0.0
    full_bytes: float = 0.0
    active: bool = True
    counts: Counter[tuple[str, str]] = field(default_factory=Counter)

    def retention(self) -> Retention:
        """By denominator: [kept, cases] with all tokens of the carrier kept ("strict") or any ("loose")."""
        return {
            name: {how: [self.counts[name, how], self.counts[name, "cases"]] for how in ("strict", "loose")}
            for name in ("all", "oracle", "retrieval")
        }


@dataclass
class Exact:
    """Full attention of one layer's steps.

    share   fp32 [S, H, G, N]    out  fp32 [S, H, G, D]
    target  bool [S, N]: tokens of the carrier that the step needs; `asked` bool [S]: there is one, and it is not forced
    """

    share: torch.Tensor
    out: torch.Tensor
    target: torch.Tensor
    asked: torch.Tensor

    @classmethod
    def of(cls, layer: Layer, steps: Steps, trace: Trace, options: SelectOptions) -> Exact:
        logits = torch.einsum("shgd,hnd->shgn", steps.queries, layer.keys) * steps.scale
        share = logits.masked_fill(~steps.visible(layer.tokens), float("-inf")).softmax(-1)
        target = torch.zeros(len(steps.lengths), layer.tokens, dtype=torch.bool)
        for step, answer in enumerate(trace.answers.tolist()):
            if answer < len(trace.carriers):
                target[step, trace.carriers[answer]] = True
        forced = forced_tokens(steps, layer.tokens, trace.shape, options)
        asked = target.any(-1) & ~(target & forced).any(-1)
        return cls(share, torch.einsum("shgn,hnd->shgd", share, layer.values), target, asked)

    def over(self, keep: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
        """Exact attention over the tokens of `keep`: as `Selector.attend`, from the shares that are there already."""
        kept = self.share * keep
        return torch.einsum("shgn,hnd->shgd", kept, values) / kept.sum(-1, keepdim=True).clamp_min(1e-30)


def forced_tokens(steps: Steps, tokens: int, shape: DecodeShape, options: SelectOptions) -> torch.Tensor:
    """bool [S, N]: sink and recent pages, the open one among them, which page selectors keep without looking."""
    page = torch.arange(tokens) // shape.page_size
    last = (steps.lengths - 1) // shape.page_size
    return (page < options.sink_pages) | (page > (last - options.recent_pages)[:, None])


def measure(trace: Trace, selectors: Sequence[Selector], budgets: Sequence[SelectOptions]) -> dict[tuple[str, int], Kept]:
    """By selector and budget in tokens; budgets differ in nothing else.

    Layer by layer, so that one layer at a time is held in fp32.
    """
    found = {(selector.name, options.budget_tokens): Kept() for selector in selectors for options in budgets}
    oracle = SELECTORS["oracle"]
    for index in range(trace.layers):
        layer, steps = trace.layer(index), trace.steps(index)
        exact = Exact.of(layer, steps, trace, budgets[0])
        best = _tables(oracle, layer, steps, exact, trace.shape, budgets)
        for selector in selectors:
            tables = best if selector is oracle else _tables(selector, layer, steps, exact, trace.shape, budgets)
            for options, (keep, out), (wanted, _) in zip(budgets, tables, best, strict=True):
                kept = found[selector.name, options.budget_tokens]
                _add(kept, selector, layer, steps, exact, keep, out, wanted, trace.shape, options)
    return found


Table = tuple[torch.Tensor, torch.Tensor]  # keep, output


def _tables(
    selector: Selector, layer: Layer, steps: Steps, exact: Exact, shape: DecodeShape, budgets: Sequence[SelectOptions]
) -> list[Table]:
    """Per budget: bool [S, H, 1 or G, N] and the output fp32 [S, H, G, D].  Built and scored once where the budget allows."""
    if layer.index in selector.declaration.dense_layers:
        return [(steps.visible(layer.tokens).expand(-1, layer.keys.shape[0], 1, -1), exact.out)] * len(budgets)
    tables = []
    state = scores = None
    for options in budgets:
        if state is None or selector.declaration.budget_built:
            state = selector.build(layer, options, shape)
            scores = selector.score(steps, state)
        assert scores is not None
        keep = selector.select(scores, steps, layer, state, options)
        exactly = type(selector).attend is Selector.attend
        tables.append((keep, exact.over(keep, layer.values) if exactly else selector.attend(steps, layer, state, keep)))
    return tables


def _add(
    kept: Kept,
    selector: Selector,
    layer: Layer,
    steps: Steps,
    exact: Exact,
    keep: torch.Tensor,
    out: torch.Tensor,
    wanted: torch.Tensor,
    shape: DecodeShape,
    options: SelectOptions,
) -> None:
    size = exact.share.shape[:3]
    kept.heads += size.numel()
    kept.mass += float((exact.share * keep).sum())
    kept.oracle_mass += float((exact.share * wanted).sum())
    kept.error += float(((out - exact.out).norm(dim=-1) / exact.out.norm(dim=-1).clamp_min(1e-30)).sum())
    ranked = wanted & ~forced_tokens(steps, layer.tokens, shape, options)[:, None, None]
    recall = (keep & ranked).sum(-1) / ranked.sum(-1).clamp_min(1)  # [S, H, 1 or G]
    kept.recall += float(recall.mean(-1).sum())
    kept.units += size[0] * size[1]
    attended = float(keep.any(2).sum()) / size[0]  # of all KV heads
    kept.attended += float(keep.any(2).sum())
    length = float(steps.lengths.float().mean())
    dense = layer.index in selector.declaration.dense_layers
    kept.full_bytes += shape.kv_heads * cost.attend_bytes(shape, length)
    kept.score_bytes += 0.0 if dense else shape.kv_heads * selector.score_bytes(shape, options, round(length))
    kept.attend_bytes += selector.attend_bytes(shape, attended) if not dense else cost.attend_bytes(shape, attended)
    kept.active &= dense or bool((keep.sum(-1) < steps.lengths[:, None, None]).all())
    _count_carriers(kept.counts, exact, keep, wanted)


def _count_carriers(counts: Counter[tuple[str, str]], exact: Exact, keep: torch.Tensor, wanted: torch.Tensor) -> None:
    """Three denominators: every head; heads whose exact ranking keeps the whole carrier; heads that look at the carrier."""
    size = exact.share.shape[:3]
    target = exact.target[:, None, None]
    asked = exact.asked[:, None, None].expand(size)
    strict, loose = (~target | keep).all(-1).expand(size), (target & keep).any(-1).expand(size)
    cases = {
        "all": asked,
        "oracle": asked & (~target | wanted).all(-1),
        "retrieval": asked & ((exact.share * target).sum(-1) >= RETRIEVAL_MASS),
    }
    for name, mask in cases.items():
        counts[name, "cases"] += int(mask.sum())
        counts[name, "strict"] += int((mask & strict).sum())
        counts[name, "loose"] += int((mask & loose).sum())


def energy(trace: Trace) -> dict[str, float]:
    """Share of the variance inside a page that its leading directions carry, by rank, mean over layers, heads and pages."""
    rows = [spectral_energy(trace.layer(index).pages(trace.shape.page_size), ENERGY_RANKS) for index in range(trace.layers)]
    return {str(rank): sum(column) / len(rows) for rank, column in zip(ENERGY_RANKS, zip(*rows, strict=True), strict=True)}
