"""Full attention in plain torch, in chunks, so that a context of a million tokens fits beside its cache."""

from __future__ import annotations

import torch

from harness.workload import Workload

CHUNK_TOKENS = 1 << 16


def full_attention(workload: Workload, copy: int) -> torch.Tensor:
    """Softmax attention over all `ctx` tokens for the sequences `workload.checked`: fp32 [checked, HQ, D]."""
    shape, cache, ctx = workload.shape, workload.caches[copy], workload.case.ctx
    rows = []
    for b in workload.checked:
        query = workload.queries[copy][b].float().view(shape.kv_heads, shape.group, shape.head_dim) * shape.softmax_scale
        weighted = torch.zeros_like(query)
        total = query.new_zeros(shape.kv_heads, shape.group)
        highest = torch.full_like(total, float("-inf"))
        pages = workload.sequences.block_table[b].long()
        for start, ids in enumerate(pages.split(CHUNK_TOKENS // shape.page_size)):
            tokens = ctx - start * CHUNK_TOKENS
            keys = cache.keys[ids].transpose(0, 1).flatten(1, 2)[:, :tokens].float()  # [H, n, D]
            values = cache.values[ids].transpose(0, 1).flatten(1, 2)[:, :tokens].float()
            logits = query @ keys.mT
            new_highest = torch.maximum(highest, logits.amax(-1))
            weights = (logits - new_highest[..., None]).exp()
            shrink = (highest - new_highest).exp()
            weighted = weighted * shrink[..., None] + weights @ values
            total = total * shrink + weights.sum(-1)
            highest = new_highest
        rows.append((weighted / total[..., None]).view(shape.query_heads, shape.head_dim))
    return torch.stack(rows)
