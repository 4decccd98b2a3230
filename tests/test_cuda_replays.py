"""Ten thousand replays of one captured step while the lengths grow: the same as the plain-torch step at checked moments."""

from __future__ import annotations

import copy

import pytest
import torch

from locks_kernels import reference
from locks_kernels.cache import PagedCache, Sequences
from locks_kernels.decode import LocksDecoder
from locks_kernels.shapes import DecodeShape, SelectOptions

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

REPLAYS = 10_000
CHECKED = (1, 2, 15, 16, 17, 100, 1_000, 1_001, 4_095, 4_096, 9_999, 10_000)


@pytest.mark.parametrize("starts_early", (False, True))
def test_ten_thousand_replays_equal_the_reference(starts_early: bool, launches: bool) -> None:
    torch.manual_seed(0)
    shape, options = DecodeShape(8, 2), SelectOptions(256)
    starts = torch.tensor([14, 1_000, 333], dtype=torch.int32, device="cuda")
    pages = shape.pages(1_000 + REPLAYS) + 1
    cache = PagedCache.allocate(shape, 3 * pages, "cuda")
    for pool in (cache.keys, cache.values):
        pool.normal_()
    table = torch.randperm(3 * pages, dtype=torch.int32, device="cuda").view(3, pages)
    sequences = Sequences(table, starts.clone())
    decoder = LocksDecoder(cache, sequences, options, "cuda", starts_early=starts_early)
    decoder.prefill()
    assert (len(decoder.launches) == 1) == launches
    query = torch.randn(3, 8, 128, device="cuda", dtype=torch.bfloat16)
    keys, values = torch.randn(2, 3, 2, 128, device="cuda", dtype=torch.bfloat16).unbind()
    out, projected = torch.empty_like(query), torch.zeros(1, device="cuda")

    def step() -> None:
        sequences.seq_lens.add_(1)
        if starts_early:
            projected.add_(1)  # stands for the projection of a model
        decoder.step(query, keys, values, out)

    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        step()
    torch.cuda.synchronize()
    sequences.seq_lens.copy_(starts)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    noise = torch.randn(64, 3, 8, 128, device="cuda", dtype=torch.bfloat16)
    for replay in range(1, REPLAYS + 1):
        query.copy_(noise[replay % 64])
        keys.copy_(noise[(replay + 1) % 64, :, :2])
        values.copy_(noise[(replay + 2) % 64, :, :2])
        graph.replay()
        if replay in CHECKED:
            assert torch.equal(sequences.seq_lens, starts + replay)
            expected, _ = reference.attend(query, cache, sequences, decoder.tables)
            assert (out - expected).float().norm() < 1e-2 * expected.float().norm()
            rebuilt = copy.copy(cache)
            rebuilt.summaries = cache.summaries.clone()
            complete = torch.arange(pages, device="cuda") < (sequences.seq_lens // shape.page_size)[:, None]
            reference.build(rebuilt, table[complete])
            scores = reference.score(query, rebuilt, sequences)
            combined = reference.combine(scores, shape.kv_heads, options.combine)
            best = reference.select(combined, sequences, shape, options)
            kept, most = (
                combined.gather(2, tables[:, :, :-1].clamp_min(0).long()).sum(-1) for tables in (decoder.tables, best)
            )
            assert (kept >= 0.98 * most).all()
