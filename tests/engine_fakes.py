"""An engine that is none: its clock is a counter, its texts are made up, and it misbehaves where it is told to."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from harness.engine.cells import EngineCase
from harness.engine.host import TimedOut
from harness.engine.meter import open_meter
from harness.engine.texts import Text
from harness.engine.worker import EngineEvent, EngineJob, run
from harness.presets import find_model
from locks_kernels.shapes import SelectOptions

STEP_NS, CHUNK_NS = 1_000_000, 50_000_000
DENSE_IMPL, PLUGIN_IMPL = "vllm.v1.Attention", "locks_kernels.vllm_plugin.cpu.LocksCPUImpl"


def engine_case(ctx: int = 2048, batch: int = 1, **changes: Any) -> EngineCase:
    values: dict[str, Any] = {
        "level": "engine",
        "model": find_model("smollm2-135m"),
        "select": SelectOptions(512),
        "page_size": 32,
        "device": "cpu",
    }
    return EngineCase(ctx=ctx, batch=batch, **(values | changes))


class FakeEngine:
    """Fills each step with a chunk of prompts, first come first served, decodes beside it, and ends what has all its tokens.

    step_ns: of a decode step, by batch.  faults: "preempts" drops a sequence from some steps; "dies" raises when so many
    sequences run.
    """

    def __init__(self, blocks: int = 1000, sequences: int = 8, sparse: bool = False, selects: bool = True) -> None:
        self.blocks, self.block_size, self.max_tokens, self.chunk_tokens, self.sequences = blocks, 32, 8192, 1024, sequences
        self.sparse, self.selects = sparse, selects
        self.now_ns = 0
        self.waiting: dict[str, int] = {}
        self.running: dict[str, int] = {}  # tokens so far
        self.wanted: dict[str, int] = {}
        self.prefilled: list[str] = []
        self.cancelled: list[str] = []
        self.preempts = self.repeats_differ = self.closed = False
        self.off_nats = 0.0  # what its texts differ by from others
        self.dies_at: int | None = None
        self.flash_attention: int | None = None
        self._texts = itertools.count()
        self._steps = 0

    def clock_ns(self) -> int:
        return self.now_ns

    def submit(self, name: str, prompt: Sequence[int], tokens: int) -> None:
        assert len(prompt) + tokens <= self.max_tokens
        self.waiting[name], self.wanted[name] = len(prompt), tokens

    def step(self) -> dict[str, int]:
        self._steps += 1
        if self.dies_at is not None and len(self.running) + len(self.waiting) >= self.dies_at:
            raise RuntimeError("CUDA error: an illegal memory access was encountered")
        arrived = dict.fromkeys(self.running, 1)
        self.now_ns += CHUNK_NS if self.waiting else STEP_NS * len(self.running)
        room = self.chunk_tokens - len(self.running)
        for name, left in list(self.waiting.items()):
            self.waiting[name] -= min(left, room)
            room -= min(left, room)
            if self.waiting[name] == 0:
                del self.waiting[name]
                self.prefilled.append(name)
                arrived[name] = 1
        for name in arrived:
            self.running[name] = self.running.get(name, 0) + 1
        self.running = {name: count for name, count in self.running.items() if count < self.wanted[name]}
        if self.preempts and self._steps % 7 == 0 and len(self.running) > 1:
            arrived.popitem()
        return arrived

    def cancel(self, names: Sequence[str]) -> None:
        self.cancelled += names
        for name in names:
            self.running.pop(name, None)
            self.waiting.pop(name, None)

    def texts(self, prompts: Sequence[Sequence[int]], tokens: int) -> list[Text]:
        made = []
        for prompt in prompts:
            moved = self.off_nats + (0.01 * next(self._texts) if self.repeats_differ else 0.0)
            if self.sparse and self.selects and len(prompt) > 512:
                moved += 1.0
            first = prompt[0] % 1000
            made.append(Text(len(prompt), [first] * tokens, [[(first, -1.0 - moved), (first + 1, -2.0)]] * tokens))
        return made

    def close(self) -> None:
        assert not self.running and not self.waiting
        self.closed = True

    def describe(self) -> dict[str, Any]:
        layer = {
            "impl": PLUGIN_IMPL if self.sparse else DENSE_IMPL,
            "served": self.sparse,
            "flash_attention": self.flash_attention,
            "block_bytes": 26_624 if self.sparse else 24_576,
            "stock_block_bytes": 24_576,
        }
        return {"layers": [layer] * 30, "graphs": "NONE", "vllm": "fake", "max_tokens": self.max_tokens}


class FakeHost:
    """Runs engines in this process.  `engines`: by backend, one after the other; an exception is raised instead."""

    def __init__(self, engines: dict[str, list[FakeEngine | Exception]]) -> None:
        self.engines = engines
        self.jobs: list[EngineJob] = []
        self.logs = Path()
        self.silent = False
        self.open_meter = open_meter

    def events(self, job: EngineJob, log: Path) -> Iterator[EngineEvent]:
        self.jobs.append(job)
        self.logs = log.parent
        log.write_text("the log of a fake engine\n")
        if self.silent:
            raise TimedOut("no sign of life within 600 s")
        engine = self.engines[job.backend].pop(0)
        said: list[EngineEvent] = []

        def make(arguments: dict[str, Any]) -> FakeEngine:
            if isinstance(engine, Exception):
                raise engine
            engine.max_tokens = arguments["max_model_len"]
            return engine

        clock = (lambda: 0) if isinstance(engine, Exception) else engine.clock_ns
        run(job, said.append, make, None, clock, self.open_meter)
        yield from said
