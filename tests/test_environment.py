"""What a record says about its machine and source, and presets as the models' configurations have them."""

from __future__ import annotations

import json
import platform
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from harness import environment, presets
from harness.case import Case
from harness.errors import UserError
from locks_kernels.shapes import SelectOptions, ShapeError


@pytest.fixture
def checkout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A repository with the measured paths, which environment takes for its own."""
    root = tmp_path / "checkout"
    for folder in ("locks_kernels/cuda", "harness", "profiles"):
        (root / folder).mkdir(parents=True)
    (root / "locks_kernels/cuda/score.cu").write_text("kernel")
    (root / "README.md").write_text("text")
    commands = ("init -q", "add -A", "-c user.name=a -c user.email=a@b commit -q -m one")
    for command in commands:
        subprocess.run(["git", "-C", str(root), *command.split()], check=True)
    monkeypatch.setattr(environment, "SOURCE", root)
    monkeypatch.delenv(environment.COMMIT_VARIABLE, raising=False)
    environment.source.cache_clear()
    yield root
    environment.source.cache_clear()


def fresh() -> dict[str, object]:
    environment.source.cache_clear()
    return environment.source()


def test_source_of_a_checkout(checkout: Path) -> None:
    clean = fresh()
    assert len(str(clean["commit"])) == 40 and clean["dirty"] is False
    (checkout / "README.md").write_text("other")
    (checkout / "results").mkdir()
    assert fresh() == clean, "what does not measure does not count"
    (checkout / "locks_kernels/cuda/score.cu").write_text("faster kernel")
    changed = fresh()
    assert changed["dirty"] is True and changed["kernel_sources"] != clean["kernel_sources"]


def test_source_of_a_copy(checkout: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    inside = checkout / "harness" / "copy"  # inside somebody else's repository
    shutil.copytree(checkout / "locks_kernels", inside / "locks_kernels")
    monkeypatch.setattr(environment, "SOURCE", inside)
    assert (fresh()["commit"], fresh()["dirty"]) == (None, None)
    monkeypatch.setenv(environment.COMMIT_VARIABLE, "abc-dirty")
    assert (fresh()["commit"], fresh()["dirty"]) == ("abc", True)


def test_environment_is_plain_data_without_host_name() -> None:
    found = environment.capture("cpu")
    text = json.dumps(found, allow_nan=False)
    assert found["gpu"] is None and found["driver"] is None and found["cpu"]["cores"] >= 1
    assert found["versions"]["torch"] is not None
    assert "argv" in found and "/" not in found["argv"][0]
    assert f'"{platform.node()}"' not in text


def test_presets_match_the_models() -> None:
    models = presets.models()
    geometry = {
        name: (m.layers, m.query_heads, m.kv_heads, m.head_dim, m.hidden, m.mlp, m.vocabulary) for name, m in models.items()
    }
    assert geometry == {
        "llama-3.1-8b": (32, 32, 8, 128, 4096, 14336, 128256),
        "llama-3.1-70b": (80, 64, 8, 128, 8192, 28672, 128256),
        "qwen2.5-7b-1m": (28, 28, 4, 128, 3584, 18944, 152064),
        "qwen3-8b": (36, 32, 8, 128, 4096, 12288, 151936),
        "qwen3-4b": (36, 32, 8, 128, 2560, 9728, 151936),
        "qwen3-30b-a3b": (48, 32, 4, 128, 2048, 6144, 151936),
        "glm-4-9b-1m": (40, 32, 4, 128, 4096, 13696, 151552),
        "smollm2-135m": (30, 9, 3, 64, 576, 1536, 49152),
    }
    assert {name for name, m in models.items() if m.qkv_bias} == {"qwen2.5-7b-1m", "glm-4-9b-1m"}
    assert {name for name, m in models.items() if m.qk_norm} == {"qwen3-8b", "qwen3-4b", "qwen3-30b-a3b"}
    assert {name for name, m in models.items() if m.unsupported} == {"qwen3-30b-a3b"}
    for model in models.values():
        Case("attention", model, 8192, 1, SelectOptions()).shape()


def test_shapes_by_hand() -> None:
    model = presets.find_model("28x4x128x5")
    assert (model.query_heads, model.kv_heads, model.head_dim, model.layers) == (28, 4, 128, 5)
    assert "token" in dict(model.unsupported)
    with pytest.raises(UserError, match="did you mean 'qwen3-8b'"):
        presets.find_model("Qwen3-8B-base")
    with pytest.raises(UserError, match="layers"):
        presets.find_model("32x8x128x0")


@pytest.mark.parametrize("ranks", [0, 3, 16])
def test_heads_that_do_not_divide_over_ranks(ranks: int) -> None:
    case = Case("attention", presets.find_model("llama-3.1-8b"), 8192, 1, SelectOptions())
    with pytest.raises(ShapeError, match="tp=n"):
        case.shape(ranks)
    assert case.shape(8).kv_heads == 1
