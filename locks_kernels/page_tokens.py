"""Scores from a row per token, in plain torch: its whole key, or its coefficients in axes that all pages of a KV head share.

form      rows                                  score of a page, in nats
keys      the cache's own keys                  logsumexp_t q.k_t / sqrt(D)                    (the exact ranking)
axes-R    keys in R principal axes of the pool  logsumexp_t (q A).(k_t A) / sqrt(D), A [D, R]  (Loki, an SVD per sequence)
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from locks_kernels.cache import TORCH_DTYPE, PagedCache, Sequences
from locks_kernels.reference import scored_pages
from locks_kernels.shapes import DecodeShape

FORMS = ("keys", "axes-8", "axes-32")
CALIBRATION_PAGES = 1 << 12  # whose keys the axes are found from
CHUNK_PAGES = 1 << 12


@dataclass
class PageTokens:
    """One layer's rows, in the cache's type.

    rows  [num_pages, H, PAGE, R], last axis contiguous; the keys themselves for the form "keys"
    axes  [H, D, R] contiguous, orthonormal columns, strongest first; None for "keys"
    """

    form: str
    rows: torch.Tensor
    axes: torch.Tensor | None

    @classmethod
    def allocate(cls, cache: PagedCache, form: str) -> PageTokens:
        """Uninitialised, for all pages of the pool."""
        if form == "keys":
            return cls(form, cache.keys, None)
        shape, device, dtype = cache.shape, cache.keys.device, TORCH_DTYPE[cache.shape.dtype]
        rank = rank_of(form, shape)
        rows = torch.empty(cache.num_pages, shape.kv_heads, shape.page_size, rank, dtype=dtype, device=device)
        return cls(form, rows, torch.empty(shape.kv_heads, shape.head_dim, rank, dtype=dtype, device=device))


def rank_of(form: str, shape: DecodeShape) -> int:
    return shape.head_dim if form == "keys" else int(form.removeprefix("axes-"))


def page_bytes(form: str, shape: DecodeShape) -> int:
    """Bytes that a score reads of a page and KV head."""
    return shape.page_size * rank_of(form, shape) * shape.element_bytes


def calibrate(cache: PagedCache, tokens: PageTokens, page_ids: torch.Tensor) -> None:
    """Find the axes: eigenvectors of K'K over the keys of some of the complete pages `page_ids`, no mean removed."""
    if tokens.axes is None or page_ids.numel() == 0:
        return
    keys = cache.keys[page_ids[:CALIBRATION_PAGES].long()].float().transpose(0, 1).flatten(1, 2)  # [H, n, D]
    vectors = torch.linalg.eigh(keys.mT @ keys).eigenvectors.flip(-1)
    tokens.axes.copy_(vectors[..., : tokens.axes.shape[-1]])


def project(tokens: PageTokens, keys: torch.Tensor) -> torch.Tensor:
    """Rows of keys [..., H, PAGE, D] in the cache's type."""
    assert tokens.axes is not None
    return (keys.float() @ tokens.axes.float()).to(tokens.rows.dtype)


def build(cache: PagedCache, tokens: PageTokens, page_ids: torch.Tensor) -> None:
    """Write the rows of the physical pages `page_ids` (int [n])."""
    if tokens.axes is None:
        return
    for ids in page_ids.long().split(CHUNK_PAGES):
        tokens.rows[ids] = project(tokens, cache.keys[ids])


def finalise(cache: PagedCache, tokens: PageTokens, sequences: Sequences) -> None:
    """Write the row of each sequence's newest token."""
    if tokens.axes is None:
        return
    live = sequences.seq_lens > 0
    position = (sequences.seq_lens - 1).clamp_min(0).long()
    pages = sequences.block_table.gather(1, (position // cache.shape.page_size)[:, None])[live, 0].long()
    slots = (position % cache.shape.page_size)[live]
    tokens.rows[pages, :, slots] = project(tokens, cache.keys[pages, :, slots][:, :, None])[:, :, 0]


def score(
    query: torch.Tensor, shape: DecodeShape, tokens: PageTokens, sequences: Sequences, recent_pages: int = 1
) -> torch.Tensor:
    """fp32 [B, HQ, P], -inf where a page is not scored.  query: [B, HQ, D]."""
    batch, max_pages = sequences.block_table.shape
    grouped = query.float().view(batch, shape.kv_heads, shape.group, shape.head_dim) * shape.softmax_scale
    if tokens.axes is not None:
        grouped = torch.einsum("bhgd,hdr->bhgr", grouped, tokens.axes.float())
    counts = scored_pages(sequences.seq_lens, shape, recent_pages)
    out = torch.full((batch, shape.query_heads, max_pages), float("-inf"), device=query.device)
    for b in range(batch):
        pages = sequences.block_table[b, : int(counts[b])].long()
        for start in range(0, len(pages), CHUNK_PAGES):
            ids = pages[start : start + CHUNK_PAGES]
            logits = torch.einsum("hgr,phtr->hgpt", grouped[b], tokens.rows[ids].float())
            out[b, :, start : start + len(ids)] = logits.logsumexp(-1).flatten(0, 1)
    return out
