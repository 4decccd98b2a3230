"""ruler-like prompts: carriers are where they say, sizes fit, samples are seeded."""

from __future__ import annotations

from pathlib import Path

import pytest

from harness.errors import UserError
from harness.haystack import Haystack
from harness.prompts import TASKS, Prompt, fill, tasks

HAYSTACK = Haystack.builtin()


def fits(prompt: Prompt) -> bool:
    return len(prompt.context) <= 9000


@pytest.mark.parametrize("task", TASKS)
def test_carriers_hold_the_answers_and_the_size_is_used(task: str) -> None:
    prompt = fill(task, 5, HAYSTACK, fits)
    assert 6000 < len(prompt.context) <= 9000
    if task in ("cwe", "fwe"):
        assert prompt.carriers == () and prompt.depth is None
    else:
        assert [prompt.context[a:b] for a, b in prompt.carriers] == list(prompt.answers)
        assert prompt.depth is not None and 0 <= prompt.depth <= 1
    assert prompt.response.startswith(prompt.opening) and all(answer in prompt.response for answer in prompt.answers)
    assert fill(task, 5, HAYSTACK, fits) == prompt
    assert fill(task, 6, HAYSTACK, fits).answers != prompt.answers


def test_places_differ_from_sample_to_sample() -> None:
    depths = [fill("niah_single_2", seed, HAYSTACK, fits).depth or 0.0 for seed in range(12)]
    assert min(depths) < 0.35 and max(depths) > 0.65


def test_chain_is_in_order_and_every_distractor_is_another_key() -> None:
    chain = fill("vt", 1, HAYSTACK, fits)
    assert list(chain.carriers) == sorted(chain.carriers)
    needles = fill("niah_multikey_2", 1, HAYSTACK, fits)
    assert needles.context.count("access code of the") > 50
    key = needles.question.split("access code of the ")[1].split(" does")[0]
    assert needles.context.count(f"the {key} is") == 1


def test_common_words_are_the_common_ones() -> None:
    prompt = fill("cwe", 0, HAYSTACK, fits)
    counts = {word: prompt.context.count(f" {word}") for word in prompt.answers}
    assert min(counts.values()) >= 6


def test_impossible_sizes_and_unknown_names() -> None:
    with pytest.raises(UserError, match="longer --ctx"):
        fill("vt", 0, HAYSTACK, lambda prompt: False)
    with pytest.raises(UserError, match="did you mean 'vt'"):
        tasks(["vtt"])
    assert tasks(["vt", "all"])[0] == "vt" and len(tasks(["all"])) == len(TASKS)


def test_haystack_from_a_file(tmp_path: Path) -> None:
    file = tmp_path / "book.txt"
    file.write_text("A short story.")
    with pytest.raises(UserError, match="at least 20,000"):
        Haystack.file(file)
    file.write_text("It was a dark night, and nobody slept. ==== The wind had turned to the east again. " * 400)
    book = Haystack.file(file)
    assert "====" not in book.text and book.record()["name"] == "book.txt"
    assert len(book.calibration) == pytest.approx(len(book.text) / 10, rel=0.01)
    with pytest.raises(UserError, match="cannot read"):
        Haystack.file(tmp_path / "absent.txt")
