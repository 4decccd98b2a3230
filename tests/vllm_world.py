"""An engine of two layers with vLLM faked (fake_vllm.py), and sequences to put into it."""

from __future__ import annotations

import json
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any, ClassVar

import fake_vllm
import pytest
import torch

from locks_kernels.cache import Sequences
from locks_kernels.decode import ReferenceStages
from locks_kernels.shapes import DecodeShape, SelectOptions
from locks_kernels.vllm_plugin import settings
from locks_kernels.vllm_plugin.pages import padded_bytes, page_cache

HQ, H, D, PAGE, BLOCKS, WIDTH = 4, 2, 64, 16, 64, 24
SHAPE = DecodeShape(HQ, H, D, PAGE)
BUDGET = 80


def paged(order: str = "HND") -> torch.Tensor:
    """vLLM's cache of one layer, [BLOCKS, H, PAGE, 2 D] with padded pages, of garbage."""
    dense_bytes = H * PAGE * 2 * D * 2
    stride = padded_bytes(dense_bytes, SHAPE) // 2
    storage = torch.full((BLOCKS * stride,), 7.0, dtype=torch.bfloat16)
    inner = (PAGE * 2 * D, 2 * D) if order == "HND" else (2 * D, H * 2 * D)
    return storage.as_strided((BLOCKS, H, PAGE, 2 * D), (stride, *inner, 1))


class AppendingStages(ReferenceStages):
    """Plain torch whose scorer writes the new tokens, as that of CudaStages may.  appended: rows, call by call."""

    appended: ClassVar[list[int]] = []

    def append_score(  # type: ignore[override]
        self, query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, starts_early: bool, slots: torch.Tensor
    ) -> None:
        assert not starts_early, "vLLM's kernels do not say what they still write"
        assert len(slots) == len(query) == len(keys) == len(values) == self.sequences.batch
        AppendingStages.appended.append(len(query))
        whole = self.sequences
        self.sequences = Sequences(whole.block_table, whole.seq_lens.where(slots >= 0, 0))
        self.append_finalise(keys, values)
        self.sequences = whole
        self.score(query)


class World:
    """An engine of two layers and whatever sequences a test puts into it."""

    def __init__(self, said: dict[str, Any], order: str = "HND", **more: Any) -> None:
        from locks_kernels.vllm_plugin import gpu

        self.modules = {}
        self.config = fake_vllm.engine(self.modules, **more)
        fake_vllm.CONFIG.append(self.config)
        for index in range(2):
            impl = gpu.LocksImpl(HQ, D, D**-0.5, H)
            name = f"model.layers.{index}.attn"
            self.modules[name] = SimpleNamespace(impl=impl, kv_cache=paged(order), layer_name=name)
        spec = fake_vllm.FullAttentionSpec(block_size=PAGE, num_kv_heads=H, head_size=D, dtype=torch.bfloat16)
        self.spec = gpu.LocksBackend.customize_spec(spec)
        self.builder = gpu.LocksBuilder(self.spec, list(self.modules), self.config, torch.device("cpu"))
        self.generator = torch.Generator().manual_seed(0)

    @property
    def layers(self) -> list[Any]:
        return list(self.modules.values())

    def random(self, *size: int) -> torch.Tensor:
        return torch.randn(*size, generator=self.generator).bfloat16()

    def step(
        self,
        rows: list[tuple[list[int], int, int]],
        padding: int = 0,
        mode: fake_vllm.GraphMode = fake_vllm.GraphMode.NONE,
    ) -> tuple[torch.Tensor, Any]:
        """Rows of (block ids, tokens before, new tokens): write and attend in all layers.  Outputs [layers, T, HQ, D]."""
        new = [count for _, _, count in rows]
        starts = torch.tensor([0, *new]).cumsum(0).int()
        table = torch.zeros(len(rows), WIDTH, dtype=torch.int32)
        slots = []
        for row, (blocks, before, count) in enumerate(rows):
            table[row, : len(blocks)] = torch.tensor(blocks)
            slots += [blocks[at // PAGE] * PAGE + at % PAGE for at in range(before, before + count)]
        lens = torch.tensor([before + count for _, before, count in rows], dtype=torch.int32)
        total = sum(new)
        common = fake_vllm.Common(
            starts, starts, lens, len(rows), total, max(new), int(lens.max()), table, torch.tensor(slots), lens
        )
        metadata = self.builder.build(0, common)
        outputs = []
        for layer in self.layers:
            query = self.random(total + padding, HQ + 2 * H, D)  # fused: rows of the query lie apart
            layer.query, keys, values = query.split((HQ, H, H), 1)
            out = torch.full((total + padding, HQ, D), float("nan"), dtype=torch.bfloat16)
            with fake_vllm.forward_context(dict.fromkeys(self.modules, metadata), mode):
                layer.impl.do_kv_cache_update(layer, keys, values, layer.kv_cache, common.slot_mapping)
                layer.impl.forward(layer, layer.query, keys, values, layer.kv_cache, metadata, out)
            outputs.append(out[:total])
        return torch.stack(outputs), SimpleNamespace(starts=starts.tolist(), table=table, lens=lens, metadata=metadata)

    def dense(self, layer: Any, at: Any, row: int) -> torch.Tensor:
        tokens = slice(at.starts[row], at.starts[row + 1])
        return fake_vllm.dense(layer.query[tokens], layer.kv_cache, at.table[row], int(at.lens[row]), D**-0.5)

    def sparse(self, layer: Any, at: Any, rows: int) -> torch.Tensor:
        """The reference's step for the first `rows` rows."""
        cache = page_cache(layer.kv_cache, SHAPE)
        sequences = Sequences(at.table[:rows], at.lens[:rows])
        stages = ReferenceStages(cache, sequences, SelectOptions(BUDGET))
        out = torch.empty(rows, HQ, D, dtype=torch.bfloat16)
        stages.score(layer.query[:rows])
        stages.select()
        stages.attend(layer.query[:rows], out)
        return out


@pytest.fixture
def world(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> Iterator[Any]:
    """Makes a World from settings."""
    AppendingStages.appended.clear()

    def make(said: dict[str, Any] | None = None, stages: type[ReferenceStages] = ReferenceStages, **more: Any) -> World:
        monkeypatch.setenv(settings.VARIABLE, json.dumps({"budget": BUDGET, **(said or {})}))
        settings.current.cache_clear()
        from locks_kernels.vllm_plugin import gpu

        monkeypatch.setattr(gpu, "choose", lambda *given: ("reference", stages))
        return World(said or {}, **more)

    with fake_vllm.installed(fake_vllm.Registry()):
        yield make
    settings.current.cache_clear()
    fake_vllm.CONFIG.clear()


LONG, SHORT, FRESH = list(range(1, 13)), list(range(20, 24)), list(range(30, 36))


def prefilled(w: World) -> None:
    """190 tokens on LONG in two chunks, and 40 on SHORT."""
    w.step([(LONG, 0, 100)])
    w.step([(LONG, 100, 90), (SHORT, 0, 40)])
