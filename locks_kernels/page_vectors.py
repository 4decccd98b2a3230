"""Summaries of one or two vectors per page, and the scores of four selectors that live on them, in plain torch.

form         vectors                      score, in units of 1 / sqrt(D)
min-max      smallest, largest            sum_i max(q_i low_i, q_i high_i)            (Quest)
cuboid-mean  centre -+ mean deviation     the same                                    (ArkVale)
mean-std     mean, standard deviation     q.mean + 0.5 |q|.std                        (UNIQUE, vector)
mean-spread  mean, and one number         q.mean + 0.5 ||q|| spread                   (UNIQUE, scalar)
centroid     mean                         q.mean
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from locks_kernels.cache import TORCH_DTYPE, PagedCache, Sequences
from locks_kernels.reference import scored_pages
from locks_kernels.shapes import DecodeShape

FORMS = ("min-max", "cuboid-mean", "mean-std", "mean-spread", "centroid")
STD_WEIGHT = 0.5


@dataclass
class PageVectors:
    """One layer's summaries, in the cache's type.

    vectors  [num_pages, H, V, D] contiguous, V = 2 or 1; spread [num_pages, H], read by the form "mean-spread" alone
    """

    form: str
    vectors: torch.Tensor
    spread: torch.Tensor

    @classmethod
    def allocate(cls, cache: PagedCache, form: str) -> PageVectors:
        """Uninitialised, for all pages of the pool."""
        shape, device, dtype = cache.shape, cache.keys.device, TORCH_DTYPE[cache.shape.dtype]
        size = (cache.num_pages, shape.kv_heads, vector_count(form), shape.head_dim)
        return cls(
            form,
            torch.empty(size, dtype=dtype, device=device),
            torch.empty(size[:2] if form == "mean-spread" else (1, 1), dtype=dtype, device=device),
        )


def vector_count(form: str) -> int:
    return 1 if form in ("mean-spread", "centroid") else 2


def page_bytes(form: str, shape: DecodeShape) -> int:
    """Bytes that a score reads of a page and KV head."""
    return (vector_count(form) * shape.head_dim + (form == "mean-spread")) * shape.element_bytes


def summarise(form: str, keys: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """fp32 vectors [..., V, D] and spread [...] of complete pages [..., PAGE, D]."""
    keys = keys.float()
    mean = keys.mean(-2)
    variance = keys.var(-2, correction=0)
    if form == "min-max":
        parts = [keys.amin(-2), keys.amax(-2)]
    elif form == "cuboid-mean":
        radius = (keys - mean[..., None, :]).abs().mean(-2)
        parts = [mean - radius, mean + radius]
    else:
        parts = [mean, variance.sqrt()] if form == "mean-std" else [mean]
    return torch.stack(parts, -2), variance.mean(-1).sqrt()


def build(cache: PagedCache, summaries: PageVectors, page_ids: torch.Tensor) -> None:
    """Summarise the physical pages `page_ids` (int [n]) in place."""
    if page_ids.numel() == 0:
        return
    vectors, spread = summarise(summaries.form, cache.keys[page_ids.long()])
    summaries.vectors[page_ids.long()] = vectors.to(summaries.vectors.dtype)
    if summaries.form == "mean-spread":
        summaries.spread[page_ids.long()] = spread.to(summaries.spread.dtype)


def finalise(cache: PagedCache, summaries: PageVectors, sequences: Sequences) -> None:
    """Summarise the page of each sequence that its newest token has just filled."""
    lens = sequences.seq_lens.long()
    filled = (lens > 0) & (lens % cache.shape.page_size == 0)
    last = (lens[filled] // cache.shape.page_size - 1)[:, None]
    build(cache, summaries, sequences.block_table[filled].gather(1, last)[:, 0])


def score(
    query: torch.Tensor, shape: DecodeShape, summaries: PageVectors, sequences: Sequences, recent_pages: int = 1
) -> torch.Tensor:
    """fp32 [B, HQ, P], -inf where a page is not scored.  query: [B, HQ, D]."""
    batch, max_pages = sequences.block_table.shape
    grouped = query.float().view(batch, shape.kv_heads, shape.group, shape.head_dim)
    counts = scored_pages(sequences.seq_lens, shape, recent_pages)
    out = torch.full((batch, shape.query_heads, max_pages), float("-inf"), device=query.device)
    for b in range(batch):
        pages = sequences.block_table[b, : int(counts[b])].long()
        vectors = summaries.vectors[pages].float()  # [p, H, V, D]
        first, second = weights(summaries.form, grouped[b])
        found = torch.einsum("hgd,phd->hgp", first, vectors[:, :, 0])
        if second is not None:
            found += torch.einsum("hgd,phd->hgp", second, vectors[:, :, 1])
        if summaries.form == "mean-spread":
            found += STD_WEIGHT * grouped[b].norm(dim=-1, keepdim=True) * summaries.spread[pages].float().T[:, None]
        out[b, :, : len(pages)] = found.reshape(shape.query_heads, -1) * shape.softmax_scale
    return out


def weights(form: str, query: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
    """What the first and the second vector of a page are multiplied with."""
    if form in ("min-max", "cuboid-mean"):
        return query.clamp_max(0.0), query.clamp_min(0.0)
    return query, STD_WEIGHT * query.abs() if form == "mean-std" else None
