"""What the theory of LOCKS (arXiv 2607.24555) promises, looked at on a trace.

Blindness (Proposition 1): pages that differ only outside a basis all pages share get the same score, whatever their mass.
Retention (Theorem 1): with S' the estimated mass of a page in nats and eta the largest |S' - S|, the table keeps at least
exp(-4 eta) of the share that the exact ranking keeps, and the mean output error of a group is at most
2 R (1 - exp(-4 eta) gamma), with R the longest value and gamma the exact ranking's share, both of scored pages.
|S' - S| itself is at most |q| / sqrt(D) times the longest key left out by the cut spectrum of the page.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from harness.traces import Trace
from locks_kernels.selectors.base import Layer, Steps, page_mass, softmax_attention
from locks_kernels.selectors.locks import Locks
from locks_kernels.selectors.pages import PageState
from locks_kernels.shapes import SelectOptions
from locks_kernels.spectral_keys import spectral_keys

SLACK = 1e-3  # of fp32 sums over thousands of tokens


@dataclass
class Bounds:
    """Counts and sums over steps, layers and KV heads, for summaries that are not quantised.

    broken      cases in which a promise does not hold, by promise; must all be 0
    tail        mean of |S' - S| over its bound by the spectral tail
    eta         mean of the largest |S' - S| of a step and KV head, nats
    retained    mean share kept, relative to the exact ranking;  promised: what exp(-4 eta) promises
    error       mean output error of a group over R;  error_bound: its bound over R
    """

    rank: int
    budget: int
    cases: int = 0
    broken: dict[str, int] = field(default_factory=lambda: {"tail": 0, "retention": 0, "error": 0})
    tail: float = 0.0
    eta: float = 0.0
    retained: float = 0.0
    promised: float = 0.0
    error: float = 0.0
    error_bound: float = 0.0

    def record(self) -> dict[str, object]:
        """Means as plain data."""
        names = ("tail", "eta", "retained", "promised", "error", "error_bound")
        means = {name: getattr(self, name) / max(self.cases, 1) for name in names}
        return {"rank": self.rank, "budget": self.budget, "cases": self.cases, "broken": self.broken, **means}


def check_bounds(trace: Trace, rank: int, options: SelectOptions) -> Bounds:
    """The retention bound on every step, layer and KV head of a trace."""
    bounds = Bounds(rank, options.budget_tokens)
    for index in range(trace.layers):
        _check_layer(bounds, trace.layer(index), trace.steps(index), trace.shape.page_size, options)
    return bounds


def _check_layer(bounds: Bounds, layer: Layer, steps: Steps, page_size: int, options: SelectOptions) -> None:
    pages = layer.pages(page_size)
    cut = spectral_keys(pages, bounds.rank)
    exact, estimate = page_mass(steps, pages), page_mass(steps, cut)  # [S, H, G, P]
    upper = (steps.lengths + page_size - 1) // page_size - options.recent_pages
    outside = (torch.arange(pages.shape[1]) >= upper[:, None])[:, None, None]
    difference = (estimate - exact).abs().masked_fill(outside, 0.0)
    longest = (pages - cut).norm(dim=-1).amax(-1)  # [H, P]
    tail = steps.queries.norm(dim=-1, keepdim=True) * steps.scale * longest[None, :, None]
    bounds.broken["tail"] += int((difference > tail + SLACK).sum())

    select = Locks(bounds.rank).select
    state = PageState(page_size, None)
    ours, best = (select(scores, steps, layer, state, options) for scores in (estimate, exact))
    share = exact.masked_fill(outside, float("-inf")).softmax(-1)
    kept, gamma = (
        (share * table[..., : pages.shape[1] * page_size : page_size]).sum(-1).mean(2) for table in (ours, best)
    )  # [S, H]
    eta = difference.amax((2, 3))
    promise = (-4 * eta).exp() * gamma
    bounds.broken["retention"] += int((kept < promise - SLACK).sum())

    full = softmax_attention(steps, layer.keys, layer.values, steps.visible(layer.tokens))
    radius = layer.values.norm(dim=-1).amax(-1)  # [H]
    error = (softmax_attention(steps, layer.keys, layer.values, ours) - full).norm(dim=-1).mean(2) / radius
    limit = 2 * (1 - promise)
    bounds.broken["error"] += int((error > limit + SLACK).sum())

    bounds.cases += kept.numel()
    bounds.tail += float((difference / tail.clamp_min(1e-30)).mean((2, 3)).sum())
    for name, value in (("eta", eta), ("retained", kept / gamma), ("promised", promise / gamma), ("error", error)):
        setattr(bounds, name, getattr(bounds, name) + float(value.sum()))
    bounds.error_bound += float(limit.sum())


def blind_pair(layer: Layer, query: torch.Tensor, rank: int) -> dict[str, float]:
    """Two pages of a layer's first KV head that a shared basis of `rank` cannot tell apart, and what a basis per page sees.

    The second is the first one with one key moved along the query, as far as the basis does not see.  query: fp32 [D].
    Differences of scores between the two pages in nats.
    """
    from locks_kernels.selectors.shared import principal_axes

    axes = principal_axes(layer.keys[:1])[0][:, :rank]
    hidden = query - axes @ (axes.T @ query)
    first = layer.pages(16)[0, 0]
    second = first.clone()
    distance = 40.0 * query.shape[0] ** 0.5 / hidden.norm()  # a logit that is 40 nats larger
    second[7] += distance * hidden / hidden.norm()
    pages = torch.stack((first, second))[None]
    one = Steps(query.view(1, 1, 1, -1), torch.tensor([32]))
    scores = {
        "shared": page_mass(one, pages @ axes @ axes.T),
        "exact": page_mass(one, pages),
        "page": page_mass(one, spectral_keys(pages, rank)),
    }
    return {name: float(value[..., 1] - value[..., 0]) for name, value in scores.items()}
