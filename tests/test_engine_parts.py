"""Level engine before any engine starts: what a user types, model folders, prompts, and how texts are compared."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from bench.request import Request, cases
from harness.engine import cells
from harness.engine.cells import BACKENDS, parse_engine_args, plugin_options, resolve
from harness.engine.gate import prompt_lengths
from harness.engine.model import read_folder, write_folder
from harness.engine.texts import TOLERANCE, Text, compare
from harness.engine.window import prompt
from harness.errors import UserError
from harness.presets import find_model, models
from locks_kernels.shapes import SelectOptions, ShapeError
from locks_kernels.vllm_plugin.settings import Settings


def test_prompts_are_the_same_for_everybody_and_differ_by_sequence() -> None:
    assert prompt(0, 8, 1, 50, 1000) == prompt(0, 8, 1, 50, 1000) != prompt(0, 8, 2, 50, 1000)
    assert prompt(0, 8, 1, 50, 1000) != prompt(1, 8, 1, 50, 1000)
    assert set(prompt(0, 8, 1, 500, 4)) == {2, 3}


def test_texts_may_part_at_a_near_tie_only() -> None:
    reference = Text(4, [1, 2, 3], [[(1, -1.0), (9, -3.0)], [(2, -1.0), (8, -1.1)], [(3, -0.5), (7, -4.0)]])
    same = replace(reference, likely=[[(1, -1.05), (9, -3.0)], *reference.likely[1:]])
    assert compare(same, reference).nats == pytest.approx(0.05) and compare(same, reference).positions == 3
    tie = Text(4, [1, 8, 5], [reference.likely[0], [(8, -1.0), (2, -1.05)], [(5, -0.1), (6, -9.0)]])
    assert compare(tie, reference).within(TOLERANCE) and compare(tie, reference).positions == 2
    wrong = replace(tie, tokens=[1, 4, 5], likely=[reference.likely[0], [(4, -0.1), (2, -3.0)], tie.likely[2]])
    assert compare(wrong, reference).nats is None and not compare(wrong, reference).within(9.0)
    off = replace(reference, likely=[[(1, -1.0 - 2 * TOLERANCE), (9, -3.0)], *reference.likely[1:]])
    assert not compare(off, reference).within(TOLERANCE)
    assert compare(reference, reference).nats == 0


def test_prompts_of_the_gate_lie_on_both_sides_of_the_budget() -> None:
    *short, long = prompt_lengths(2048, 131_072)
    assert set(short) == {512} and long == 8192
    assert max(prompt_lengths(128, 2048)[:-1]) + 16 <= 128
    assert len(set(prompt_lengths(2048, 2048))) == 1  # nothing to leave out


@pytest.mark.parametrize("name", [name for name, model in models().items() if "engine" not in dict(model.unsupported)])
def test_presets_as_folders(name: str, tmp_path: Path) -> None:
    model = find_model(name)
    write_folder(model, tmp_path / name, 4096, "bfloat16")
    read, label, longest = read_folder(tmp_path / name)
    assert replace(read, unsupported=model.unsupported) == model and longest == 4096 and label.startswith(f"{name} ")


def test_folders_that_are_none(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="not a model folder"):
        read_folder(tmp_path)
    (tmp_path / "config.json").write_text('{"num_experts": 8}')
    with pytest.raises(UserError, match="mixture of experts"):
        read_folder(tmp_path)
    for text in ("[]", "{", '{"num_hidden_layers": 1, "num_attention_heads": 0, "hidden_size": 64}'):
        (tmp_path / "config.json").write_text(text)
        with pytest.raises(UserError, match="not one of a dense decoder"):
            read_folder(tmp_path)


def test_a_model_folder_is_not_measured_beyond_what_it_is_made_for(tmp_path: Path) -> None:
    write_folder(find_model("smollm2-135m"), tmp_path, 8192, "bfloat16")
    asked = Request(None, "1", None, "engine", None, "auto", "share", 8, 16, "bfloat16", 0, str(tmp_path))
    assert [case.ctx for case in cases(asked, "cpu")] == [2048]
    with pytest.raises(UserError, match="131072 is above the 8192 tokens"):
        cases(asked, "cuda")  # whose contexts are longer where none is asked for


def test_what_a_user_types() -> None:
    asked = Request("4K,8K", "2,max", None, "engine", None, "auto", "share", 8, 16, "bfloat16", 0)
    found = cases(asked, "cpu")
    assert [(case.ctx, case.batch, case.kv) for case in found] == [
        (n, *b) for n in (4096, 8192) for b in ((2, "auto"), (1, "max"))
    ]
    assert {(case.model.name, case.page_size) for case in found} == {("smollm2-135m", 32)}
    assert {case.model.name for case in cases(asked, "cuda")} == {"llama-3.1-8b"}
    for change, message in (
        ({"kv": "pooled"}, "--kv is not for"),
        ({"engine_args": '{"model": "x"}'}, "decided by"),
        ({"engine_args": "[1]"}, "not a JSON object"),
        ({"level": "token"}, "--batch max is for"),
        ({"level": "token", "batch": "1", "model_path": "x"}, "are for --level engine"),
        ({"model": "llama-3.1-8b", "model_path": "x"}, "both given"),
        ({"engine_args": '{"kv_cache_dtype": "fp8"}'}, "not measured at this level"),
        ({"batch": ""}, "--batch '' is not a size"),
        ({"batch": "max,"}, "--batch '' is not a size"),
        ({"page_size": 5}, "page_size 5"),
    ):
        with pytest.raises((UserError, ShapeError), match=message):
            cases(replace(asked, **change), "cpu")
    assert parse_engine_args('{"b": 1, "a": 2}') == '{"a": 2, "b": 1}'


def test_names_of_this_level() -> None:
    assert resolve("default", "cuda") == ["fa3", "flashinfer", "locks"] and resolve("default", "cpu") == ["cpu-attn", "locks"]
    assert resolve("all", "cpu") == ["cpu-attn", "locks"]
    with pytest.raises(UserError, match="did you mean 'flashinfer'"):
        resolve("flash-infer", "cuda")
    assert [name for name, backend in BACKENDS.items() if not backend.dense] == ["locks"]


@pytest.mark.parametrize(
    ("backend", "error", "found", "told"),
    [
        ("fa3", "ImportError: cannot import name 'x' from 'flashinfer.autotuner'", "0.6.6", True),
        ("fa3", "ImportError: cannot import name 'x' from 'flashinfer.autotuner'", "0.7.0", False),
        ("fa3", "CUDA error: an illegal memory access", "0.6.6", False),
        ("flashinfer", "ValueError: not valid for this configuration", "0.6.6", True),
        ("locks", "ImportError: flashinfer", None, False),
    ],
)
def test_a_failure_by_another_flashinfer_names_both(
    backend: str, error: str, found: str | None, told: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cells, "_wanted_flashinfer", lambda: "flashinfer-python==0.7.0")
    monkeypatch.setattr(cells, "version", lambda package: found)
    said = BACKENDS[backend].mismatch(error)
    assert (said is not None) is told
    assert said is None or ("0.6.6 is installed" in said and "pip install 'flashinfer-python==0.7.0'" in said)


def test_the_plugin_understands_its_options() -> None:
    options = SelectOptions(1024, sink_pages=2, recent_pages=3, combine="peak")
    read = Settings.parse(plugin_options(options, 4))
    assert (read.budget, read.rank, read.sink_pages, read.recent_pages, read.combine) == (1024, 4, 2, 3, "peak")
