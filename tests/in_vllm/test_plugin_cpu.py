"""The whole plugin serving a real model, on vLLM's CPU build: `./locks test-vllm`.

SmolLM2-135M (9 query heads, 3 KV heads, head_dim 64) in float32, so that two ways to compute the same attention do not part at
the rounding of bfloat16.  Pages of 32 tokens; each engine is a process of its own.
"""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("vllm", reason="vLLM is not installed: ./locks test-vllm")
if torch.cuda.is_available():
    pytest.skip("for vLLM's CPU build; test_plugin_gpu.py is for GPUs", allow_module_level=True)

import served

from harness.haystack import Haystack
from harness.prompts import fill

pytestmark = pytest.mark.timeout(3600)
PAGE, LAYERS = 32, 30
PAGE_BYTES, DENSE_BYTES = 51328, 49152  # one layer's, with summaries and without; float32
COMMON: dict[str, Any] = {
    "dtype": "float32",
    "block_size": PAGE,
    "enforce_eager": True,
    "max_num_batched_tokens": 1024,
    "seed": 0,
}


class Bench:
    """Runs engines on the model; the same engine is run once."""

    def __init__(self, model: Path, folder: Path) -> None:
        from transformers import AutoTokenizer

        self.model, self.folder = model, folder
        self.tokenizer = AutoTokenizer.from_pretrained(model)
        self.run = functools.cache(self._run)

    def _run(self, rounds: str, settings: str | None, blocks: int, longest: int, watch: bool = False, **args: Any) -> Any:
        """rounds  name of a method here; blocks, longest: of the cache, and tokens of the longest sequence"""
        memory = blocks * LAYERS * (DENSE_BYTES if settings is None else PAGE_BYTES)
        limits = {"kv_cache_memory_bytes": memory, "max_model_len": longest}
        out = self.folder / "out.json"
        return served.result(self.model, getattr(self, rounds)(), out, settings, watch=watch, **{**COMMON, **limits, **args})

    @functools.cached_property
    def text(self) -> list[int]:
        return self.tokenizer(Haystack.builtin().text)["input_ids"]

    def excerpts(self, *lengths: int, first: int = 0) -> list[list[int]]:
        return [self.text[(first + i) * 3000 :][:length] for i, length in enumerate(lengths)]

    def eight(self) -> list[dict[str, Any]]:
        return [{"prompts": self.excerpts(40, 150, 310, 500, 700, 1000, 1300, 1601), "tokens": 64}]

    def twice(self) -> list[dict[str, Any]]:
        one = {"prompts": self.excerpts(1000, 500, first=8), "tokens": 40}
        return [one, one]

    def crowd(self) -> list[dict[str, Any]]:
        return [{"prompts": self.excerpts(300, 290, 280, 270, first=10), "tokens": 100}]

    def after_others(self) -> list[dict[str, Any]]:
        return [{"prompts": self.excerpts(510, 500, 490, first=14), "tokens": 40}, *self.alone()]

    def alone(self) -> list[dict[str, Any]]:
        return [{"prompts": self.excerpts(480, 550, first=17), "tokens": 64}]

    @functools.cached_property
    def needles(self) -> list[tuple[list[int], str]]:
        """Prompts of up to 4096 tokens that end where the answer begins, and the answers: seven digits, a token each."""

        def ids(prompt: Any) -> list[int]:
            message = [{"role": "user", "content": prompt.context + prompt.question}]
            text = self.tokenizer.apply_chat_template(message, tokenize=False, add_generation_prompt=True)
            return self.tokenizer(text + prompt.opening, add_special_tokens=False)["input_ids"]

        haystack = Haystack.builtin()  # niah_single_1: the one that so small a model reads out with its own attention
        prompts = [fill("niah_single_1", seed, haystack, lambda prompt: len(ids(prompt)) <= 4096) for seed in range(8)]
        return [(ids(prompt), prompt.answers[0]) for prompt in prompts]

    def searches(self) -> list[dict[str, Any]]:
        return [{"prompts": [ids for ids, _ in self.needles], "tokens": 7}]

    def found(self, settings: str | None) -> list[bool]:
        """Which needles an engine reads out."""
        said = self.run("searches", settings, blocks=300, longest=4160)["rounds"][0]["tokens"]
        answers = [answer for _, answer in self.needles]
        return [answer in self.tokenizer.decode(tokens) for tokens, answer in zip(said, answers, strict=True)]


@pytest.fixture(scope="module")
def bench(smollm2: Path, tmp_path_factory: pytest.TempPathFactory) -> Bench:
    return Bench(smollm2, tmp_path_factory.mktemp("engines"))


def test_a_budget_of_the_context_says_what_the_engine_says(bench: Bench) -> None:
    """64 tokens after each of 8 prompts, all served at once: mixed batches, chunked prefill."""
    stock = bench.run("eight", None, blocks=220, longest=1696)
    whole = bench.run("eight", '{"budget": 1696}', blocks=220, longest=1696)
    assert whole["rounds"][0]["tokens"] == stock["rounds"][0]["tokens"]
    assert f"LOCKS decodes in {LAYERS} of {LAYERS} layers" in whole["log"]
    assert (whole["cache_stride"], stock["cache_stride"]) == (PAGE_BYTES, DENSE_BYTES)


