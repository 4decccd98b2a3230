"""A step in one launch does what the separate stages do, on the cases that they are tested on."""

from __future__ import annotations

import pytest
import torch
from kernel_cases import DEVICE, ON_GPU, SCORE_ERROR, assert_close_output, assert_good_table, make, make_query, randn

from locks_kernels import reference
from locks_kernels.cache import PagedCache, Sequences
from locks_kernels.cuda.stages import CudaStages
from locks_kernels.shapes import DecodeShape, SelectOptions

HAS_CLUSTERS = ON_GPU and torch.cuda.get_device_capability() >= (9, 0)
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not HAS_CLUSTERS, reason="needs a CUDA device of capability 9.0")]

SHAPES = [
    DecodeShape(8, 2),
    DecodeShape(2, 2, dtype="float16"),
    DecodeShape(9, 3, head_dim=64),
    DecodeShape(4, 2, rank=4),
    DecodeShape(3, 1, head_dim=64, rank=2, dtype="float16"),
]
# none, within the budget, a page that fills, one that opens, several groups a warp
BATCHES = ((0, 1, 16), (17, 47, 2048), (2049, 16 * 200), (16 * 1024 - 3,), (16 * 700 + 1, 5 * 16))
OPTIONS = SelectOptions(256)


def step_of(
    shape: DecodeShape, tokens: tuple[int, ...], options: SelectOptions = OPTIONS, starts_early: bool = False
) -> tuple[CudaStages, tuple[PagedCache, Sequences], torch.Tensor, torch.Tensor, tuple[torch.Tensor, torch.Tensor]]:
    """The stages of a cache after one step, the same cache before it, query, output, new key and value."""
    cache, sequences = make(shape, tokens, room=0)
    before, _ = make(shape, tokens, room=0)
    stages = CudaStages(cache, sequences, options)
    assert stages.whole_step is not None
    # views of one projection, as in a model, save that rotated keys are often a tensor of their own
    joined = 1.5 * randn(len(tokens), shape.query_heads + 2 * shape.kv_heads, shape.head_dim, seed=5)
    query, keys, values = joined.to(cache.keys.dtype).split((shape.query_heads, shape.kv_heads, shape.kv_heads), 1)
    keys = keys.contiguous()
    out = torch.full(query.shape, float("nan"), dtype=query.dtype, device=DEVICE)
    torch.cuda.synchronize()
    stages.whole_step(query, keys, values, out, starts_early)
    return stages, (before, sequences), query, out, (keys, values)


@pytest.mark.parametrize("tokens", BATCHES, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=lambda shape: f"g{shape.group}d{shape.head_dim}r{shape.rank}{shape.dtype}")
def test_one_launch_is_append_score_select_and_attend(shape: DecodeShape, tokens: tuple[int, ...]) -> None:
    stages, (before, sequences), query, out, token = step_of(shape, tokens)
    apart = CudaStages(before, sequences, OPTIONS)
    apart.append_finalise(*token)
    for pool in ("keys", "values", "summaries"):
        mine, theirs = (getattr(cache, pool).view(torch.uint8) for cache in (stages.cache, before))
        assert torch.equal(mine, theirs), pool
    scores = reference.score(query, before, sequences, OPTIONS.recent_pages)
    combined = reference.combine(scores, shape.kv_heads, OPTIONS.combine)
    assert_good_table(stages.tables, combined, sequences, shape, OPTIONS)
    expected, lse = reference.attend(query, before, sequences, stages.tables)
    assert_close_output(out, expected, shape.dtype)
    assert torch.allclose(stages.lse, lse, atol=SCORE_ERROR)


@pytest.mark.parametrize("tokens", ((16 * 1024 - 3,), (2049, 1500), (2047, 16 * 1000)), ids=str)
def test_two_tiles_a_warp(tokens: tuple[int, ...]) -> None:
    """The usual budget; the new token is in a second tile."""
    options, shape = SelectOptions(2048), SHAPES[0]
    stages, (before, sequences), query, out, token = step_of(shape, tokens, options)
    reference.append(before, sequences, *token)
    combined = reference.combine(reference.score(query, before, sequences), shape.kv_heads, options.combine)
    assert_good_table(stages.tables, combined, sequences, shape, options)
    assert_close_output(out, reference.attend(query, before, sequences, stages.tables)[0], shape.dtype)


@pytest.mark.parametrize("combine", ("share", "peak"))
@pytest.mark.parametrize("sink, recent", ((0, 1), (3, 5)))
def test_options(combine: str, sink: int, recent: int) -> None:
    options = SelectOptions(512, sink_pages=sink, recent_pages=recent, combine=combine)  # type: ignore[arg-type]
    shape = SHAPES[0]
    stages, (before, sequences), query, out, token = step_of(shape, (512, 513, 9999), options)
    reference.append(before, sequences, *token)
    combined = reference.combine(reference.score(query, before, sequences, recent), shape.kv_heads, options.combine)
    assert_good_table(stages.tables, combined, sequences, shape, options)
    assert_close_output(out, reference.attend(query, before, sequences, stages.tables)[0], shape.dtype)


def test_longer_sequences_that_stay_dense() -> None:
    stages, *_ = step_of(SHAPES[0], (1024, 1025), SelectOptions(512, dense_tokens=1024))
    dense, sparse = stages.tables.tolist()
    assert dense == [list(range(64))] * 2
    assert all(row[31] == 64 and row[32:] == [-1] * 32 for row in sparse)


def test_of_equal_pages_the_lowest_are_kept() -> None:
    shape, tokens = SHAPES[0], 1000 * 16 - 7
    cache, sequences = make(shape, (tokens,), room=0)
    cache.summaries[sequences.block_table[0].long()] = cache.summaries[int(sequences.block_table[0, 3])].clone()
    stages, query = CudaStages(cache, sequences, OPTIONS), make_query(shape, 1)
    token = randn(1, 2, 128).bfloat16()
    assert stages.whole_step is not None
    stages.whole_step(query, token, token, torch.empty_like(query), False)
    assert stages.tables.tolist() == [[[*range(15), 999]] * 2]


def test_steps_behind_one_another_do_not_read_ahead() -> None:
    """Two layers in turn, with nothing between their launches: a page that fills is ranked in the layer's next step by its
    new summary."""
    shape, steps = SHAPES[0], 40
    tokens = [tuple(randn(2, 2, 128, seed=seed).bfloat16() for seed in (step, step + steps)) for step in range(steps)]
    queries = [make_query(shape, 2, seed=step) for step in range(steps)]
    found: list[list[torch.Tensor]] = []
    for starts_early in (False, True):
        made = [make(shape, (16 * 40 - 8, 16 * 90 - 5), room=4, seed=seed) for seed in (0, 7)]
        lengths = [[sequences.seq_lens + 1 + step for step in range(steps)] for _, sequences in made]
        stages = [
            [CudaStages(cache, Sequences(sequences.block_table, length), OPTIONS) for length in lens]
            for (cache, sequences), lens in zip(made, lengths, strict=True)
        ]
        outs = [torch.empty_like(queries[0]) for _ in range(2 * steps)]
        torch.cuda.synchronize(DEVICE)
        for at, out in enumerate(outs):
            launch = stages[at % 2][at // 2].whole_step
            assert launch is not None
            launch(queries[at // 2], *tokens[at // 2], out, starts_early)
        torch.cuda.synchronize(DEVICE)
        found.append(outs)
    assert all(torch.equal(safe, early) for safe, early in zip(*found, strict=True))
