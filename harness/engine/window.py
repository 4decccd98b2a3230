"""Time per output token: from the steps of one engine that decodes a full batch.  Knows no engine by name.

Time per output token is the slope between two output lengths of the same prompt.  Two runs would pay for the prompt twice and
subtract two times of which it is the larger part; here one run is long enough, and the slope is taken between the moments at
which two of its tokens arrive, everything else being the same by construction.  It is taken only while every sequence of the
batch decodes: each step then gives each sequence one token, which is checked, and the engine works as ahead of the reader as
it does when it serves.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from harness.engine.driver import Engine

NULL_BLOCKS = 1  # vLLM's block 0 is nobody's
MOST_SEQUENCES = 512  # of a batch that is to fill the cache: the largest that vLLM captures by default
FILLING_STEPS = 1024  # that filling the cache takes at most, as long as nobody knows how large it is
SPARE_STEPS = 64  # the engine works ahead of its client, also while that hands over prompts


@dataclass(frozen=True)
class Window:
    """Tokens per sequence: `warm` untimed ones, then `rounds` rounds of `round_tokens`.  A round fills as many pages in every
    window, so that what a method does per page is in it.
    """

    warm: int
    rounds: int
    round_tokens: int

    @property
    def tokens(self) -> int:
        return 1 + self.warm + self.rounds * self.round_tokens


@dataclass(frozen=True)
class Timed:
    """rounds_ns: per token, one value per round.  ttft_ns: of the sequence that an idle engine began with; first_context,
    last_context: of the newest sequences while they were timed; longest_context: of the oldest.
    """

    batch: int
    rounds_ns: list[list[float]]
    ttft_ns: float
    first_context: int
    last_context: int
    longest_context: int


class DoesNotFit(Exception):
    """The KV cache or the longest sequence of the engine is too small for a batch."""


class Uneven(Exception):
    """A step did not give every sequence its token: the engine preempted one, or ended it early."""


def prompt(seed: int, ctx: int, number: int, length: int, vocabulary: int) -> list[int]:
    """Random token ids, the same for every backend."""
    return random.Random(f"{seed}/{ctx}/{number}").choices(range(min(2, vocabulary - 1), vocabulary), k=length)


def slack_tokens(window: Window, batches: Sequence[int | None], ctx: int, chunk: int, capacity: int | None = None) -> int:
    """By how much the oldest sequence of a ladder outgrows `ctx`: it decodes while others are prefilled and timed.

    chunk: tokens of one step, prompts and decoded ones; capacity: of the engine's cache, None before it is known.
    """
    most = max((batch for batch in batches if batch is not None), default=1)
    fills = None in batches
    room = max(chunk - (MOST_SEQUENCES if fills else most), chunk // 2, 1)  # beside the sequences that decode
    steps = math.ceil(most * ctx / room) + SPARE_STEPS if most > 1 or fills else 0
    if fills:
        steps = max(steps, FILLING_STEPS if capacity is None else math.ceil(capacity / room) + SPARE_STEPS)
    return (len(batches) - 1) * (window.tokens + 1) + steps


def largest_batch(engine: Engine, tokens: int, most: int) -> int:
    """Sequences of `tokens` that the engine holds at once, `most` at most."""
    return min((engine.blocks - NULL_BLOCKS) // math.ceil(tokens / engine.block_size), engine.sequences, most)


class Ladder:
    """Batches of one context, growing: sequences that decode already go on, so that each is prefilled once."""

    def __init__(
        self,
        engine: Engine,
        ctx: int,
        window: Window,
        slack: int,
        make_prompt: Callable[[int, int], list[int]],
        clock_ns: Callable[[], int],
        most: int,
        on_round: Callable[[], None] = lambda: None,
    ) -> None:
        """slack: see slack_tokens.  make_prompt: of a sequence's number and length.  most: of the batches to come; the prompts
        of those that fit are made now, since the engine would decode on while a later one is made.  on_round: at the end of
        each round, while the engine goes on; what it costs is in the next round if the engine has to wait for it."""
        self.engine, self.ctx, self.window, self.clock_ns, self.on_round = engine, ctx, window, clock_ns, on_round
        self._total = window.tokens + slack
        self._length = ctx - window.tokens - max(0, ctx + slack - engine.max_tokens)
        self._got: dict[str, int] = {}
        self._ttft_ns: float | None = None
        if self._length < 1:
            raise DoesNotFit(
                f"a context of {ctx} tokens is shorter than the {window.tokens} that are timed; use a longer --ctx"
            )
        fits = largest_batch(engine, self._length + self._total, most)
        self._prompts = [make_prompt(number, self._length) for number in range(fits)]

    def measure(self, batch: int) -> Timed:
        """At a batch that is no smaller than the one before."""
        fits = largest_batch(self.engine, self._length + self._total, batch)
        if fits < batch:
            raise DoesNotFit(
                f"{batch} sequences of {self._length + self._total:,} tokens do not fit in an engine with a cache of "
                f"{(self.engine.blocks - NULL_BLOCKS) * self.engine.block_size:,} tokens for {self.engine.sequences} "
                f"sequences; at most {fits} do"
            )
        self._fill(batch)
        newest = list(self._got)[-1]
        while self._got[newest] <= self.window.warm:
            self._advance()
        first = self._length + self._got[newest]
        rounds, before = [], self.clock_ns()
        for _ in range(self.window.rounds):
            for _ in range(self.window.round_tokens):
                self._even_step()
            now = self.clock_ns()
            rounds.append([(now - before) / self.window.round_tokens])
            before = now
            self.on_round()
        last, longest = self._length + self._got[newest], self._length + max(self._got.values())
        assert self._ttft_ns is not None
        return Timed(batch, rounds, self._ttft_ns, first, last, longest)

    def close(self) -> None:
        """Let all sequences go."""
        self.engine.cancel(list(self._got))
        self._got.clear()

    def _fill(self, batch: int) -> None:
        """Add sequences up to `batch` and wait until all of them have a token."""
        idle = not self._got
        prompts = self._prompts[len(self._got) : batch]
        if idle:  # its prompt alone is what its first token waits for
            start = self.clock_ns()
            self._submit(prompts.pop(0))
            while not all(self._got.values()):
                self._advance()
            self._ttft_ns = float(self.clock_ns() - start)
        for content in prompts:
            self._submit(content)
        while not all(self._got.values()):
            self._advance()

    def _submit(self, content: list[int]) -> None:
        name = f"{self.ctx}-{len(self._got)}"
        self.engine.submit(name, content, self._total)
        self._got[name] = 0

    def _advance(self) -> dict[str, int]:
        arrived = {name: count for name, count in self.engine.step().items() if name in self._got}
        for name, count in arrived.items():
            self._got[name] += count
        return arrived

    def _even_step(self) -> None:
        arrived = self._advance()
        if len(arrived) != len(self._got) or set(arrived.values()) != {1}:
            raise Uneven(
                f"a step gave {sum(arrived.values())} tokens to {len(arrived)} of {len(self._got)} sequences: the engine did "
                "not decode all of them at once; use a smaller --batch"
            )


def ladders(cells: Sequence[tuple[int, int | None]]) -> Iterator[tuple[int, list[int | None]]]:
    """Contexts with their batches, both growing; None, as many as fit, comes last."""
    for ctx in sorted({ctx for ctx, _ in cells}):
        batches = {batch for at, batch in cells if at == ctx}
        yield ctx, sorted(batches, key=lambda batch: math.inf if batch is None else batch)
