"""The scorer's work list, cut into runs or shared: every page once, whoever takes it, and the counter is 0 again."""

from __future__ import annotations

import pytest
import torch
from kernel_cases import ON_GPU, SCORE_ERROR, assert_good_table, make, make_query

from locks_kernels import reference
from locks_kernels.cuda.launch import GROUP_PAGES
from locks_kernels.cuda.stages import CudaStages, plan_on
from locks_kernels.shapes import DecodeShape, SelectOptions

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not ON_GPU, reason="needs a CUDA device")]

OPTIONS = SelectOptions(512)
LEAST_SHARED = 40  # pages a block, as in work_list.cuh


def lengths(shape: DecodeShape, wanted: tuple[float, ...]) -> tuple[int, ...]:
    """Tokens: int as they are, float as pages for each block of this device's scorer."""
    blocks = plan_on(torch.device("cuda"), shape, 1, 1 << 16, 1).score_blocks
    return tuple(tokens if isinstance(tokens, int) else round(16 * blocks * tokens) + 1 for tokens in wanted)


@pytest.mark.parametrize(
    ("shape", "wanted", "shared"),
    [
        (DecodeShape(8, 2), (47.3,), True),
        (DecodeShape(8, 2), (19.0, 0, 42.6, 17, 2.4), True),
        (DecodeShape(9, 3, head_dim=64), (40.7,), True),
        (DecodeShape(16, 16, head_dim=64, rank=2), (41.7, 3), True),  # two blocks for the heads of a page
        (DecodeShape(8, 1, dtype="float16"), (28.4, 14.2), True),
        (DecodeShape(4, 2), (8.5,) * 8, True),
        (DecodeShape(4, 2), (7.5,) * 8, False),  # less than a group for each block and sequence
        (DecodeShape(8, 2), (38.0,), False),
        (DecodeShape(2, 2, head_dim=64, rank=2), (0, 1, 15, 160, 161, 800), False),  # less pages than warps
        (DecodeShape(16, 2), (9_000, 20, 700, 0, 5_000), False),
    ],
    ids=str,
)
def test_every_page_is_scored_and_ranked(shape: DecodeShape, wanted: tuple[float, ...], shared: bool) -> None:
    """Several times, as which block takes which pages is chance; what a step before left is poison.

    Of a list that is shared every block leaves a part of every sequence; of one in runs only of those that it has.
    """
    tokens = lengths(shape, wanted)
    cache, sequences = make(shape, tokens, room=0)
    stages = CudaStages(cache, sequences, OPTIONS)
    query = make_query(shape, len(tokens))
    expected = reference.score(query, cache, sequences, OPTIONS.recent_pages)
    combined = reference.combine(expected, shape.kv_heads, OPTIONS.combine)
    for _ in range(20):
        stages.scores.fill_(float("nan"))
        stages.partials.fill_(float("nan"))
        torch.cuda.synchronize()
        stages.score(query)
        stages.select()
        torch.cuda.synchronize()
        assert not stages.grabs.any()
        assert len(tokens) == 1 or bool(stages.partials.isnan().any()) is not shared
        scores = stages.scores[..., : sequences.max_pages]
        ranked = expected > float("-inf")
        assert (scores - expected)[ranked].abs().max() < SCORE_ERROR
        assert_good_table(stages.tables, combined, sequences, shape, OPTIONS)


def test_lengths_that_grow_into_a_shared_list() -> None:
    """One graph; workspaces are what the step before left."""
    shape = DecodeShape(8, 2)
    (longest,) = lengths(shape, (47.3,))
    cache, sequences = make(shape, (longest,), room=0)
    stages = CudaStages(cache, sequences, OPTIONS)
    query = make_query(shape, 1)
    out = torch.empty_like(query)

    def step() -> None:
        stages.score(query)
        stages.select()
        stages.attend(query, out)

    step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(3):
            step()
    edge = 16 * (LEAST_SHARED * stages.plan.score_blocks + OPTIONS.recent_pages)
    for length in (0, 17, longest // 2, edge - 16, edge, edge + 16 * GROUP_PAGES, longest - 1, 17, longest):
        sequences.seq_lens.fill_(length)
        graph.replay()
        torch.cuda.synchronize()
        combined = reference.combine(reference.score(query, cache, sequences, 1), shape.kv_heads, OPTIONS.combine)
        assert_good_table(stages.tables, combined, sequences, shape, OPTIONS)
        assert not stages.grabs.any()
