"""Who writes a step's new tokens inside vLLM: the engine in front of the attention, or the scorer, and never both or nobody."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import fake_vllm
import pytest
import torch
from vllm_world import FRESH, LONG, PAGE, SHORT, AppendingStages, prefilled

from locks_kernels.vllm_plugin.pages import page_cache

DECODES = [(LONG, 190, 1), (SHORT, 40, 1)]
PIECEWISE = fake_vllm.GraphMode.PIECEWISE


@pytest.fixture
def updates(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many slots the engine has written, call by call."""
    seen: list[int] = []
    plain = fake_vllm.Impl.do_kv_cache_update

    def update(impl: Any, layer: Any, key: Any, value: Any, kv_cache: torch.Tensor, slots: torch.Tensor) -> None:
        seen.append(len(slots))
        plain(impl, layer, key, value, kv_cache, slots)

    monkeypatch.setattr(fake_vllm.Impl, "do_kv_cache_update", update)
    return seen


def test_the_scorer_appends_where_all_rows_decode(world: Any, updates: list[int]) -> None:
    """To the byte what the engine and finalise_slots write, across the end of a page, in batches of every kind."""
    longer = [*LONG, 13]
    decodes = [[(longer, 190 + at, 1), (SHORT, 40 + at, 1)] for at in range(9)]
    mixed, last = [(longer, 199, 1), (SHORT, 49, 1), (FRESH, 0, 70)], [(longer, 200, 1), (FRESH, 70, 1)]
    engine, scorer = world(), world(stages=AppendingStages)
    prefilled(engine)
    prefilled(scorer)
    updates.clear()
    for padding, batch in enumerate([*decodes, mixed, last]):
        assert torch.equal(scorer.step(batch, padding)[0], engine.step(batch, padding)[0])
        for mine, theirs in zip(scorer.layers, engine.layers, strict=True):
            for pool in ("keys", "values", "summaries"):
                written = (getattr(page_cache(layer.kv_cache, layer.impl.served.shape), pool) for layer in (mine, theirs))
                assert torch.equal(*written), pool
    assert AppendingStages.appended == [2, 2] * 10  # of two layers
    assert updates == [2, 2] * 9 + [72, 72] * 2 + [2, 2]


@pytest.mark.parametrize(
    ("batch", "more", "mode"),
    [
        pytest.param([*DECODES, (FRESH, 0, 70)], {}, fake_vllm.GraphMode.NONE, id="a prompt behind"),
        pytest.param([(FRESH, 0, 70)], {}, fake_vllm.GraphMode.NONE, id="a prompt alone"),
        pytest.param(DECODES, {}, PIECEWISE, id="a graph that may hold the update of another batch"),
        pytest.param(
            DECODES,
            {"scheduler_config": SimpleNamespace(max_num_seqs=8, async_scheduling=False)},
            fake_vllm.GraphMode.NONE,
            id="rows that share what others of the batch decode",
        ),
    ],
)
def test_the_engine_writes_in_other_batches(
    world: Any, updates: list[int], batch: list[Any], more: dict[str, Any], mode: fake_vllm.GraphMode
) -> None:
    w = world(stages=AppendingStages, **more)
    prefilled(w)
    assert AppendingStages.appended == []
    updates.clear()
    out, at = w.step(batch, mode=mode)
    tokens = sum(new for _, _, new in batch)
    assert (updates, AppendingStages.appended) == ([tokens, tokens], [])
    if decodes := sum(new == 1 for _, _, new in batch):
        torch.testing.assert_close(out[1, :decodes], w.sparse(w.layers[1], at, decodes))


def test_a_dense_layer_beside_one_that_appends_is_written_by_the_engine(world: Any, updates: list[int]) -> None:
    w = world({"dense_layers": [0]}, stages=AppendingStages)
    prefilled(w)
    updates.clear()
    out, at = w.step(DECODES)
    assert (updates, AppendingStages.appended) == ([2], [2])
    for row in (0, 1):
        torch.testing.assert_close(out[0, row : row + 1], w.dense(w.layers[0], at, row))
    torch.testing.assert_close(out[1], w.sparse(w.layers[1], at, 2))


def test_without_metadata_nobody_appends(world: Any, updates: list[int]) -> None:
    """vLLM measures its memory so, and sets up micro-batches (refused at start) as a list."""
    w = world(stages=AppendingStages)
    layer, keys = w.layers[0], w.random(PAGE, 2, 64)
    for metadata in (None, [{}, {}]):
        with fake_vllm.forward_context(metadata):
            layer.impl.do_kv_cache_update(layer, keys, keys, layer.kv_cache, torch.arange(PAGE))
    assert updates == [PAGE, PAGE]
