"""Whole decode steps: across page boundaries, over recycled blocks, and replayed from one CUDA graph."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest
import torch
from kernel_cases import (
    DEVICE,
    KERNELS,
    ON_GPU,
    ROUNDING,
    assert_close_output,
    assert_good_table,
    layout,
    make,
    make_query,
    make_stages,
    randn,
    relative_error,
)

from locks_kernels import reference
from locks_kernels.cache import PagedCache, Sequences
from locks_kernels.decode import LocksDecoder, stages_class
from locks_kernels.shapes import DecodeShape, SelectOptions, ShapeError
from locks_kernels.summary import unpack

pytestmark = pytest.mark.usefixtures("launches")
TINY = DecodeShape(6, 2, 64, 16, 4)
OPTIONS = SelectOptions(3 * 16)
KERNELS_AND_REFERENCE = ["reference", *KERNELS]


def copy_of(cache: PagedCache) -> PagedCache:
    return PagedCache(cache.shape, cache.keys.clone(), cache.values.clone(), cache.summaries.clone())


def new_token(cache: PagedCache, batch: int, step: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    shape, dtype = cache.shape, cache.keys.dtype
    size = (batch, shape.kv_heads, shape.head_dim)
    keys, values = (1.5 * randn(*size, seed=1000 + step)).to(dtype), randn(*size, seed=2000 + step).to(dtype)
    return 2 * make_query(shape, batch, seed=3000 + step), keys, values


def complete_pages(sequences: Sequences, shape: DecodeShape) -> torch.Tensor:
    logical = torch.arange(sequences.max_pages, device=DEVICE)
    return sequences.block_table[logical < (sequences.seq_lens // shape.page_size)[:, None]].long()


def assert_step(decoder: LocksDecoder, query: torch.Tensor, out: torch.Tensor) -> None:
    """The step's table fits the summaries that it left, and its output fits the table."""
    cache, sequences, options = decoder.cache, decoder.sequences, decoder.options
    scores = reference.score(query, cache, sequences, options.recent_pages)
    combined = reference.combine(scores, cache.shape.kv_heads, options.combine)
    assert_good_table(decoder.tables, combined, sequences, cache.shape, options)
    assert_close_output(out, reference.attend(query, cache, sequences, decoder.tables)[0], cache.shape.dtype)


def assert_summaries(cache: PagedCache, pages: torch.Tensor) -> None:
    """Records of `pages` are as good as records rebuilt from scratch."""
    keys = cache.keys[pages].float()
    best = relative_error(reference.summarise(keys, cache.shape.rank).reconstruct(), keys)
    assert (relative_error(unpack(cache.summaries[pages], layout(cache)).reconstruct(), keys) <= 1.01 * best + 1e-4).all()


@pytest.mark.parametrize("kernels", KERNELS_AND_REFERENCE)
def test_decode_across_page_boundaries(kernels: str) -> None:
    cache, sequences = make(TINY, (14, 0, 30, 49), room=4)
    make_stages(kernels, cache, sequences, OPTIONS)  # skips where unsupported
    plain = copy_of(cache)
    cache.summaries.fill_(0xFF)
    decoder = LocksDecoder(cache, sequences, OPTIONS, kernels)
    assert decoder.kernels == kernels
    decoder.prefill()
    apart = 0
    for step in range(37):
        sequences.seq_lens += (sequences.seq_lens > 0).int()
        query, keys, values = new_token(cache, 4, step)
        out = decoder.step(query, keys, values)
        assert_step(decoder, query, out)
        expected = reference.decode_step(query, keys, values, plain, sequences, OPTIONS)
        # The summaries differ by a rounding here and there, so a page may win that had nearly won: not often, though.
        error = (out.float() - expected.float()).view(4, 2, -1).abs().amax(-1)  # [B, H]
        same = error <= 2 * ROUNDING[TINY.dtype] * expected.float().abs().max()
        apart += int((~same).sum())
    assert apart <= 0.03 * 37 * 3 * 2
    assert sequences.seq_lens.tolist() == [51, 0, 67, 86]
    assert (out[1] == 0).all() and (decoder.tables[1] == -1).all()
    assert torch.equal(cache.keys.nan_to_num(7.0), plain.keys.nan_to_num(7.0))
    assert_summaries(cache, complete_pages(sequences, TINY))


@pytest.mark.parametrize("kernels", KERNELS)
def test_a_recycled_block_gets_a_new_summary(kernels: str) -> None:
    cache, sequences = make(TINY, (4 * 16,), room=1)
    make_stages(kernels, cache, sequences, OPTIONS)
    decoder = LocksDecoder(cache, sequences, OPTIONS, kernels)
    decoder.prefill()
    old = int(sequences.block_table[0, 0])
    sequences.block_table[0] = sequences.block_table[0].roll(-1)  # the oldest page is given up and comes last
    sequences.seq_lens -= 16
    stale = cache.summaries[old].clone()
    for step in range(32):
        sequences.seq_lens += 1
        query, keys, values = new_token(cache, 1, step)
        assert_step(decoder, query, decoder.step(query, keys, values))
    assert int(sequences.block_table[0, 4]) == old and int(sequences.seq_lens[0]) == 80
    assert not torch.equal(cache.summaries[old], stale)
    assert_summaries(cache, complete_pages(sequences, TINY))


