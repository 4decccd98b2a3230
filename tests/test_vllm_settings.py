"""The plugin's configuration, its place in vLLM, and what it refuses: no vLLM needed."""

from __future__ import annotations

import enum
import json
import subprocess
import sys
from collections.abc import Iterator
from types import SimpleNamespace

import fake_vllm
import pytest

from locks_kernels.vllm_plugin import limits, register, settings
from locks_kernels.vllm_plugin.settings import Settings, SettingsError


class Kind(str, enum.Enum):  # noqa: UP042, as vLLM's
    ENCODER_ONLY = "encoder_only"


LAYER = {"query_heads": 32, "kv_heads": 8, "head_dim": 128, "scale": 128**-0.5, "kv_cache_dtype": "auto"}


@pytest.fixture(autouse=True)
def fresh(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.delenv(settings.VARIABLE, raising=False)
    settings.current.cache_clear()
    yield
    settings.current.cache_clear()


def test_every_setting_can_be_said() -> None:
    said = {
        "budget": 1024,
        "rank": 4,
        "sink_pages": 2,
        "recent_pages": 3,
        "combine": "peak",
        "dense_layers": [0, 1],
        "min_context": 8192,
        "unsupported": "dense",
        "kernels": "triton",
        "selector": "oracle",
    }
    parsed = Settings.parse(json.dumps(said))
    assert {name: getattr(parsed, name) for name in said} == {**said, "dense_layers": (0, 1)}
    assert set(said) == set(Settings.__dataclass_fields__)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("budget=1024", "is not JSON"),
        ("[1]", "must be a JSON object"),
        ('{"bugdet": 1}', "has no 'bugdet'; it knows budget, rank"),
        ('{"budget": 0}', "budget is 0; use a whole number, at least 1"),
        ('{"budget": true}', "budget is true; use a whole number"),
        ('{"rank": 3}', "rank is 3; use one of 2, 4, 8"),
        ('{"rank": [8]}', "rank is [8]; use one of 2, 4, 8"),
        ('{"recent_pages": 0}', "recent_pages is 0; use a whole number, at least 1"),
        ('{"dense_layers": 2}', "dense_layers is 2; use a list of layer indices"),
        ('{"dense_layers": [-1]}', "dense_layers is [-1]; use a list of layer indices"),
        ('{"unsupported": "ignore"}', 'unsupported is "ignore"; use one of error, dense'),
    ],
)
def test_mistakes_are_one_clear_line(text: str, message: str) -> None:
    with pytest.raises(SettingsError) as caught:
        Settings.parse(text)
    assert message in str(caught.value) and "\n" not in str(caught.value)


def test_options_are_no_larger_than_the_longest_sequence() -> None:
    options = Settings(budget=1 << 20, min_context=1 << 20).options(page_size=16, max_tokens=100)
    assert options.table_pages(16) == 7
    assert Settings(budget=48).options(16, 32).kept_pages(16) == 3
    assert Settings(budget=2048, min_context=4096).options(16, 1 << 17).table_pages(16) == 256
    with pytest.raises(SettingsError, match="at least 3 pages"):
        Settings(budget=40).options(16, 4096)


def test_nothing_but_a_name_until_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    registry = fake_vllm.Registry()
    with fake_vllm.installed(registry, cpu=True):
        register()
        register()
        assert registry.paths == {"CUSTOM": "locks_kernels.vllm_plugin.gpu.LocksBackend"}
        monkeypatch.setenv(settings.VARIABLE, "{}")
        register()
        assert registry.paths["CPU_ATTN"] == "locks_kernels.vllm_plugin.cpu.LocksCPUBackend"


def test_another_package_keeps_its_name_unless_locks_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    registry = fake_vllm.Registry()
    registry.paths["CUSTOM"] = "theirs.Backend"
    with fake_vllm.installed(registry):
        register()
        assert registry.paths == {"CUSTOM": "theirs.Backend"}
        monkeypatch.setenv(settings.VARIABLE, "{}")
        register()
        assert registry.paths == {"CUSTOM": "locks_kernels.vllm_plugin.gpu.LocksBackend"}


def test_a_mistake_stops_every_process_at_its_start(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(settings.VARIABLE, '{"budget": "many"}')
    with fake_vllm.installed(fake_vllm.Registry()), pytest.raises(SettingsError, match="budget"):
        register()


def test_registering_imports_no_torch() -> None:
    code = (
        "import sys, fake_registry\n"
        "from locks_kernels.vllm_plugin import register\n"
        "register()\n"
        "assert 'torch' not in sys.modules, 'torch was imported'\n"
    )
    fake = (
        "import sys, types\n"
        "module = types.ModuleType('vllm'); module.__path__ = []\n"
        "for name in ('vllm', 'vllm.v1', 'vllm.v1.attention', 'vllm.v1.attention.backends'):\n"
        "    sys.modules[name] = module\n"
        "registry = types.ModuleType('registry')\n"
        "member = types.SimpleNamespace(is_overridden=lambda: False)\n"
        "registry.AttentionBackendEnum = types.SimpleNamespace(CUSTOM=member)\n"
        "registry.register_backend = lambda *given: None\n"
        "sys.modules['vllm.v1.attention.backends.registry'] = registry\n"
    )
    done = subprocess.run([sys.executable, "-c", fake + code.replace(", fake_registry", "")], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"attn_type": Kind.ENCODER_ONLY}, "LOCKS does not support encoder_only attention"),
        ({"sliding_window": 4096}, "window of 4096 tokens"),
        ({"logits_soft_cap": 50.0}, "a soft cap on logits (50.0)"),
        ({"alibi_slopes": [1.0]}, "ALiBi"),
        ({"sinks": object()}, "attention sinks"),
        ({"kv_sharing_target": "model.layers.3.attn"}, "another layer's cache"),
        ({"kv_cache_dtype": "fp8"}, "a fp8 cache"),
        ({"head_dim": 80}, "head_dim 80 is not supported"),
        ({"query_heads": 136}, "group of 17"),
        ({"scale": 0.1}, "a softmax scale of 0.1"),
    ],
)
def test_layers_that_stay_dense_say_why(changes: dict[str, object], words: str) -> None:
    assert limits.layer_reason(**LAYER) is None  # type: ignore[arg-type]
    assert words in limits.sentence(str(limits.layer_reason(**{**LAYER, **changes})))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("more", "words"),
    [
        ({"speculative_config": object()}, "speculative decoding"),
        ({"kv_transfer_config": object()}, "KV connectors"),
        ({"parallel_config": SimpleNamespace(decode_context_parallel_size=2)}, "decode context parallelism"),
        ({"parallel_config": SimpleNamespace(prefill_context_parallel_size=2)}, "prefill context parallelism"),
        ({"parallel_config": SimpleNamespace(enable_dbo=True)}, "micro-batches"),
        ({"attention_config": SimpleNamespace(use_non_causal=True)}, "non-causal"),
        ({"model_config": SimpleNamespace(is_mm_prefix_lm=True)}, "prefix-LM"),
        ({"model_config": SimpleNamespace(rswa_window=64)}, "reference sliding windows"),
    ],
)
def test_engines_that_stay_dense_say_why(more: dict[str, object], words: str) -> None:
    assert limits.engine_reason(fake_vllm.engine({})) is None
    assert words in str(limits.engine_reason(fake_vllm.engine({}, **more)))


def test_pages_that_stay_dense_say_which_to_use() -> None:
    assert [size for size in range(1, 257) if limits.page_reason(size) is None] == [16, 32, 64]
    assert "use --block-size 32 or 64" in str(limits.page_reason(16, (32, 64)))
