"""A model that decodes with a selector: random tiny models, whose answers mean nothing but whose arithmetic does."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from model_fakes import random_model
from typer.testing import CliRunner

from bench.cli import app
from harness import closed_loop, closed_loop_run, trace_capture, trace_model
from harness.closed_loop import Start
from harness.errors import UserError
from harness.fidelity_record import LoopRecord
from harness.haystack import Haystack
from harness.prompts import fill
from harness.record import Outcome
from harness.store import read
from locks_kernels.selectors import SELECTORS
from locks_kernels.selectors.base import Selector
from locks_kernels.shapes import SelectOptions
from reports import closed_loop as loop_report

pytest.importorskip("transformers", reason='needs pip install "locks-bench[models]"')
HAYSTACK = Haystack.builtin()
BUDGET = SelectOptions(budget_tokens=96)


def started(folder: Path, family: str) -> Start:
    model = trace_model.load(path=random_model(folder, family))
    prompt = fill("niah_single_1", 1, HAYSTACK, lambda p: len(trace_capture.tokenise(model, p).ids) <= 900)
    tokens = trace_capture.tokenise(model, prompt)
    assert model.tokenizer.decode(tokens.ids[tokens.first :]) == f"{prompt.answers[0]}."
    return closed_loop.prefill(model, tokens, 0, kvzip=True, basis=trace_capture.calibrate(model, HAYSTACK))


@pytest.fixture(scope="module")
def start(tmp_path_factory: pytest.TempPathFactory) -> Start:
    return started(tmp_path_factory.mktemp("model"), "Llama")


@pytest.mark.parametrize("family", ["Llama", "Qwen3", "Glm"])
def test_step_by_step_is_the_model_in_one_pass(family: str, tmp_path: Path) -> None:
    start = started(tmp_path, family)
    full = closed_loop.full_attention(start)
    ids = start.tokens.ids[: start.length] + full.tokens
    with torch.no_grad():
        logits = start.model.model(torch.tensor([ids])).logits[0, start.length :]
    assert torch.allclose(full.logs, logits[:-1].log_softmax(-1), atol=1e-3)
    assert len(full.tokens) == start.wanted == len(full.logs) + 1
    everything = closed_loop.SelectorAttend(start, SELECTORS["oracle"], SelectOptions(budget_tokens=2048))
    assert torch.allclose(closed_loop.decode(start, everything, full.tokens, len(full.tokens)).logs, full.logs, atol=1e-3)


@pytest.mark.parametrize("name", ["oracle", "locks-r8", "locks-r2x4-r8", "kvzip-pair-uniform"])
def test_a_budget_of_everything_is_full_attention(start: Start, name: str) -> None:
    full = closed_loop.full_attention(start)
    found = closed_loop.diverge(start, SELECTORS[name], SelectOptions(budget_tokens=2048), full)
    assert found.course.tokens == full.tokens and found.first is None and found.agreed == found.steps
    assert found.kl / found.steps < 1e-6 and not found.active


@pytest.mark.parametrize("name", SELECTORS)
def test_every_selector_decodes_and_leaves_the_cache_as_it_was(start: Start, name: str) -> None:
    full = closed_loop.full_attention(start)
    before = [layer.keys.clone() for layer in start.cache.layers]
    found = closed_loop.diverge(start, SELECTORS[name], BUDGET, full)
    assert found.steps == len(full.tokens) - 1 and 0 <= found.agreed <= found.steps and found.kl >= 0
    assert found.course.logs.isfinite().all()
    assert (found.first is None) == (found.course.tokens == full.tokens)
    assert all(torch.equal(layer.keys, was) for layer, was in zip(start.cache.layers, before, strict=True))
    if not SELECTORS[name].declaration.dense_layers and name != "shadowkv":  # whose extra tokens are everything here
        assert found.active


@pytest.mark.parametrize("name", ["locks-r8", "locks-r1x2-r8", "unique", "cuboid-mean", "second-order", "shared-svd-int4"])
def test_a_state_that_is_kept_between_pages_is_the_one_built_anew(
    start: Start, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    full = closed_loop.full_attention(start)
    assert start.length // 16 < (start.length + len(full.tokens) - 1) // 16, "a page has to fill on the way"
    once = closed_loop.decode(start, closed_loop.SelectorAttend(start, SELECTORS[name], BUDGET), full.tokens, len(full.tokens))
    monkeypatch.setattr(type(SELECTORS[name]), "complete_pages_only", False)
    each = closed_loop.decode(start, closed_loop.SelectorAttend(start, SELECTORS[name], BUDGET), full.tokens, len(full.tokens))
    assert torch.equal(once.logs, each.logs)


def test_pages_are_built_when_they_fill_and_not_at_every_step(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    built: list[int] = []
    build = type(SELECTORS["centroid"]).build

    def counted(self: Selector, layer: Any, *rest: Any) -> Any:
        built.append(layer.tokens)
        return build(self, layer, *rest)

    monkeypatch.setattr(type(SELECTORS["centroid"]), "build", counted)
    attend = closed_loop.SelectorAttend(start, SELECTORS["centroid"], BUDGET)
    closed_loop.decode(start, attend, [start.first], 24)
    first = start.length + 1
    fills = [n for n in range(first + 1, first + 23) if n % 16 == 0]
    assert sorted(set(built)) == [first, *fills] and len(built) == 2 * len(set(built))


def test_the_fewer_pages_the_farther_from_full_attention(start: Start) -> None:
    full = closed_loop.full_attention(start)
    kl = [closed_loop.diverge(start, SELECTORS["oracle"], SelectOptions(budget), full).kl for budget in (800, 384, 64)]
    assert kl == sorted(kl) and kl[-1] > 0


def test_matching_leaves_case_aside_and_counts_each_answer_once() -> None:
    assert closed_loop.found(("ABC", "12", "x"), "abc abc 121") == 2


def invoke(tmp_path: Path, *more: str) -> tuple[dict[str, Any], str]:
    target = tmp_path / "rows.json"
    common = [
        "fidelity",
        "--closed-loop",
        "--ctx",
        "600",
        "--budget",
        "64",
        "--samples",
        "2",
        "--store",
        str(tmp_path / "store"),
    ]
    result = CliRunner().invoke(app, [*common, "--json", str(target), *more], catch_exceptions=False)
    assert result.exit_code == 0
    return json.loads(target.read_text()), result.output


def test_command_answers_once_and_shows_a_table(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = random_model(tmp_path / "model", "Llama")
    chosen = ("--model-path", str(folder), "--selectors", "oracle,sliding-window,kvzip-pair", "--tasks", "niah_single_1")
    data, shown = invoke(tmp_path, *chosen)
    assert [row["selector"] for row in data["rows"]] == ["oracle", "sliding-window", "kvzip-pair"]
    first = data["rows"][0]
    assert first["samples"] == 2 and first["exact_match"]["value"] == 0 and first["kl"]["value"] > 0 and first["active"]
    assert data["rows"][2]["outcome"] == "SKIPPED" and "--kvzip" in data["rows"][2]["reason"]
    for text in ("full attention", "the model decodes with the selector", "bootstrap over samples", "SKIPPED"):
        assert text in shown
    stored = read(tmp_path / "store" / "closed_loop.ndjson", kind=LoopRecord)
    assert len(stored) == 6 and {record.outcome for record in stored} == {Outcome.OK, Outcome.SKIPPED}
    monkeypatch.setattr(closed_loop_run.closed_loop, "prefill", lambda *arguments: pytest.fail("measured again"))
    assert invoke(tmp_path, *chosen)[0] == data


def test_a_folder_that_transformers_chokes_on_is_bad_input(tmp_path: Path) -> None:
    for text in ("[]", '{"model_type": "llama", "num_attention_heads": 0, "hidden_size": 8}'):
        (tmp_path / "config.json").write_text(text)
        with pytest.raises(UserError, match=r"cannot be loaded: (Type|ZeroDivision)Error"):
            invoke(tmp_path, "--model-path", str(tmp_path))


def test_synthetic_keys_have_no_answers(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="needs a model"):
        invoke(tmp_path, "--model", "synthetic")


def test_rows_are_ratios_over_samples() -> None:
    def record(found: int, full: int, first: int | None, steps: int, agreed: int) -> LoopRecord:
        facts, declared = {"model": "m", "ctx": 4096}, {"label": "LOCKS"}
        key = ("k", "t", "c", facts, "locks-r8", declared, 256, Outcome.OK, None)
        return LoopRecord(*key, 4, found, full, "a", "b", steps, agreed, first, 0.5 * steps, True)

    (row,) = loop_report.rows([record(1, 2, None, 10, 10), record(3, 4, 5, 30, 20)])
    assert row["exact_match"]["value"] == 0.5 and row["exact_match_full"]["value"] == 0.75
    assert row["kept_of_full"]["value"] == pytest.approx(4 / 6)
    assert row["agreement"]["value"] == 0.75 and row["kl"]["value"] == 0.5
    assert row["same_text"]["value"] == 0.5 and row["first_difference"] == 5
