"""Layers and steps that the selector tests share."""

from __future__ import annotations

import torch

from locks_kernels.selectors.base import Layer, Selector, Steps
from locks_kernels.selectors.rope import Rope
from locks_kernels.shapes import DecodeShape, SelectOptions

SHAPE = DecodeShape(query_heads=6, kv_heads=2, head_dim=64)
OPTIONS = SelectOptions(budget_tokens=128)
PROMPT, TOKENS = 1000, 1021


def rope(tokens: int, head_dim: int = 64) -> Rope:
    angles = torch.arange(tokens)[:, None] / 10000 ** (torch.arange(head_dim // 2) / (head_dim // 2))
    angles = torch.cat((angles, angles), -1)
    return Rope(angles.cos(), angles.sin())


def layer(seed: int = 0, index: int = 3, tokens: int = TOKENS, prompt: int = PROMPT) -> Layer:
    """Keys that are alike inside a page, and everything that any selector may ask for."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*size: int) -> torch.Tensor:
        return torch.randn(size, generator=generator)

    heads, dim, pages = SHAPE.kv_heads, SHAPE.head_dim, -(-tokens // SHAPE.page_size)
    keys = normal(heads, pages, 1, dim) + normal(heads, pages, 16, 4) @ normal(heads, pages, 4, dim) * 0.4
    importances = torch.rand(4, heads, tokens, generator=generator)
    return Layer(
        index=index,
        keys=keys.flatten(1, 2)[:, :tokens].bfloat16().float(),
        values=normal(heads, tokens, dim).bfloat16().float(),
        prompt=prompt,
        context=prompt - 40,
        system=20,
        observed=2 * normal(heads, SHAPE.group, 32, dim),
        rope=rope(tokens),
        importance=importances[index],
        importances=importances,
        shared_basis=torch.linalg.qr(normal(heads, dim, dim)).Q,
    )


def steps(count: int = 3, seed: int = 1, tokens: int = TOKENS) -> Steps:
    generator = torch.Generator().manual_seed(seed)
    queries = 2 * torch.randn(count, SHAPE.kv_heads, SHAPE.group, SHAPE.head_dim, generator=generator)
    return Steps(queries, tokens - torch.arange(count).flip(0) * 5)


def kept(selector: Selector, of: Layer, at: Steps, options: SelectOptions = OPTIONS) -> torch.Tensor:
    """bool [S, H, 1 or G, N] by the whole chain of hooks."""
    state = selector.build(of, options, SHAPE)
    return selector.select(selector.score(at, state), at, of, state, options)