@pytest.mark.parametrize("kernels", KERNELS)
def test_layers_that_share_a_workspace(kernels: str) -> None:
    first, sequences = make(TINY, (70, 90), seed=1)
    second, _ = make(TINY, (70, 90), seed=1)
    second.values.copy_(second.values.roll(1, -1))
    make_stages(kernels, first, sequences, OPTIONS)
    layers = [LocksDecoder(first, sequences, OPTIONS, kernels)]
    layers.append(LocksDecoder(second, sequences, OPTIONS, kernels, share=layers[0]))
    query, keys, values = new_token(first, 2, 0)
    for layer in layers:
        assert_step(layer, query, layer.step(query, keys, values))


@pytest.mark.parametrize("kernels", KERNELS)
def test_caches_of_different_width_side_by_side(kernels: str) -> None:
    """They may share compiled kernels, but not what those are launched with."""
    tokens = (70, 90) + (16,) * (70 if ON_GPU else 0)  # so many that the selection does not split a sequence
    layers = []
    for room in (8192 if ON_GPU else 80, 0):  # the wide one's selection needs more shared memory than comes without asking
        cache, sequences = make(TINY, tokens)
        sequences.block_table = torch.nn.functional.pad(sequences.block_table, (0, room))
        make_stages(kernels, cache, sequences, OPTIONS)
        layers.append(LocksDecoder(cache, sequences, OPTIONS, kernels))
    for layer in layers:
        query, keys, values = new_token(layer.cache, len(tokens), 0)
        assert_step(layer, query, layer.step(query, keys, values))


def test_workspace_of_another_shape_is_refused() -> None:
    if ON_GPU:
        pytest.skip("one refusal is enough")
    cache, sequences = make(TINY, (70,))
    decoder = LocksDecoder(cache, sequences, OPTIONS, "triton")
    with pytest.raises(ShapeError, match="share a workspace"):
        LocksDecoder(cache, sequences, replace(OPTIONS, combine="peak"), "triton", share=decoder)


def test_unknown_and_unsupported_kernels_say_why(monkeypatch: pytest.MonkeyPatch) -> None:
    cache, _ = make(TINY, (16,))
    with pytest.raises(ShapeError, match="auto, cuda, triton, reference"):
        stages_class("locks", cache)
    on_cpu = PagedCache.allocate(TINY, 1, "cpu")
    monkeypatch.setenv("TRITON_INTERPRET", "0")
    with pytest.raises(ShapeError, match="TRITON_INTERPRET=1"):
        stages_class("triton", on_cpu)
    assert stages_class("auto", on_cpu)[0] == "reference"
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    many = Sequences(torch.zeros(65_536, 1, dtype=torch.int32), torch.zeros(65_536, dtype=torch.int32))
    with pytest.raises(ShapeError, match="65536 sequences in a batch; at most 65535"):
        stages_class("triton", on_cpu, many)


@pytest.mark.skipif(not ON_GPU, reason="needs a device's limits")
@pytest.mark.gpu
def test_tables_too_wide_for_the_cuda_selection_go_to_triton() -> None:
    cache, sequences = make(TINY, (70, 90))
    sequences.block_table = torch.nn.functional.pad(sequences.block_table, (0, 1 << 20))
    with pytest.raises(ShapeError, match="too wide"):
        LocksDecoder(cache, sequences, OPTIONS, "cuda")
    decoder = LocksDecoder(cache, sequences, OPTIONS)
    assert decoder.kernels == "triton"
    query, keys, values = new_token(cache, 2, 0)
    assert_step(decoder, query, decoder.step(query, keys, values))


@pytest.mark.skipif(not ON_GPU, reason="threads and devices of CUDA")
@pytest.mark.parametrize("kernels", KERNELS)
def test_a_step_from_a_fresh_thread(kernels: str) -> None:
    """A new thread has no current CUDA context."""
    cache, sequences = make(TINY, (70, 90))
    make_stages(kernels, cache, sequences, OPTIONS)
    decoder = LocksDecoder(cache, sequences, OPTIONS, kernels)
    query, keys, values = new_token(cache, 2, 0)
    out = torch.empty_like(query)
    decoder.step(query, keys, values, out)
    first = out.clone()
    torch.cuda.synchronize()
    with ThreadPoolExecutor(1) as pool:
        pool.submit(decoder.step, query, keys, values, out.fill_(7.0)).result()
    torch.cuda.synchronize()
    assert torch.equal(out, first)


