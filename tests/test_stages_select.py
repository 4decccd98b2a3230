"""The selection of every implementation against the plain-torch one, whatever the scores look like."""

from __future__ import annotations

import pytest
import torch
from kernel_cases import DEVICE, KERNELS, assert_good_table, make, make_query, make_stages, scores_of

from locks_kernels import reference
from locks_kernels.shapes import DecodeShape, SelectOptions

pytestmark = pytest.mark.parametrize("kernels", KERNELS)

RAGGED = (0, 1, 15, 16, 17, 32, 100)
COMBINES = ("share", "peak")


@pytest.mark.parametrize("combine", COMBINES)
@pytest.mark.parametrize("group", (1, 4, 7))
def test_select_random(kernels: str, group: int, combine: str) -> None:
    shape = DecodeShape(2 * group, 2, 64, 16, 2)
    options = SelectOptions(10 * 16, sink_pages=2, recent_pages=3, combine=combine)
    cache, sequences = make(shape, (*RAGGED, 160, 161, 50 * 16))
    stages = make_stages(kernels, cache, sequences, options)
    stages.tables.fill_(12345)
    stages.score(make_query(shape, sequences.batch))
    stages.select()
    scores = scores_of(stages, cache, sequences, options)
    assert_good_table(stages.tables, reference.combine(scores, 2, combine), sequences, shape, options)


PATTERNS = {
    "equal": lambda pages: torch.zeros(pages),
    "rising": lambda pages: torch.arange(pages) * 0.25,
    "falling": lambda pages: torch.arange(pages).flip(0) * 0.25,
    "two levels": lambda pages: (torch.arange(pages) % 3 == 0) * 2.0,
    "one heavy": lambda pages: (torch.arange(pages) == pages // 2) * 40.0,
    "few levels": lambda pages: torch.randint(0, 4, (pages,), generator=torch.Generator().manual_seed(3)) * 1.0,
}


@pytest.mark.parametrize("combine", COMBINES)
@pytest.mark.parametrize("pattern", PATTERNS)
def test_select_of_ties_is_exact(kernels: str, pattern: str, combine: str) -> None:
    """Pages of equal tokens (level, 0, 0, ...) score a level each; equal levels tie and the lowest pages win."""
    shape = DecodeShape(3, 1, 64, 16, 2)
    options = SelectOptions(20 * 16, combine=combine)
    pages = 90
    cache, sequences = make(shape, (pages * 16 + 1,))
    table = sequences.block_table[0, :pages].long()
    cache.keys[table] = 0
    cache.keys[table, :, :, 0] = PATTERNS[pattern](pages).to(DEVICE, cache.keys.dtype)[:, None, None]
    reference.build(cache, table)
    query = torch.zeros(1, 3, 64, device=DEVICE, dtype=cache.keys.dtype)
    query[0, :, 0] = torch.tensor((8.0, 6.0, 4.0))
    stages = make_stages(kernels, cache, sequences, options)
    stages.score(query)
    stages.select()
    combined = reference.combine(scores_of(stages, cache, sequences, options), 1, combine)
    assert torch.equal(stages.tables, reference.select(combined, sequences, shape, options))


@pytest.mark.parametrize("combine", COMBINES)
@pytest.mark.parametrize("size", (1e4, 2e6))
def test_select_keeps_the_best_pages_of_enormous_scores(kernels: str, size: float, combine: str) -> None:
    """Scores whose last place is worth more than a page's share (8 heads round differently)."""
    shape = DecodeShape(8, 8, 64, 16, 2)
    options = SelectOptions(20 * 16, combine=combine)
    pages, best = 90, torch.tensor((11, 40, 41, 70))
    cache, sequences = make(shape, (pages * 16 + 1,))
    table = sequences.block_table[0, :pages].long()
    level = -torch.ones(pages)
    level[best] = 1.0
    cache.keys[table] = 0
    cache.keys[table, :, :, 0] = level.to(DEVICE, cache.keys.dtype)[:, None, None]
    reference.build(cache, table)
    query = torch.zeros(1, 8, 64, device=DEVICE, dtype=cache.keys.dtype)
    query[0, :, 0] = 8 * size * torch.linspace(1.0, 1.9, 8, device=DEVICE)
    stages = make_stages(kernels, cache, sequences, options)
    stages.score(query)
    assert (stages.scores[0, :, best].abs() > 0.9 * size).all()
    stages.select()
    combined = reference.combine(scores_of(stages, cache, sequences, options), 8, combine)
    assert torch.equal(stages.tables, reference.select(combined, sequences, shape, options))
    assert all(set(best.tolist()) < set(head.tolist()) for head in stages.tables[0])
