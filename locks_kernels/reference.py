"""LOCKS in plain torch, one function per stage.  Every faster kernel has the signature of the function here and is tested
against it.  Runs on any device; clarity before speed.

Method: arXiv 2607.24555.  Open page: never summarised, always attended (it is one of the recent pages).
"""

from __future__ import annotations

import torch

from locks_kernels.cache import PagedCache, Sequences
from locks_kernels.shapes import Combine, DecodeShape, SelectOptions
from locks_kernels.summary import RecordLayout, SummaryFields, pack, unpack

SCALE_FLOOR = 1e-8
EIGENVALUE_FLOOR = 1e-10
CHUNK_PAGES = 1 << 14  # pages x heads handled at once by `build` and `score`, so that a long context fits in memory


def quantise(values: torch.Tensor, bound: int, dim: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Symmetric integers and their bf16 scale, absmax / bound along `dim`; int4 for bound 7, int8 for bound 127."""
    scale = (values.abs().amax(dim, keepdim=True) / bound).clamp_min(SCALE_FLOOR).bfloat16()
    lowest = -8 if bound == 7 else -bound
    return (values / scale.float()).round().clamp(lowest, bound).to(torch.int8), scale.squeeze(dim)


def summarise(keys: torch.Tensor, rank: int) -> SummaryFields:
    """Rank-R spectral summary of complete pages.

    keys: [..., PAGE, D] any float type.  The R leading eigenpairs of the centred Gram matrix D D^T give the coefficients
    C = U sqrt(lambda) and the basis V = D^T U / sqrt(lambda) (unit rows); both are then quantised.
    """
    keys = keys.float()
    centroid = keys.mean(-2)
    deviations = keys - centroid[..., None, :]
    eigenvalues, vectors = torch.linalg.eigh(deviations @ deviations.mT)
    singular = eigenvalues[..., -rank:].flip(-1).clamp_min(EIGENVALUE_FLOOR).sqrt()
    vectors = vectors[..., -rank:].flip(-1)
    basis = (deviations.mT @ vectors / singular[..., None, :]).mT
    basis_q, basis_scale = quantise(basis, 7, -1)
    coefficients_q, coefficient_scale = quantise(vectors * singular[..., None, :], 127, -1)
    centroid_q, centroid_scale = quantise(centroid, 127, -1)
    return SummaryFields(basis_q, coefficients_q, centroid_q, coefficient_scale, basis_scale, centroid_scale)


def build(cache: PagedCache, page_ids: torch.Tensor) -> None:
    """Summarise the physical pages `page_ids` (int [n], all complete) into `cache.summaries`, in place."""
    for ids in page_ids.long().split(max(1, CHUNK_PAGES // cache.shape.kv_heads)):
        cache.summaries[ids] = pack(summarise(cache.keys[ids], cache.shape.rank))


def append(cache: PagedCache, sequences: Sequences, keys: torch.Tensor, values: torch.Tensor) -> None:
    """Write the new token of each sequence at position `seq_lens - 1`.  keys, values: [B, H, D].  Length 0 writes nothing."""
    live = sequences.seq_lens > 0
    position = (sequences.seq_lens - 1).clamp_min(0).long()
    page_size = cache.shape.page_size
    pages = sequences.block_table.gather(1, (position // page_size)[:, None])[:, 0].long()
    slots = position % page_size
    cache.keys[pages[live], :, slots[live]] = keys[live].to(cache.keys.dtype)
    cache.values[pages[live], :, slots[live]] = values[live].to(cache.values.dtype)


def finalise(cache: PagedCache, sequences: Sequences) -> None:
    """Summarise the page of each sequence that its newest token has just filled.  Call after `append`."""
    lens = sequences.seq_lens.long()
    filled = (lens > 0) & (lens % cache.shape.page_size == 0)
    last = (lens[filled] // cache.shape.page_size - 1)[:, None]
    build(cache, sequences.block_table[filled].gather(1, last)[:, 0])


def finalise_slots(cache: PagedCache, slots: torch.Tensor) -> None:
    """Summarise every page whose last slot is among `slots`, int64 [T]: page * PAGE + offset; negative ones stand for nothing.

    For engines that write the cache themselves, a prompt's chunk or one token per sequence at a time.
    """
    page_size = cache.shape.page_size
    last = (slots >= 0) & (slots % page_size == page_size - 1)
    build(cache, slots[last] // page_size)


def scored_pages(seq_lens: torch.Tensor, shape: DecodeShape, recent_pages: int) -> torch.Tensor:
    """Pages [0, n) that are scored, int64 [B]: all but the recent ones, hence complete."""
    pages = (seq_lens.long() + shape.page_size - 1) // shape.page_size
    return (pages - recent_pages).clamp_min(0)


def score(query: torch.Tensor, cache: PagedCache, sequences: Sequences, recent_pages: int = 1) -> torch.Tensor:
    """Estimated attention mass of each page, in nats: fp32 [B, HQ, P], -inf where a page is not scored.

    S = logsumexp over the page's tokens of (q.mu + (V q).c_t) / sqrt(D), from the summaries alone.  query: [B, HQ, D].
    """
    shape = cache.shape
    batch, max_pages = sequences.block_table.shape
    grouped = query.float().view(batch, shape.kv_heads, shape.group, shape.head_dim) * shape.softmax_scale
    counts = scored_pages(sequences.seq_lens, shape, recent_pages)
    out = query.new_full((batch, shape.query_heads, max_pages), float("-inf"), dtype=torch.float32)
    layout = RecordLayout.of(shape)
    for b in range(batch):
        pages = sequences.block_table[b, : int(counts[b])].long()
        for start in range(0, len(pages), CHUNK_PAGES // shape.kv_heads):
            ids = pages[start : start + CHUNK_PAGES // shape.kv_heads]
            s = unpack(cache.summaries[ids].transpose(0, 1), layout)  # [H, p, ...]
            centroid = torch.einsum("hgd,hpd->hgp", grouped[b], s.centroid.float()) * s.centroid_scale.float()[:, None]
            projected = torch.einsum("hgd,hprd->hpgr", grouped[b], s.basis.float()) * s.basis_scale.float()[:, :, None]
            logits = projected @ s.coefficients.float().mT * s.coefficient_scale.float()[:, :, None]  # [H, p, G, PAGE]
            mass = logits.logsumexp(-1).transpose(1, 2) + centroid
            out[b, :, start : start + len(ids)] = mass.reshape(shape.query_heads, len(ids))
    return out


def combine(scores: torch.Tensor, kv_heads: int, how: Combine) -> torch.Tensor:
    """One score per page and KV head, fp32 [B, H, P] >= 0, from scores [B, HQ, P] (-inf where not scored).

    share: mean over the group of exp(S_g) / sum_p exp(S_g); peak: sum over the group of exp(S_g - max_p S_g).
    Both normalise over all scored pages, the sink included.
    """
    batch, query_heads, pages = scores.shape
    grouped = scores.view(batch, kv_heads, query_heads // kv_heads, pages)
    if how == "share":
        return grouped.softmax(-1).nan_to_num(0.0).mean(2)
    return (grouped - grouped.amax(-1, keepdim=True)).exp().nan_to_num(0.0).sum(2)


def select(combined: torch.Tensor, sequences: Sequences, shape: DecodeShape, options: SelectOptions) -> torch.Tensor:
    """Logical pages to attend, int32 [B, H, K], ascending, -1 behind the last one.

    Sink and recent pages always; of the others the best ones by `combined` [B, H, P], ties to the lowest page.  A sequence
    of at most K pages keeps all of them; K counts `options.dense_tokens`, too.
    """
    batch, kv_heads, _ = combined.shape
    kept, width = options.kept_pages(shape.page_size), options.table_pages(shape.page_size)
    tables = torch.full((batch, kv_heads, width), -1, dtype=torch.int32, device=combined.device)
    for b, tokens in enumerate(sequences.seq_lens.tolist()):
        pages = shape.pages(tokens)
        if pages <= width:
            tables[b, :, :pages] = torch.arange(pages, device=combined.device)
            continue
        upper = pages - options.recent_pages
        ranked = kept - options.sink_pages - options.recent_pages
        candidates = combined[b, :, options.sink_pages : upper]
        best = candidates.sort(dim=-1, descending=True, stable=True).indices[:, :ranked] + options.sink_pages
        forced = torch.cat((torch.arange(options.sink_pages), torch.arange(upper, pages))).to(combined.device)
        tables[b, :, :kept] = torch.cat((best, forced.expand(kv_heads, -1)), -1).sort(-1).values
    return tables


def attend(
    query: torch.Tensor, cache: PagedCache, sequences: Sequences, tables: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Exact softmax attention over the pages of `tables` [B, H, K].

    Returns the output in the query's type [B, HQ, D] and the natural log-sum-exp fp32 [B, HQ].  Nothing to attend gives
    output 0 and log-sum-exp -inf.  Slots behind a sequence's end are never read into the result.
    """
    shape = cache.shape
    batch, kv_heads, _ = tables.shape
    grouped = query.float().view(batch, kv_heads, shape.group, shape.head_dim) * shape.softmax_scale
    heads = torch.arange(kv_heads, device=query.device)[:, None]
    out = torch.zeros_like(grouped)
    lse = torch.full_like(grouped[..., 0], float("-inf"))
    for b in range(batch):
        logical = tables[b].long()
        physical = sequences.block_table[b].long()[logical.clamp_min(0)]
        slots = torch.arange(shape.page_size, device=query.device)
        live = (logical[..., None] >= 0) & (logical[..., None] * shape.page_size + slots < sequences.seq_lens[b])
        live = live.flatten(1)  # [H, K * PAGE]
        keys = cache.keys[physical, heads].float().flatten(1, 2).masked_fill(~live[..., None], 0.0)
        values = cache.values[physical, heads].float().flatten(1, 2).masked_fill(~live[..., None], 0.0)
        logits = (grouped[b] @ keys.mT).masked_fill(~live[:, None], float("-inf"))
        lse[b] = logits.logsumexp(-1)
        out[b] = logits.softmax(-1).nan_to_num(0.0) @ values
    return out.view_as(query).to(query.dtype), lse.view(batch, -1)


def all_pages(sequences: Sequences, shape: DecodeShape) -> torch.Tensor:
    """The table that keeps every page, int32 [B, H, P]: `attend` on it is full attention."""
    logical = torch.arange(sequences.max_pages, dtype=torch.int32, device=sequences.seq_lens.device)
    pages = (sequences.seq_lens[:, None] + shape.page_size - 1) // shape.page_size
    table = torch.where(logical < pages, logical, -1).int()
    return table[:, None].expand(-1, shape.kv_heads, -1)


def decode_step(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    cache: PagedCache,
    sequences: Sequences,
    options: SelectOptions,
) -> torch.Tensor:
    """One LOCKS step of one layer: append, finalise, score, combine, select, attend.  `seq_lens` counts the new token."""
    append(cache, sequences, keys, values)
    finalise(cache, sequences)
    scores = score(query, cache, sequences, options.recent_pages)
    tables = select(combine(scores, cache.shape.kv_heads, options.combine), sequences, cache.shape, options)
    return attend(query, cache, sequences, tables)[0]
