"""The plugin's way through a batch, with vLLM faked (fake_vllm.py) and the plain-torch stages.

The truth for a row is the engine's dense attention where the budget covers it, and the reference's step where it does not.
"""

from __future__ import annotations

import dataclasses
import gc
import weakref
from types import SimpleNamespace
from typing import Any

import fake_vllm
import pytest
import torch
from vllm_world import BLOCKS, BUDGET, FRESH, HQ, LONG, PAGE, SHAPE, SHORT, WIDTH, AppendingStages, D, H, paged, prefilled

from locks_kernels import reference
from locks_kernels.cache import PagedCache, Sequences
from locks_kernels.decode import ReferenceStages
from locks_kernels.shapes import DecodeShape, SelectOptions
from locks_kernels.summary import RecordLayout
from locks_kernels.vllm_plugin import limits, settings
from locks_kernels.vllm_plugin.pages import padded_bytes, page_cache, tail_bytes
from locks_kernels.vllm_plugin.workspace import Workspaces


@pytest.mark.parametrize("order", ["HND", "NHD"])
def test_mixed_batch(world: Any, order: str) -> None:
    """One token each of a long and a short sequence, and a prompt behind them: three ways through one batch."""
    w = world(order=order)
    prefilled(w)
    out, at = w.step([(LONG, 190, 1), (SHORT, 40, 1), (FRESH, 0, 70)], padding=3)
    assert (at.metadata.decodes, at.metadata.prefill.num_actual_tokens) == (2, 70)
    for index, layer in enumerate(w.layers):
        torch.testing.assert_close(out[index, :2], w.sparse(layer, at, 2))
        torch.testing.assert_close(out[index, 1:2], w.dense(layer, at, 1), atol=2e-2, rtol=2e-2)  # within the budget
        torch.testing.assert_close(out[index, 2:], w.dense(layer, at, 2))
        assert (out[index, 0] - w.dense(layer, at, 0)[0]).abs().max() > 0.05  # sparse, and it shows
        assert layer.impl.rows_attended == 4  # prompts only


@pytest.mark.parametrize("stages", [ReferenceStages, AppendingStages])
def test_decodes_only_and_rows_of_padding(world: Any, stages: type[ReferenceStages]) -> None:
    """A full graph's batch: as many rows as were captured, the last ones of length 0.  vLLM's dummy batches have lengths and
    no slots: they write nothing either."""
    w = world(stages=stages)
    prefilled(w)
    attended = w.layers[0].impl.rows_attended
    out, at = w.step([(LONG, 190, 1), (SHORT, 40, 1)])
    assert at.metadata.prefill is None and at.metadata.scheduler_metadata is None
    torch.testing.assert_close(out[0], w.sparse(w.layers[0], at, 2))
    common = fake_vllm.Common(
        torch.arange(4).int(),
        torch.tensor([0, 1, 1, 1]),
        torch.tensor([191, 0, 0]).int(),
        3,
        3,
        1,
        512,
        torch.tensor([LONG + [0] * (WIDTH - len(LONG)), [0] * WIDTH, [0] * WIDTH]).int(),
        torch.tensor([-1, -1, -1]),
    )
    name, layer = list(w.modules.items())[1]
    before = layer.kv_cache.clone()
    keys = w.random(3, H, D)
    metadata = w.builder.build(0, common)
    padded = torch.full((3, HQ, D), float("nan"), dtype=torch.bfloat16)
    with fake_vllm.forward_context({name: metadata}):
        layer.impl.do_kv_cache_update(layer, keys, keys, layer.kv_cache, common.slot_mapping)
        layer.impl.forward(layer, w.random(3, HQ, D), keys, keys, layer.kv_cache, metadata, padded)
    assert torch.equal(layer.kv_cache, before)
    assert padded[0].isfinite().all() and (padded[1:] == 0).all()
    assert layer.impl.rows_attended == attended
    assert AppendingStages.appended == ([2, 2, 3] if stages is AppendingStages else [])


