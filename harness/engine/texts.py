"""The gate of level `engine`: greedy texts of one engine beside those of another.  Plain data; imports nothing heavy.

Two right backends differ in the last bits, so their texts part sooner or later where two tokens are equally likely.  Compared
are therefore log-probabilities of the likeliest tokens for as long as the texts agree, and where they part it must be at a
near tie.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

TOP = 10  # likeliest tokens of each position that are kept: six may lie within 0.2 nats
# Nats between two right backends in bfloat16, in 32 layers of the loader's random weights, whose logits have a deviation of 1.
# Texts of 16 prompts of 512 tokens, on an H200: FlashAttention 3 and FlashInfer or Triton attention differ by up to 0.25, the
# same compiled and eager by 0.38.  Where both prefill with the same kernels, FlashAttention 3 and LOCKS with all pages, it is
# 0.13, and with the least heavy of 33 pages left out at least 0.31 in every four texts.
TOLERANCE = 0.4
SAME_PREFILL_TOLERANCE = 0.2
TRAINED_TOLERANCE = 0.6  # whose logits reach 20 and more, where bfloat16 itself has steps of 0.125


@dataclass(frozen=True)
class Text:
    """tokens: as decoded.  likely: by position, [token, log-probability] of the TOP likeliest."""

    prompt_tokens: int
    tokens: list[int]
    likely: list[list[tuple[int, float]]]

    @classmethod
    def of(cls, data: dict[str, Any]) -> Text:
        """From parsed JSON."""
        likely = [[(int(token), float(value)) for token, value in place] for place in data["likely"]]
        return cls(int(data["prompt_tokens"]), list(data["tokens"]), likely)


@dataclass(frozen=True)
class Reference:
    """Texts of the dense backend that others are compared with."""

    backend: str
    texts: list[Text]


@dataclass(frozen=True)
class Difference:
    """nats: largest difference of a log-probability, or of the tie at which the texts parted; None if a token that one text
    took is not among the likeliest of the other.  positions: compared before that.
    """

    nats: float | None
    positions: int

    def within(self, tolerance: float) -> bool:
        """Whether it may be rounding."""
        return self.nats is not None and self.nats <= tolerance


def compare(text: Text, reference: Text) -> Difference:
    """How far one text is from another of the same prompt."""
    worst = 0.0
    for place, (token, other) in enumerate(zip(text.tokens, reference.tokens, strict=True)):
        ours, theirs = dict(text.likely[place]), dict(reference.likely[place])
        worst = max([worst, *(abs(ours[one] - theirs[one]) for one in ours.keys() & theirs.keys())])
        if token != other:
            if token not in theirs or other not in ours:
                return Difference(None, place + 1)
            return Difference(max(worst, theirs[other] - theirs[token], ours[token] - ours[other]), place + 1)
    return Difference(worst, len(text.tokens))


def furthest(texts: Sequence[Text], references: Sequence[Text]) -> Difference:
    """The largest difference of several texts."""
    found = [compare(text, reference) for text, reference in zip(texts, references, strict=True)]
    return max(found, key=lambda one: float("inf") if one.nats is None else one.nats)