@pytest.mark.skipif(not ON_GPU or torch.cuda.device_count() < 2, reason="needs two GPUs")
@pytest.mark.gpu
def test_a_cache_on_another_device_than_the_current_one() -> None:
    assert torch.cuda.current_device() == 0
    cache, sequences = make(TINY, (70, 90))
    cache = PagedCache(TINY, *(pool.to("cuda:1") for pool in (cache.keys, cache.values, cache.summaries)))
    sequences = Sequences(sequences.block_table.to("cuda:1"), sequences.seq_lens.to("cuda:1"))
    query, keys, values = (tensor.to("cuda:1") for tensor in new_token(cache, 2, 0))
    decoder = LocksDecoder(cache, sequences, OPTIONS, "cuda")
    out = decoder.step(query, keys, values)
    assert torch.cuda.current_device() == 0
    expected = reference.attend(query, cache, sequences, decoder.tables)[0]
    assert_close_output(out, expected, TINY.dtype)


HEADS = ((1, 16), (1, 7), (2, 5), (5, 1), (6, 2), (7, 5), (9, 3), (10, 4), (11, 8), (12, 8), (32, 1))  # KV heads, group


@pytest.mark.skipif(not ON_GPU, reason="too much to interpret")
@pytest.mark.parametrize("kernels", KERNELS)
@pytest.mark.parametrize(("kv_heads", "group"), HEADS)
@pytest.mark.parametrize(("head_dim", "page"), ((64, 32), (128, 16), (256, 64)))
def test_every_number_of_heads(kernels: str, kv_heads: int, group: int, head_dim: int, page: int) -> None:
    shape, options = DecodeShape(kv_heads * group, kv_heads, head_dim, page), SelectOptions(5 * page)
    cache, sequences = make(shape, (70 * page - 1, 0, 5 * page, 5 * page + 1))
    make_stages(kernels, cache, sequences, options)
    decoder = LocksDecoder(cache, sequences, options, kernels)
    decoder.prefill()
    for step in range(3):
        sequences.seq_lens += (sequences.seq_lens > 0).int()
        query, keys, values = new_token(cache, 4, step)
        assert_step(decoder, query, decoder.step(query, keys, values))


@pytest.mark.skipif(not ON_GPU, reason="CUDA graphs need a GPU")
@pytest.mark.parametrize("kernels", KERNELS)
def test_one_graph_is_replayed_as_lengths_jump(kernels: str) -> None:
    """Nothing of a longer or shorter step before is left in use: the workspace is poison before every replay."""
    shape, options = DecodeShape(16, 4), SelectOptions(6 * 16)
    cache, sequences = make(shape, (320, 320, 320))
    make_stages(kernels, cache, sequences, options)
    decoder = LocksDecoder(cache, sequences, options, kernels)
    inputs = new_token(cache, 3, 0)
    out = torch.empty_like(inputs[0])
    decoder.step(*inputs, out)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        decoder.step(*inputs, out)
    jumps = ((0, 0, 0), (1, 16, 17), (95, 96, 97), (320, 0, 1), (97, 112, 96), (0, 1, 320), (0, 0, 0), (320, 320, 320))
    for lengths in (*jumps, *reversed(jumps)):
        sequences.seq_lens.copy_(torch.tensor(lengths))
        for name in ("scores", "partials"):
            if hasattr(decoder.stages, name):
                getattr(decoder.stages, name).fill_(float("nan"))
        out.fill_(float("nan"))
        decoder.tables.fill_(1 << 30)
        graph.replay()
        assert_step(decoder, inputs[0], out)


@pytest.mark.skipif(not ON_GPU, reason="CUDA graphs need a GPU")
@pytest.mark.gpu
@pytest.mark.parametrize("kernels", KERNELS)
@pytest.mark.parametrize("combine", ("share", "peak"))
def test_one_graph_is_replayed_as_lengths_grow(kernels: str, combine: str) -> None:
    shape, options = DecodeShape(8, 2), SelectOptions(6 * 16, combine=combine)
    cache, sequences = make(shape, (1, 14, 0, 120), room=20)
    make_stages(kernels, cache, sequences, options)
    decoder = LocksDecoder(cache, sequences, options, kernels)
    decoder.prefill()
    inputs = new_token(cache, 4, 0)
    out = torch.empty_like(inputs[0])
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        decoder.step(*inputs, out)  # compiles, and writes a token
    torch.cuda.current_stream().wait_stream(side)
    plain = copy_of(cache)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        decoder.step(*inputs, out)
    for step in range(200):
        sequences.seq_lens += (sequences.seq_lens > 0).int()
        for buffer, fresh in zip(inputs, new_token(cache, 4, step), strict=True):
            buffer.copy_(fresh)
        graph.replay()
        reference.append(plain, sequences, inputs[1], inputs[2])
        if step % 9 == 0 or step > 190:
            assert_step(decoder, inputs[0], out)
    assert torch.equal(cache.keys.nan_to_num(7.0), plain.keys.nan_to_num(7.0))
    assert torch.equal(cache.values.nan_to_num(7.0), plain.values.nan_to_num(7.0))
    assert_summaries(cache, complete_pages(sequences, shape))