def test_summaries_of_the_same_batch_are_waited_for(world: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A prompt that another one of the batch shares up to its last token comes as a decode."""
    told, plain = [], ReferenceStages.score

    def score(stages: ReferenceStages, query: torch.Tensor, summaries_ready: bool = True) -> None:
        told.append(summaries_ready)
        plain(stages, query)

    monkeypatch.setattr(ReferenceStages, "score", score)
    w = world()
    shared = [*FRESH, *range(40, 44)]
    out, at = w.step([(shared, 96, 1), (FRESH, 0, 96)])
    assert told == [False, False]  # of two layers
    torch.testing.assert_close(out[0, :1], w.sparse(w.layers[0], at, 1))
    told.clear()
    w.step([(shared, 97, 1)])
    assert told == [True, True]
    told.clear()
    step_by_step = world(scheduler_config=SimpleNamespace(max_num_seqs=8, async_scheduling=False))
    prefilled(step_by_step)
    step_by_step.step([(LONG, 190, 1)])
    assert told == [False, False], "it may share what another request decodes in the same step"


def test_prompts_only(world: Any) -> None:
    w = world()
    out, at = w.step([(LONG, 0, 100), (SHORT, 0, 33)], padding=2)
    assert at.metadata.stages is None and at.metadata.scheduler_metadata is not None
    torch.testing.assert_close(out[1, :100], w.dense(w.layers[1], at, 0))
    torch.testing.assert_close(out[1, 100:], w.dense(w.layers[1], at, 1))


def test_dense_layers_and_dense_contexts(world: Any) -> None:
    w = world({"dense_layers": [0]})
    prefilled(w)
    out, at = w.step([(LONG, 190, 1), (FRESH, 0, 20)])
    assert [layer.impl.served is None for layer in w.layers] == [True, False]
    torch.testing.assert_close(out[0, :1], w.dense(w.layers[0], at, 0))
    torch.testing.assert_close(out[1, :1], w.sparse(w.layers[1], at, 1))
    for row in (0, 1):
        torch.testing.assert_close(
            out[0, at.starts[row] : at.starts[row + 1]], w.dense(w.layers[0], at, row)
        )  # a plan of the whole batch, beside that of the prompt
    everything = world({"min_context": 192})
    prefilled(everything)
    out, at = everything.step([(LONG, 190, 1)])
    torch.testing.assert_close(out[0], everything.dense(everything.layers[0], at, 0), atol=2e-2, rtol=2e-2)


def records(kv_cache: torch.Tensor, block: int) -> torch.Tensor:
    return page_cache(kv_cache, SHAPE).summaries[block].clone()


def rebuilt(kv_cache: torch.Tensor, block: int) -> torch.Tensor:
    cache = page_cache(kv_cache, SHAPE)
    blank = PagedCache(SHAPE, cache.keys, cache.values, torch.zeros(BLOCKS, H, RecordLayout.of(SHAPE).record_bytes).byte())
    reference.build(blank, torch.tensor([block]))
    return blank.summaries[block]


def test_a_used_block_gets_a_new_summary_when_its_new_page_is_full(world: Any) -> None:
    """Prefix cache and preemption hand blocks on; until a page is full again, nobody ranks it."""
    w = world()
    prefilled(w)
    layer = w.layers[0]
    old = records(layer.kv_cache, 1)
    assert torch.equal(old, rebuilt(layer.kv_cache, 1))
    again = [1, 2, 40]  # of LONG, which is gone
    w.step([(again, 0, 15)])
    assert torch.equal(records(layer.kv_cache, 1), old)  # stale, and the open page of its sequence
    out, at = w.step([(again, 15, 1)])
    assert torch.equal(records(layer.kv_cache, 1), rebuilt(layer.kv_cache, 1))
    assert not torch.equal(records(layer.kv_cache, 1), old)
    torch.testing.assert_close(out[0], w.dense(layer, at, 0), atol=2e-2, rtol=2e-2)
    w.step([(again, 16, 20)])
    assert torch.equal(records(layer.kv_cache, 2), rebuilt(layer.kv_cache, 2))


def test_pages_fill_at_every_boundary(world: Any) -> None:
    """Decoding across a page's end, a token at a time: summarised with its last row, not before and not without it."""
    w = world()
    w.step([(FRESH, 0, 14)])
    layer = w.layers[1]
    untouched = records(layer.kv_cache, FRESH[0])
    for length in (15, 16, 17, 18):
        w.step([(FRESH, length - 1, 1)])
        now = records(layer.kv_cache, FRESH[0])
        assert torch.equal(now, untouched) == (length < 16)
        assert torch.equal(now, rebuilt(layer.kv_cache, FRESH[0])) == (length >= 16)


def test_layers_that_cannot_be_served(world: Any, capsys: pytest.CaptureFixture[str]) -> None:
    from locks_kernels.vllm_plugin import gpu

    w = world()
    fake_vllm.CONFIG.append(w.config)
    with pytest.raises(limits.RefusedError, match=r"LOCKS does not support ALiBi; serve with .* \"unsupported\": \"dense\""):
        gpu.LocksImpl(HQ, D, D**-0.5, H, alibi_slopes=[0.5])
    large = fake_vllm.FullAttentionSpec(block_size=128, num_kv_heads=H, head_size=D, dtype=torch.bfloat16)
    with pytest.raises(limits.RefusedError, match="use --block-size 16 or 32 or 64"):
        gpu.LocksBackend.customize_spec(large)
    window = fake_vllm.SlidingWindowSpec(block_size=1, num_kv_heads=H, head_size=D, dtype=torch.bfloat16, sliding_window=128)
    assert gpu.LocksBackend.customize_spec(window) is window
    fp8 = fake_vllm.FullAttentionSpec(block_size=PAGE, num_kv_heads=H, head_size=D, dtype=torch.uint8)
    assert gpu.LocksBackend.customize_spec(fp8) is fp8
    tolerant = world({"unsupported": "dense"}, speculative_config=object())
    assert "LOCKS does not support speculative decoding" in capsys.readouterr().out
    assert tolerant.builder.served == {}
    assert gpu.LocksBackend.customize_spec(large) is large
    prefilled(tolerant)
    out, at = tolerant.step([(LONG, 190, 1)])
    torch.testing.assert_close(out[0], tolerant.dense(tolerant.layers[0], at, 0))


def test_groups_that_cannot_be_served(world: Any) -> None:
    w = world()
    w.layers[1].impl.num_heads = 8
    with pytest.raises(limits.RefusedError, match="layers of 4 and 8 query heads in one group"):
        type(w.builder)(w.spec, list(w.modules), w.config, torch.device("cpu"))
    w.layers[1].impl.num_heads = HQ
    half = dataclasses.replace(w.spec, dtype=torch.float16)
    with pytest.raises(limits.RefusedError, match=r"a cache of .*float16 under a model of .*bfloat16"):
        type(w.builder)(half, list(w.modules), w.config, torch.device("cpu"))
    crowded = dataclasses.replace(w.spec, page_size_padded=w.spec.unpadded_page_size_bytes + 128)
    with pytest.raises(limits.RefusedError, match="share their pages"):
        type(w.builder)(crowded, list(w.modules), w.config, torch.device("cpu"))


def test_settings_that_do_not_fit_the_model(world: Any) -> None:
    with pytest.raises(settings.SettingsError, match="dense_layers has 2, but the model has layers 0 to 1"):
        world({"dense_layers": [0, 2]})
    with pytest.raises(settings.SettingsError, match="at least 3 pages"):
        world({"budget": 32})
    with pytest.raises(settings.SettingsError, match="oracle"):
        world({"selector": "oracle"})


def test_graphs_only_where_summaries_are(world: Any) -> None:
    w = world()
    plain = fake_vllm.FullAttentionSpec(block_size=PAGE, num_kv_heads=H, head_size=D, dtype=torch.bfloat16)
    assert w.builder.get_cudagraph_support(w.config, w.spec) is fake_vllm.Support.UNIFORM_SINGLE_TOKEN_DECODE
    assert w.builder.get_cudagraph_support(w.config, plain) is fake_vllm.Support.ALWAYS


def test_page_arithmetic() -> None:
    llama = DecodeShape(32, 8, 128, 16)
    assert (tail_bytes(llama), padded_bytes(65536, llama)) == (6656, 72192)
    kv_cache = paged()
    cache = page_cache(kv_cache, SHAPE)
    kv_cache.fill_(0)
    cache.summaries.fill_(255)
    assert (kv_cache == 0).all()  # a summary is no part of a page's keys and values
    kv_cache[3] = 1.0
    assert (cache.summaries == 255).all()
    assert cache.keys.data_ptr() == kv_cache.data_ptr() and cache.keys.stride() == cache.values.stride()
    with pytest.raises(ValueError, match="has not padded them"):
        page_cache(torch.zeros(4, H, PAGE, 2 * D, dtype=torch.bfloat16), SHAPE)


class Counting(ReferenceStages):
    """Stages with a workspace, so that sharing it can be seen."""

    made = 0

    def __init__(self, cache: PagedCache, sequences: Sequences, options: SelectOptions, share: Any = None) -> None:
        super().__init__(cache, sequences, options)
        Counting.made += 1
        self.room = torch.empty(sequences.batch, 5)


def test_batch_sizes_share_one_memory_and_keep_no_cache() -> None:
    """An engine measures itself with a small cache that it must be able to free, and captures from large to small."""
    Counting.made = 0
    workspaces = Workspaces(Counting, SelectOptions(BUDGET))
    cache = page_cache(paged(), SHAPE)

    def sequences(batch: int) -> Sequences:
        return Sequences(torch.zeros(batch, WIDTH, dtype=torch.int32), torch.zeros(batch, dtype=torch.int32))

    large, small = workspaces.on(cache, sequences(4)), workspaces.on(cache, sequences(2))
    assert small.room.shape == (2, 5) and small.room.data_ptr() == large.room.data_ptr()  # type: ignore[attr-defined]
    again = workspaces.on(page_cache(paged(), SHAPE), sequences(2))
    assert Counting.made == 2 and again.room.data_ptr() == large.room.data_ptr()  # type: ignore[attr-defined]
    larger = workspaces.on(cache, sequences(8))
    assert larger.room.shape == (8, 5)  # type: ignore[attr-defined]
    freed = weakref.ref(cache)
    del cache, large, small, larger
    gc.collect()
    assert freed() is None
    assert again.cache is not None
