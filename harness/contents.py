"""What the caches hold: keys with the structure that page summaries live on, values, and queries that attend unevenly.

Zeros and plain noise are both wrong here: zeros run faster than data, and pages of plain noise all weigh the same.
"""

from __future__ import annotations

import torch

from locks_kernels.cache import PagedCache

NAME = "structured-1"  # of this recipe; part of a record's case
RANK = 8  # directions in which the keys of a page spread, strongest first ...
DECAY = 0.7  # ... each weaker than the last by this factor
CENTROID, SPREAD, NOISE = 0.7, 0.63, 0.33  # standard deviations; squares add up to 1
CHANNEL_SIGMA = 0.5  # log-normal scale of each key channel of a head, as in trained models
QUERY_SCALE = 2.5  # standard deviation of the logits
CHUNK_PAGES = 1 << 14


def fill(cache: PagedCache, generator: torch.Generator) -> None:
    """Fill all pages of the pool in place."""
    shape = cache.shape
    keys, values = cache.keys.transpose(0, 1), cache.values.transpose(0, 1)  # [H, num_pages, PAGE, D]
    device = keys.device
    scale = torch.randn(shape.kv_heads, shape.head_dim, generator=generator, device=device).mul(CHANNEL_SIGMA).exp()
    scale /= scale.square().mean(-1, keepdim=True).sqrt()
    spectrum = DECAY ** torch.arange(RANK, device=device)
    spectrum = (spectrum * SPREAD / spectrum.square().sum().sqrt()).to(keys.dtype)
    for head in range(shape.kv_heads):
        for page_keys, page_values in zip(keys[head].split(CHUNK_PAGES), values[head].split(CHUNK_PAGES), strict=True):
            pages = len(page_keys)

            def normal(*size: int) -> torch.Tensor:
                return torch.empty(size, dtype=keys.dtype, device=device).normal_(generator=generator)

            coefficients = normal(pages, shape.page_size, RANK) * spectrum
            page_keys.normal_(std=NOISE, generator=generator)
            page_keys.baddbmm_(coefficients, normal(pages, RANK, shape.head_dim))
            page_keys.add_(normal(pages, 1, shape.head_dim), alpha=CENTROID).mul_(scale[head].to(keys.dtype))
            page_values.normal_(generator=generator)


def queries(cache: PagedCache, batch: int, generator: torch.Generator) -> torch.Tensor:
    """One query per sequence, [B, HQ, D] in the cache's type.  Channel scales have a root mean square of 1, so the logits over
    `fill`'s keys spread by about QUERY_SCALE.
    """
    size = (batch, cache.shape.query_heads, cache.shape.head_dim)
    return torch.empty(size, dtype=cache.keys.dtype, device=cache.keys.device).normal_(std=QUERY_SCALE, generator=generator)