def test_not_asked_for_is_stock(bench: Bench) -> None:
    """With the plugin's package installed and without it: the same text from the same cache, and not a word."""
    stock = bench.run("eight", None, blocks=220, longest=1696)
    without = served.result(
        bench.model,
        bench.eight(),
        bench.folder / "without.json",
        environment={"VLLM_PLUGINS": ""},
        **{**COMMON, "kv_cache_memory_bytes": 220 * LAYERS * DENSE_BYTES, "max_model_len": 1696},
    )
    assert stock["rounds"][0]["tokens"] == without["rounds"][0]["tokens"]
    assert stock["cache_stride"] == without["cache_stride"]
    assert "LOCKS" not in stock["log"]


def test_needles_are_found_as_often_as_with_exact_scores(bench: Bench) -> None:
    """8 pages of 128: what rank 8 summaries rank against what the keys themselves rank."""
    locks, oracle, dense = (bench.found(s) for s in ('{"budget": 256}', '{"budget": 256, "selector": "oracle"}', None))
    print(f"found of {len(locks)}: LOCKS {sum(locks)}, oracle {sum(oracle)}, dense {sum(dense)}")
    assert sum(locks) >= sum(oracle) > 0


def test_the_prefix_cache_says_the_same_again(bench: Bench) -> None:
    cached = bench.run("twice", '{"budget": 256}', blocks=120, longest=1056)
    first, second = cached["rounds"]
    assert first["cached"] == [0, 0] and second["cached"] == [992, 480]
    assert first["tokens"] == second["tokens"]


def test_preemption_says_the_same(bench: Bench) -> None:
    """With a budget of the context: what a preempted request has generated is computed again as a prompt, hence densely."""
    roomy = bench.run("crowd", '{"budget": 512}', blocks=100, longest=512, watch=True)
    tight = bench.run("crowd", '{"budget": 512}', blocks=42, longest=512, watch=True)
    assert roomy["rounds"][0]["preemptions"] == 0 < tight["rounds"][0]["preemptions"]
    assert roomy["rounds"][0]["tokens"] == tight["rounds"][0]["tokens"]
    assert tight["complete_pages"] > 30 and tight["summary_error"] < 1e-5


def test_summaries_follow_blocks_that_are_used_again(bench: Bench) -> None:
    """A small budget in a cache that other prompts have filled says what it says in a fresh one."""
    used = bench.run("after_others", '{"budget": 128}', blocks=52, longest=640, watch=True)
    fresh = bench.run("alone", '{"budget": 128}', blocks=52, longest=640, watch=True)
    assert used["rounds"][1]["tokens"] == fresh["rounds"][0]["tokens"]
    assert used["complete_pages"] > fresh["complete_pages"] > 30
    assert max(used["summary_error"], fresh["summary_error"]) < 1e-5


def test_tensor_parallel_says_the_same(bench: Bench) -> None:
    """Three processes with a KV head each.  (Two stages of a pipeline: vLLM's CPU build 0.32.0 dies of them by itself.)"""
    alone = bench.run("alone", '{"budget": 128}', blocks=52, longest=640, watch=True)
    divided = served.result(
        bench.model,
        bench.alone(),
        bench.folder / "divided.json",
        '{"budget": 128}',
        watch=True,
        environment={"VLLM_CPU_OMP_THREADS_BIND": "0|0|0"},  # also where cores are fewer than processes
        tensor_parallel_size=3,
        **{**COMMON, "kv_cache_memory_bytes": 52 * LAYERS * PAGE_BYTES, "max_model_len": 640},
    )
    assert divided["rounds"][0]["tokens"] == alone["rounds"][0]["tokens"]
    assert divided["complete_pages"] == alone["complete_pages"] and divided["summary_error"] < 1e-5


@pytest.mark.parametrize(
    ("settings", "args", "words"),
    [
        ("{}", {"block_size": 128}, "LOCKS does not support blocks of 128 tokens (use --block-size 32 or 64)"),
        ("{}", {"kv_cache_dtype": "fp8", "dtype": "bfloat16"}, "LOCKS does not support a fp8 cache"),
        ("{}", {"hf_overrides": {"head_dim": 96}}, "LOCKS does not support this model (head_dim 96 is not supported"),
        ('{"budget": 64}', {}, "LOCKS_VLLM: budget of 64 tokens is 2 pages of 32; at least 3 pages"),
        ('{"dense_layers": [30]}', {}, "LOCKS_VLLM: dense_layers has 30, but the model has layers 0 to 29"),
        ('{"bugdet": 64}', {}, "LOCKS_VLLM has no 'bugdet'; it knows budget"),
    ],
)
def test_refused_at_start(bench: Bench, settings: str, args: dict[str, Any], words: str) -> None:
    limits = {"max_model_len": 640, "kv_cache_memory_bytes": 64 << 20}
    done = served.run(bench.model, bench.alone(), bench.folder / "refused.json", settings, **{**COMMON, **limits, **args})
    assert done.returncode != 0
    assert words in done.stdout + done.stderr


def test_dense_where_unsupported_if_told_so(bench: Bench) -> None:
    args = {**COMMON, "block_size": 128, "max_model_len": 640, "kv_cache_memory_bytes": 20 * 4 * LAYERS * DENSE_BYTES}
    out = bench.folder / "dense.json"
    stock = served.result(bench.model, bench.alone(), out, None, **args)
    dense = served.result(bench.model, bench.alone(), out, '{"unsupported": "dense"}', **args)
    assert dense["rounds"][0]["tokens"] == stock["rounds"][0]["tokens"] and dense["cache_stride"] == stock["cache_stride"]
    assert "LOCKS does not support blocks of 128 tokens" in dense["log"]
