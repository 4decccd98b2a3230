"""What one engine must show before its time is taken: the same text twice, the texts of another engine, and who attends."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from harness.engine.driver import Engine
from harness.engine.texts import Text, compare, furthest

PLUGIN = "locks_kernels.vllm_plugin."
SHORT_TOKENS = 512
SHORT_PROMPTS = 4
NEW_TOKENS = 16
LONG_BUDGETS = 4  # the long prompt in budgets: its selection leaves most pages out


@dataclass(frozen=True)
class Gate:
    """What was found, as plain data for a record; reason: why no time is taken, or None.  texts: for the next engine."""

    reason: str | None
    record: dict[str, Any]
    texts: list[Text]


def prompt_lengths(budget: int, ctx: int) -> list[int]:
    """Prompts of the gate: short ones, of which a sparse method with this budget keeps everything while it answers, and a long
    one, of which it leaves most out.  Without a long one where the longest context has no room for it.
    """
    short = max(1, min(SHORT_TOKENS, budget - NEW_TOKENS, ctx - NEW_TOKENS))
    long = min(LONG_BUDGETS * budget, ctx - NEW_TOKENS)
    return [short] * SHORT_PROMPTS + ([long] if long > budget else [])


def check(
    engine: Engine,
    layers: Sequence[dict[str, Any]],
    sparse: bool,
    reference: Sequence[Text] | None,
    lengths: Sequence[int],
    make_prompt: Callable[[int, int], list[int]],
    tolerance: float,
) -> Gate:
    """Texts of the prompts, long ones last, compared with those of a dense engine.

    A dense backend must agree on all of them.  A sparse one must agree on the short ones, where its budget holds everything,
    and must not on the long one, to the last bit: then its selection did nothing, and dense times would stand in its row.
    reference: None for the first dense engine of a set-up.  tolerance: in nats, what may be rounding.
    """
    prompts = [make_prompt(number, length) for number, length in enumerate(lengths)]
    short, long = prompts[:SHORT_PROMPTS], prompts[SHORT_PROMPTS:]
    alone = engine.texts(prompts[-1:], NEW_TOKENS)  # beside others its last bits depend on who shares its steps
    texts = engine.texts(short, NEW_TOKENS) + (alone if long else [])
    served = sum(bool(layer.get("served")) and layer["impl"].startswith(PLUGIN) for layer in layers)
    checks: dict[str, Any] = {
        "same text twice": alone == engine.texts(prompts[-1:], NEW_TOKENS),
        "all log-probabilities finite": all(
            math.isfinite(value) for text in texts for place in text.likely for _, value in place
        ),
        "layers served by the plugin": served,
    }
    found: dict[str, Any] = {"tolerance_nats": tolerance, "checks": checks}
    reason = None
    if not checks["same text twice"]:
        reason = "the same prompt gave another text the second time"
    elif not checks["all log-probabilities finite"]:
        reason = "log-probabilities are not finite"
    elif sparse and not served:
        reason = "no attention layer is served by the plugin: the engine fell back to its own attention"
    elif not sparse and served:
        reason = "the plugin serves layers of an engine that was asked for its own attention"
    elif reference is not None:
        reason = _against(texts, reference, sparse, found)
    if not sparse:
        found["texts"] = [asdict(text) for text in texts]
    return Gate(reason, found, texts)


def _against(texts: Sequence[Text], reference: Sequence[Text], sparse: bool, found: dict[str, Any]) -> str | None:
    alike = len(texts) if not sparse else SHORT_PROMPTS
    difference = furthest(texts[:alike], reference[:alike])
    found["error_nats"], found["positions"] = difference.nats, difference.positions
    if not difference.within(found["tolerance_nats"]):
        by = "at a token that is not among its likeliest" if difference.nats is None else f"by {difference.nats:.2f} nats"
        within = " although the budget holds the whole prompt" if sparse else ""
        return f"its text differs from the dense engine's {by}{within}; at most {found['tolerance_nats']} nats are rounding"
    if sparse and len(texts) > SHORT_PROMPTS:
        far = compare(texts[-1], reference[-1])
        found["checks"]["selection changes a long text"] = far.nats != 0
        found["selection_nats"] = far.nats
        if far.nats == 0:
            return "a prompt above the budget gave the dense engine's text to the last bit: nothing was selected"
    return None
