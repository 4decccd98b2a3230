"""Summaries and appending of every implementation against the plain-torch functions of the same name."""

from __future__ import annotations

import pytest
import torch
from kernel_cases import (
    DEVICE,
    KERNELS,
    ON_GPU,
    empty_cache,
    every_shape,
    layout,
    make,
    make_query,
    make_stages,
    randn,
    record_scores,
    relative_error,
)

from locks_kernels import reference
from locks_kernels.cache import Sequences
from locks_kernels.shapes import DecodeShape
from locks_kernels.summary import unpack

pytestmark = pytest.mark.parametrize("kernels", KERNELS)


@every_shape
def test_build_is_as_good_as_the_reference(kernels: str, shape: DecodeShape) -> None:
    cache = empty_cache(shape, 6)
    cache.keys.copy_(1.5 * randn(*cache.keys.shape) + randn(shape.head_dim, seed=1))
    cache.keys[0] = cache.keys[0, :, :1]  # no rank at all
    cache.keys[1, :, 3] *= 300  # one token dwarfs the page
    cache.keys[2] = 0
    decay = 0.6 ** torch.arange(shape.page_size, device=DEVICE)  # a page whose ranks differ much in size
    cache.keys[4] = (
        20 * (randn(shape.page_size, shape.page_size, seed=2) * decay) @ randn(shape.page_size, shape.head_dim, seed=3)
    )
    cache.keys[5] = float("nan")  # not listed, must stay as it is
    listed = torch.tensor([3, 0, 2, 1, 4], device=DEVICE)
    make_stages(kernels, cache, Sequences(listed[None].int(), listed[:1].int())).build(listed)
    assert (cache.summaries[5] == 0xFF).all()

    keys = cache.keys[:5].float()
    found = unpack(cache.summaries[:5], layout(cache))
    expected = reference.summarise(keys, shape.rank)
    best = relative_error(expected.reconstruct(), keys)
    assert (relative_error(found.reconstruct(), keys) <= 1.01 * best + 1e-4).all()
    assert torch.equal(found.centroid, expected.centroid)
    # singular values: the ranks are eigenvectors, in the order of their eigenvalues
    mine, theirs = (s.coefficients.float() * s.coefficient_scale.float()[..., None] for s in (found, expected))
    assert ((mine.norm(dim=-2) / theirs.norm(dim=-2))[3:] - 1).abs().max() < 0.01

    query = 0.5 * make_query(shape, 1)[0]
    mine = record_scores(cache, listed, query)
    reference.build(cache, listed)
    # One int4 rounding that falls the other way moves a logit by about 0.003 of the keys' size: they are 20 on the last page,
    # and in the hundreds on the outlier's, which is left out.
    apart = (mine - record_scores(cache, listed, query)).abs()
    assert apart[:, [0, 1, 2]].max() < 0.05
    assert apart[:, 4].max() < 0.2


@every_shape
def test_append_finalise(kernels: str, shape: DecodeShape) -> None:
    page = shape.page_size
    cache, sequences = make(shape, (0, 1, page - 1, page, page + 1, 2 * page), room=0)
    expected, _ = make(shape, (0, 1, page - 1, page, page + 1, 2 * page), room=0)
    new_keys = randn(6, shape.kv_heads, shape.head_dim, seed=5).to(cache.keys.dtype)
    new_values = randn(6, shape.kv_heads, shape.head_dim, seed=6).to(cache.keys.dtype)
    cache.summaries.fill_(0xFF)
    make_stages(kernels, cache, sequences).append_finalise(new_keys, new_values)
    reference.append(expected, sequences, new_keys, new_values)
    assert torch.equal(cache.keys.nan_to_num(7.0), expected.keys.nan_to_num(7.0))
    assert torch.equal(cache.values.nan_to_num(7.0), expected.values.nan_to_num(7.0))

    filled = torch.stack((sequences.block_table[3, 0], sequences.block_table[5, 1])).long()
    others = torch.ones(cache.num_pages, dtype=torch.bool, device=DEVICE)
    others[filled] = False
    assert (cache.summaries[others] == 0xFF).all()
    keys = cache.keys[filled].float()
    found = unpack(cache.summaries[filled], layout(cache)).reconstruct()
    best = relative_error(reference.summarise(keys, shape.rank).reconstruct(), keys)
    assert (relative_error(found, keys) <= 1.01 * best + 1e-4).all()


@pytest.mark.skipif(not ON_GPU, reason="kernels run side by side on a GPU only")
def test_build_waits_for_the_keys_that_the_kernel_before_it_writes(kernels: str) -> None:
    shape, batch = DecodeShape(8, 8), 1000
    cache = empty_cache(shape, batch)
    cache.keys.normal_(generator=torch.Generator(DEVICE).manual_seed(0))
    sequences = Sequences(torch.arange(batch, device=DEVICE).int()[:, None], torch.full((batch,), 15, device=DEVICE).int())
    stages = make_stages(kernels, cache, sequences)
    ids = torch.arange(batch, device=DEVICE)
    for size in (1.0, 8.0, 64.0):
        token = size * randn(batch, 8, 128).to(cache.keys.dtype)
        torch.cuda.synchronize()
        stages.append_finalise(token, token)  # fills no page
        stages.build(ids)
        built = cache.summaries.clone()
        torch.cuda.synchronize()
        stages.build(ids)
        assert torch.equal(built, cache.summaries)


@pytest.mark.parametrize("batch", (1, 6, 132))
@pytest.mark.parametrize("starts_early", (False, True))
@pytest.mark.parametrize("some", (False, True), ids=("all", "some"))
def test_appending_beside_the_scoring_is_the_same_as_before_it(
    kernels: str, batch: int, starts_early: bool, some: bool
) -> None:
    """Queries, keys and values are rows of a fused projection; with slots, some sequences have no new token."""
    if kernels != "cuda":
        pytest.skip("two launches elsewhere")
    shape, lengths = DecodeShape(8, 2), (48, 1, 15, 333, 64, 3200)
    both = [make(shape, (lengths * batch)[:batch], room=0) for _ in range(2)]
    query, new_keys, new_values = randn(batch, 12, 128, seed=5).bfloat16().split((8, 2, 2), 1)
    new_keys = new_keys.contiguous()
    slots = torch.arange(batch, device=DEVICE) % 4 - 1 if some else None
    apart, beside = (make_stages(kernels, *made) for made in both)
    if beside.append_score is None:
        pytest.skip("more tokens than this device's scorer appends")
    for (cache, sequences), stages in zip(both, (apart, beside), strict=True):
        filled = sequences.seq_lens % 16 == 0
        cache.summaries[sequences.block_table[filled, sequences.seq_lens[filled].long() // 16 - 1].long()] = 0xFF
        stages.scores.fill_(0)
    cache, sequences = both[0]
    live = sequences if slots is None else Sequences(sequences.block_table, sequences.seq_lens.where(slots >= 0, 0))
    make_stages(kernels, cache, live).append_finalise(new_keys, new_values)
    apart.score(query)
    beside.append_score(query, new_keys, new_values, starts_early, slots)
    for pool in ("keys", "values", "summaries"):
        mine, theirs = (getattr(cache, pool).view(torch.uint8) for cache, _ in both)
        assert torch.equal(mine, theirs), pool
    assert torch.equal(apart.scores, beside.scores)
