"""Traces without a model, for long contexts and quick looks: keys with the structure inside pages that real ones have.

They say how a selector behaves on such keys, nothing about a model: their records carry the model name "synthetic".
"""

from __future__ import annotations

import math
from typing import Any

import torch

from harness.traces import Trace

NAME = "synthetic"
RECIPE = 1
DECAY = 0.87  # of the variance from one direction inside a page to the next: the energy that SmolLM2-135M's keys show
PAGE = 16
SPREAD = 0.6  # of a page's keys around their centroid, which has standard deviation 1
MEMORY = 0.9  # correlation of neighbouring pages' centroids
FOCUS = 6.0  # standard deviations by which what a query looks for stands out of its logits
LAYERS, HEADS, GROUP, DIM, STEPS, CARRIER = 3, 4, 4, 128, 8, 7  # two layers are dense in some methods
RETRIEVAL_HEADS = 4  # one KV head in so many looks for the carrier


def source_of(tokens: int, seed: int) -> dict[str, Any]:
    return {"model": NAME, "recipe": RECIPE, "task": "planted", "seed": seed, "ctx": tokens, "kvzip": False}


def generate(source: dict[str, Any]) -> Trace:
    """The trace of `source`: LAYERS layers of HEADS KV heads, a carrier of CARRIER tokens somewhere in the middle."""
    tokens, seed = int(source["ctx"]), int(source["seed"])
    generator = torch.Generator().manual_seed(seed)

    def normal(*size: int) -> torch.Tensor:
        return torch.randn(size, generator=generator)

    prompt, pages = tokens - STEPS, -(-tokens // PAGE)
    carrier = int(torch.randint(tokens // 8, tokens * 7 // 8, (1,), generator=generator))
    spectrum = DECAY ** (torch.arange(PAGE - 1) / 2)
    spectrum *= SPREAD / spectrum.square().sum().sqrt()
    keys, queries = [], []
    for _ in range(LAYERS):
        fresh = normal(HEADS, pages, DIM) * math.sqrt(1 - MEMORY**2)
        centroids = torch.empty_like(fresh)
        centroids[:, 0] = normal(HEADS, DIM)
        for page in range(1, pages):
            centroids[:, page] = MEMORY * centroids[:, page - 1] + fresh[:, page]
        inside = (normal(HEADS, pages, PAGE, PAGE - 1) * spectrum) @ normal(HEADS, pages, PAGE - 1, DIM)
        layer = (centroids[:, :, None] + inside).flatten(1, 2)[:, :tokens]
        sought = torch.randint(0, prompt, (STEPS, HEADS, GROUP), generator=generator)
        sought[:, ::RETRIEVAL_HEADS] = carrier + torch.arange(STEPS)[:, None, None] % CARRIER
        direction = layer[torch.arange(HEADS)[:, None], sought]  # [S, H, G, D]
        queries.append((normal(STEPS, HEADS, GROUP, DIM) + FOCUS * direction / math.sqrt(DIM)).flatten(1, 2))
        keys.append(layer.bfloat16())
    values = normal(LAYERS, HEADS, tokens, DIM).bfloat16()
    return Trace(
        source=source,
        keys=torch.stack(keys),
        values=values,
        queries=torch.stack(queries),
        positions=prompt + torch.arange(STEPS),
        answers=torch.zeros(STEPS, dtype=torch.int64),
        prompt=prompt,
        context=prompt - 32,
        system=PAGE,
        carriers=[list(range(carrier, carrier + CARRIER))],
    )
