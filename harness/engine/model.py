"""What vLLM loads at level `engine`: a folder with a preset's config.json and no weights, or a model folder of the user."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

from harness.case import Model
from harness.errors import UserError

# The geometry decides: what a step reads and computes is that of the preset whichever family writes the code.
ARCHITECTURES = {"qk_norm": ("Qwen3ForCausalLM", "qwen3"), "qkv_bias": ("Qwen2ForCausalLM", "qwen2")}
LLAMA = ("LlamaForCausalLM", "llama")


def config(model: Model, max_tokens: int, dtype: str) -> dict[str, Any]:
    """The config.json of a preset, with positions up to `max_tokens`.  GLM-4 is measured as Qwen2 of its sizes: the biases are
    there, and its rotary embedding of half a head costs the same."""
    architecture, kind = next((names for flag, names in ARCHITECTURES.items() if getattr(model, flag)), LLAMA)
    return {
        "architectures": [architecture],
        "model_type": kind,
        "hidden_size": model.hidden,
        "intermediate_size": model.mlp,
        "num_hidden_layers": model.layers,
        "num_attention_heads": model.query_heads,
        "num_key_value_heads": model.kv_heads,
        "head_dim": model.head_dim,
        "vocab_size": model.vocabulary,
        "tie_word_embeddings": model.tied_embeddings,
        "max_position_embeddings": max_tokens,
        "torch_dtype": dtype,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-5,
        "rope_theta": 500000.0,
        "bos_token_id": 0,
        "eos_token_id": 1,
        "use_sliding_window": False,
    }


def write_folder(model: Model, folder: Path, max_tokens: int, dtype: str) -> None:
    """Make `folder` one that vLLM opens offline."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config(model, max_tokens, dtype), indent=1))


def read_folder(path: Path) -> tuple[Model, str, int]:
    """Geometry, label of the weights and longest context of a model folder.  UserError says what is wrong with it."""
    file = path / "config.json"
    try:
        text = file.read_bytes()
        data = json.loads(text)
        if any(name in data for name in ("num_experts", "num_local_experts", "n_routed_experts")):
            raise ValueError("a mixture of experts")
        heads = int(data["num_attention_heads"])
        model = Model(
            name=path.resolve().name,
            layers=int(data["num_hidden_layers"]),
            query_heads=heads,
            kv_heads=int(data.get("num_key_value_heads") or heads),
            head_dim=int(data.get("head_dim") or data["hidden_size"] // heads),
            hidden=int(data["hidden_size"]),
            mlp=int(data["intermediate_size"]),
            vocabulary=int(data["vocab_size"]),
            qk_norm=data.get("model_type") == "qwen3",
            qkv_bias=bool(data.get("attention_bias")) or data.get("model_type") == "qwen2",
            tied_embeddings=bool(data.get("tie_word_embeddings")),
        )
        return model, f"{model.name} {hashlib.sha256(text).hexdigest()[:8]}", int(data["max_position_embeddings"])
    except OSError as error:
        raise UserError(f"--model-path {path} is not a model folder: {file.name} cannot be read ({error.strerror})") from error
    except (ValueError, KeyError, TypeError, ArithmeticError) as error:
        raise UserError(f"--model-path {path}: its config.json is not one of a dense decoder ({error!r})") from error
