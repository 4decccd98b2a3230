"""Traces without a model, for long contexts and quick looks: keys with the structure inside pages that real ones have.

synthetic         centroids and deviations spread evenly over all channels: a basis that pages share finds nothing
synthetic-shared  they, and the mean of all keys, have spectra across pages, too, fitted to those of SmolLM2-135M at 8K by the
                  relative index of a direction, in a random rotation per head: a shared basis finds what it finds there

They say how a selector behaves on such keys, nothing about a model: their records carry these names as their model's.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import torch

from harness.traces import Trace

NAME = "synthetic"
SHARED = "synthetic-shared"
NAMES = (NAME, SHARED)
RECIPE = 1
DECAY = 0.87  # of the variance from one direction inside a page to the next: the energy that SmolLM2-135M's keys show
PAGE = 16
SPREAD = 0.6  # of a page's keys around their centroid, which has standard deviation 1
MEMORY = 0.9  # correlation of neighbouring pages' centroids
FOCUS = 6.0  # standard deviations by which what a query looks for stands out of its logits
LAYERS, HEADS, GROUP, DIM, STEPS, CARRIER = 3, 4, 4, 128, 8, 7  # two layers are dense in some methods
RETRIEVAL_HEADS = 4  # one KV head in so many looks for the carrier

# Share of the variance that the strongest directions carry, by how large a part of all directions they are.
PART = (0.0, 1 / 64, 1 / 32, 1 / 16, 1 / 8, 1 / 4, 1 / 2, 3 / 4, 29 / 32, 1.0)
CENTROID_ENERGY = (0.0, 0.274, 0.370, 0.507, 0.678, 0.859, 0.966, 0.992, 0.999, 1.0)
DEVIATION_ENERGY = (0.0, 0.089, 0.150, 0.241, 0.378, 0.555, 0.760, 0.903, 0.970, 1.0)
SHARED_DECAY = 0.79  # as DECAY: 0.25, 0.43, 0.67 and 0.90 of a page's variance in 1, 2, 4 and 8 directions
SHARED_SPREAD = 0.82  # of a page's keys: 0.38 of the variance of all keys is inside pages
SHARED_MEMORY = 0.8  # as MEMORY
APART = 2.0  # of the axes of deviations from those of centroids
MEAN_ENERGY = 1.1  # squared length of the mean of all keys, in units of D: 0.41 of that of a key


def source_of(tokens: int, seed: int, name: str = NAME) -> dict[str, Any]:
    return {"model": name, "recipe": RECIPE, "task": "planted", "seed": seed, "ctx": tokens, "kvzip": False}


def generate(source: dict[str, Any]) -> Trace:
    """The trace of `source`: LAYERS layers of HEADS KV heads, a carrier of CARRIER tokens somewhere in the middle."""
    tokens, seed, shared = int(source["ctx"]), int(source["seed"]), source["model"] == SHARED
    generator = torch.Generator().manual_seed(seed)

    def normal(*size: int) -> torch.Tensor:
        return torch.randn(size, generator=generator)

    prompt, pages = tokens - STEPS, -(-tokens // PAGE)
    carrier = int(torch.randint(tokens // 8, tokens * 7 // 8, (1,), generator=generator))
    spectrum = (SHARED_DECAY if shared else DECAY) ** (torch.arange(PAGE - 1) / 2)
    spectrum *= (SHARED_SPREAD if shared else SPREAD) / spectrum.square().sum().sqrt()
    memory = SHARED_MEMORY if shared else MEMORY
    keys, queries = [], []
    for _ in range(LAYERS):
        fresh = normal(HEADS, pages, DIM) * math.sqrt(1 - memory**2)
        centroids = torch.empty_like(fresh)
        centroids[:, 0] = normal(HEADS, DIM)
        for page in range(1, pages):
            centroids[:, page] = memory * centroids[:, page - 1] + fresh[:, page]
        inside, directions = normal(HEADS, pages, PAGE, PAGE - 1), normal(HEADS, pages, PAGE - 1, DIM)
        mean = torch.zeros(())
        if shared:
            turn = torch.linalg.qr(normal(HEADS, DIM, DIM)).Q
            other = torch.linalg.qr(turn + APART * normal(HEADS, DIM, DIM) / math.sqrt(DIM)).Q
            centroids = centroids * _channels(CENTROID_ENERGY) @ turn.mT
            directions = directions * _channels(DEVIATION_ENERGY) @ other.mT[:, None]
            mean = torch.nn.functional.normalize(normal(HEADS, 1, 1, DIM), dim=-1) * math.sqrt(MEAN_ENERGY * DIM)
            inside = torch.linalg.qr(inside).Q * math.sqrt(PAGE)  # else two random factors bring more decay than was fitted
        inside = (inside * spectrum) @ directions
        layer = (mean + centroids[:, :, None] + inside).flatten(1, 2)[:, :tokens]
        sought = torch.randint(0, prompt, (STEPS, HEADS, GROUP), generator=generator)
        sought[:, ::RETRIEVAL_HEADS] = carrier + torch.arange(STEPS)[:, None, None] % CARRIER
        direction = layer[torch.arange(HEADS)[:, None], sought]  # [S, H, G, D]
        if shared:
            direction = direction - mean[:, 0]
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


def _channels(energy: tuple[float, ...]) -> torch.Tensor:
    """Standard deviations [D], strongest first, whose squares add up to D, from a curve over PART."""
    curve = np.interp(np.arange(DIM + 1) / DIM, PART, energy)
    return torch.from_numpy(np.sqrt(DIM * np.diff(curve))).float()
