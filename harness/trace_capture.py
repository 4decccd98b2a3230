"""One prompt through a model: keys, values, the queries of the answer's steps, and what special methods ask for."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from harness.errors import UserError
from harness.haystack import Haystack
from harness.prompts import SUITE, Prompt
from harness.trace_model import TraceModel, recording
from harness.traces import Trace

OBSERVED = 32  # last prompt queries that are kept
MOST_STEPS = 16  # of one sample, evenly spread over the answer
CALIBRATION_TOKENS = 2048
KVZIP_CHUNK = 2000
KVZIP_REQUEST = "\n\nRepeat the previous text word by word.\n"
QUERY_BLOCK = 256


@dataclass(frozen=True)
class Tokens:
    """A prompt with its answer as tokens.

    steps  (position, answer): the token at `position` is fed, and the next one belongs to the answer
    first  the first token behind the answer's given beginning
    """

    ids: list[int]
    prompt: int
    context: int
    system: int
    carriers: list[list[int]]
    steps: list[tuple[int, int]]
    first: int


def tokenise(model: TraceModel, prompt: Prompt) -> Tokens:
    """Prompt in the model's chat format, then the answer.  Spans are followed from characters to tokens."""
    user = prompt.context + prompt.question
    if getattr(model.tokenizer, "chat_template", None):
        message = [{"role": "user", "content": user}]
        text = model.tokenizer.apply_chat_template(message, tokenize=False, add_generation_prompt=True)
    else:
        text = user + "\n"
    start = text.find(prompt.context[:200])
    if start < 0:
        raise UserError("the chat template changes the user's text; carriers cannot be followed through it")
    asked = _encode(model, text)
    answered = _encode(model, prompt.response)
    count = len(asked["input_ids"])
    carriers = [_covering(asked["offset_mapping"], start + a, start + b) for a, b in prompt.carriers]
    system = _covering(asked["offset_mapping"], start, start + 1)[0]
    context = _covering(asked["offset_mapping"], start + len(prompt.context), start + len(prompt.context) + 1)[0]
    steps, at = [], len(prompt.opening)
    for index, answer in enumerate(prompt.answers):
        inside = _covering(answered["offset_mapping"], at, at + len(answer))
        first = [inside[0] - 2] if index == 0 and inside[0] >= 2 else []  # and the step just before
        steps += [(count + token, index) for token in (*first, *(token - 1 for token in inside)) if token >= 0]
        at += len(answer) + len(", ")
    if len(steps) > MOST_STEPS:
        steps = [steps[i * (len(steps) - 1) // (MOST_STEPS - 1)] for i in range(MOST_STEPS)]
    begin = count + _covering(answered["offset_mapping"], len(prompt.opening), len(prompt.opening) + 1)[0]
    return Tokens(asked["input_ids"] + answered["input_ids"], count, context, system, carriers, steps, begin)


def source_of(model: TraceModel, prompt: Prompt, tokens: int, haystack: Haystack, kvzip: bool) -> dict[str, Any]:
    """What makes a trace the same one again, as plain data."""
    return {
        "model": model.name,
        "fingerprint": model.fingerprint,
        "suite": SUITE,
        "haystack": haystack.record(),
        "task": prompt.task,
        "seed": prompt.seed,
        "ctx": tokens,
        "depth": prompt.depth,
        "kvzip": kvzip,
        "most_steps": MOST_STEPS,
    }


@torch.no_grad()
def capture(model: TraceModel, prompt: Prompt, source: dict[str, Any], shared_basis: torch.Tensor | None) -> Trace:
    """One pass over prompt and answer, and with source["kvzip"] one more over the context."""
    tokens = tokenise(model, prompt)
    keys: dict[int, torch.Tensor] = {}
    values: dict[int, torch.Tensor] = {}
    queries: dict[int, torch.Tensor] = {}
    observed: dict[int, torch.Tensor] = {}
    positions = torch.tensor([position for position, _ in tokens.steps])

    def hook(layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> None:
        keys[layer], values[layer] = key.bfloat16(), value.bfloat16()
        queries[layer] = query[:, positions].transpose(0, 1).float().clone()
        observed[layer] = query[:, tokens.prompt - OBSERVED : tokens.prompt].float().clone()

    turns: list[tuple[torch.Tensor, torch.Tensor]] = []
    rotary = model.model.model.rotary_emb.register_forward_hook(lambda module, inputs, output: turns.append(output))
    keep_logits = len(tokens.ids) - tokens.prompt + 1
    try:
        with recording(hook):
            result = model.model(torch.tensor([tokens.ids]), logits_to_keep=keep_logits, use_cache=bool(source["kvzip"]))
    finally:
        rotary.remove()
    said = result.logits[0].argmax(-1)  # of the last prompt token and of the answer's
    wanted = [(position, tokens.ids[position + 1]) for position, _ in tokens.steps]
    agrees = sum(int(said[position - tokens.prompt + 1]) == token for position, token in wanted) / len(wanted)
    importance = importances(model, tokens, result.past_key_values) if source["kvzip"] else None
    cos, sin = rotation(model, turns[0])

    def stacked(parts: dict[int, torch.Tensor]) -> torch.Tensor:
        return torch.stack([parts[index] for index in sorted(parts)])

    return Trace(
        source=source,
        keys=stacked(keys),
        values=stacked(values),
        queries=stacked(queries),
        positions=positions,
        answers=torch.tensor([answer for _, answer in tokens.steps]),
        prompt=tokens.prompt,
        context=tokens.context,
        system=tokens.system,
        carriers=tokens.carriers,
        observed=stacked(observed),
        cos=cos,
        sin=sin,
        interleaved=model.interleaved,
        agrees=agrees,
        importance=importance,
        shared_basis=shared_basis,
    )


def rotation(model: TraceModel, turn: tuple[torch.Tensor, torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
    """cos, sin fp32 [N, width] from what the model's rotary embedding returned, in the layout of its family."""
    cos, sin = (part[0].float() for part in turn)
    if model.interleaved:
        cos, sin = (part[:, : part.shape[1] // 2].repeat_interleave(2, -1) for part in (cos, sin))
    return cos, sin


@torch.no_grad()
def calibrate(model: TraceModel, haystack: Haystack) -> torch.Tensor:
    """Principal axes of the keys of the haystack's calibration part, fp32 [layers, H, D, D]."""
    from locks_kernels.selectors.shared import principal_axes

    ids = _encode(model, haystack.calibration)["input_ids"][:CALIBRATION_TOKENS]
    axes: dict[int, torch.Tensor] = {}
    with recording(lambda layer, query, key, value: axes.update({layer: principal_axes(key.float())})):
        model.model(torch.tensor([ids]), logits_to_keep=1, use_cache=False)
    return torch.stack([axes[index] for index in sorted(axes)])


def importances(model: TraceModel, tokens: Tokens, cache: Any) -> torch.Tensor:
    """KVzip's score [layers, H, N]: the largest attention that a token of the context gets while the model repeats it.

    Every chunk of the context is repeated behind all of it; a query's softmax is over the system part, the chunk and the
    repetition so far.  fp32.
    """
    request = _encode(model, KVZIP_REQUEST)["input_ids"]
    scores: dict[int, torch.Tensor] = {}

    for start in range(tokens.system, tokens.context, KVZIP_CHUNK):
        end = min(start + KVZIP_CHUNK, tokens.context)
        lead = tokens.ids[max(tokens.system, start - 8) : start]
        repeated = request + lead + tokens.ids[start:end]

        def hook(
            layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, at: int = start, to: int = end
        ) -> None:
            heads, everything, dim = key.shape
            new = query.shape[1]
            seen = torch.cat((key[:, : tokens.system], key[:, at:to], key[:, everything - new :]), 1)
            best = scores.setdefault(layer, torch.zeros(heads, len(tokens.ids)))
            grouped = query.unflatten(0, (heads, -1)) * dim**-0.5
            for first in range(0, new, QUERY_BLOCK):
                block = grouped[:, :, first : first + QUERY_BLOCK]
                logits = torch.einsum("hgtd,hnd->hgtn", block, seen)
                ahead = torch.arange(new) > (first + torch.arange(block.shape[2]))[:, None]
                logits[..., -new:].masked_fill_(ahead, float("-inf"))
                share = logits.softmax(-1)[..., tokens.system : tokens.system + to - at].amax((1, 2))
                best[:, at:to] = torch.maximum(best[:, at:to], share)

        if (behind := cache.get_seq_length() - tokens.context) > 0:
            cache.crop(-behind)
        with recording(hook):
            model.model(torch.tensor([repeated]), past_key_values=cache, logits_to_keep=1, use_cache=True)
    return torch.stack([scores[index] for index in sorted(scores)])


def _encode(model: TraceModel, text: str) -> Any:
    return model.tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)


def _covering(offsets: list[tuple[int, int]], start: int, end: int) -> list[int]:
    """Tokens that share a character with [start, end)."""
    return [index for index, (a, b) in enumerate(offsets) if a < end and b > start]
