"""Batches that grow in one engine, which is none here: what is timed of them, and what makes a time worth nothing."""

from __future__ import annotations

import pytest
from engine_fakes import CHUNK_NS, STEP_NS, FakeEngine

from harness.engine.window import Ladder, Uneven, Window

WINDOW = Window(warm=2, rounds=3, round_tokens=4)


def ladder(engine: FakeEngine, ctx: int = 2048, slack: int = 100) -> Ladder:
    return Ladder(engine, ctx, WINDOW, slack, lambda number, length: [7] * length, engine.clock_ns, most=4)


def test_the_slope_is_the_time_of_a_decode_step_and_nothing_else() -> None:
    engine = FakeEngine()
    climbing = ladder(engine)
    one, four = climbing.measure(1), climbing.measure(4)
    assert one.rounds_ns == [[STEP_NS]] * WINDOW.rounds
    assert four.rounds_ns == [[4 * STEP_NS]] * WINDOW.rounds
    assert one.ttft_ns == four.ttft_ns == 2 * CHUNK_NS  # 2033 tokens in chunks of 1024, alone
    assert (one.last_context, four.last_context) == (2048, 2048)
    assert one.longest_context == 2048 < four.longest_context <= 2048 + 100
    assert engine.prefilled == [f"2048-{number}" for number in range(4)]  # each once
    climbing.close()
    assert not engine.running and len(engine.cancelled) == 4


def test_prompts_are_made_before_anything_decodes() -> None:
    """An engine decodes on while its client makes prompts: the oldest sequence would run out of tokens."""
    engine = FakeEngine()

    def slowly(number: int, length: int) -> list[int]:
        for _ in range(200 if engine.running else 0):
            engine.step()
        return [7] * length

    climbing = Ladder(engine, 2048, WINDOW, 100, slowly, engine.clock_ns, most=4)
    assert (climbing.measure(1).batch, climbing.measure(4).batch) == (1, 4)


def test_a_step_that_leaves_a_sequence_out_gives_no_time() -> None:
    engine = FakeEngine()
    engine.preempts = True
    with pytest.raises(Uneven, match="2 of 3 sequences"):
        ladder(engine).measure(3)


def test_prompts_stay_within_what_the_model_is_made_for() -> None:
    engine = FakeEngine()
    engine.max_tokens = 2048
    timed = ladder(engine).measure(1)
    assert timed.last_context == 1948  # slack for the batches that follow
