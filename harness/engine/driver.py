"""An unmodified vLLM behind the few calls that the engine level makes.  Imports vLLM only when an engine is started."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any, Protocol

from harness.engine.texts import TOP, Text

ENVIRONMENT = {  # unless the user says otherwise
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_USE_FLASHINFER_SAMPLER": "0",  # greedy decoding needs no sampler, and building one takes a compiler
}


SHUTDOWN_SECONDS = 15.0


class Engine(Protocol):
    """blocks, block_size: of the KV cache as the engine reports them."""

    blocks: int
    block_size: int
    max_tokens: int  # of a sequence
    chunk_tokens: int  # of one step, prompts included
    sequences: int  # at once, at most

    def submit(self, name: str, prompt: Sequence[int], tokens: int) -> None:
        """Queue a greedy request of exactly `tokens` output tokens."""
        ...

    def step(self) -> dict[str, int]:
        """Wait for the next step of the engine; the number of new tokens by request."""
        ...

    def cancel(self, names: Sequence[str]) -> None: ...

    def texts(self, prompts: Sequence[Sequence[int]], tokens: int) -> list[Text]:
        """Greedy texts of several prompts at once."""
        ...

    def close(self) -> None:
        """End the engine's processes."""
        ...

    def describe(self) -> dict[str, Any]:
        """What really runs: versions, classes of the attention layers, bytes of a block, mode of the CUDA graphs."""
        ...


class VllmEngine:
    """`vllm.LLM` with its default engine process, stepped from here."""

    def __init__(self, arguments: dict[str, Any]) -> None:
        """arguments: of vllm.LLM.  The environment variables must be set by now."""
        for name, value in ENVIRONMENT.items():
            os.environ.setdefault(name, value)
        import vllm

        self._vllm = vllm
        self._llm = vllm.LLM(worker_extension_cls="harness.engine.inside.EngineExtension", **arguments)
        self._engine: Any = self._llm.llm_engine
        config = self._engine.vllm_config
        self.blocks, self.block_size = int(config.cache_config.num_gpu_blocks), int(config.cache_config.block_size)
        self.max_tokens = int(config.model_config.max_model_len)
        self.chunk_tokens = int(config.scheduler_config.max_num_batched_tokens)
        self.sequences = int(config.scheduler_config.max_num_seqs)

    def submit(self, name: str, prompt: Sequence[int], tokens: int) -> None:
        self._engine.add_request(name, {"prompt_token_ids": list(prompt)}, self._greedy(tokens))

    def step(self) -> dict[str, int]:
        return {output.request_id: len(output.outputs[0].token_ids) for output in self._engine.step()}

    def cancel(self, names: Sequence[str]) -> None:
        self._engine.abort_request(list(names))

    def texts(self, prompts: Sequence[Sequence[int]], tokens: int) -> list[Text]:
        greedy = self._vllm.SamplingParams(temperature=0.0, max_tokens=tokens, ignore_eos=True, detokenize=False, logprobs=TOP)
        found = self._llm.generate([{"prompt_token_ids": list(prompt)} for prompt in prompts], greedy, use_tqdm=False)
        return [_text(output) for output in found]

    def close(self) -> None:
        self._engine.engine_core.shutdown(timeout=SHUTDOWN_SECONDS)

    def describe(self) -> dict[str, Any]:
        layers = self._ask("locks_bench_layers")
        return {
            "vllm": self._vllm.__version__,
            "layers": layers,
            "graphs": self._ask("locks_bench_graphs"),
            "chunk_tokens": self.chunk_tokens,
            "max_tokens": self.max_tokens,
            "async_scheduling": bool(self._engine.vllm_config.scheduler_config.async_scheduling),
        }

    def _ask(self, method: str) -> Any:
        return self._llm.collective_rpc(method)[0]

    def _greedy(self, tokens: int) -> Any:
        from vllm.sampling_params import RequestOutputKind

        return self._vllm.SamplingParams(
            temperature=0.0, max_tokens=tokens, ignore_eos=True, detokenize=False, output_kind=RequestOutputKind.DELTA
        )


def _text(output: Any) -> Text:
    done = output.outputs[0]
    likely = [
        sorted(((int(token), float(entry.logprob)) for token, entry in place.items()), key=lambda pair: (-pair[1], pair[0]))[
            :TOP
        ]
        for place in done.logprobs
    ]
    return Text(len(output.prompt_token_ids), list(done.token_ids), likely)
