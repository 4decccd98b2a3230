"""A model with the attention of Llama-3.1-8B and little else, with seeded random weights: written by the tests, offline.

Weights are larger than vLLM's dummy ones, so that attention has peaks and a small budget changes what is generated.
"""

from __future__ import annotations

import json
from pathlib import Path

LAYERS, HIDDEN, HEADS, KV_HEADS, HEAD_DIM, MLP, WORDS = 4, 4096, 32, 8, 128, 2048, 4096


def write(folder: Path, positions: int = 32768) -> Path:
    import torch
    from safetensors.torch import save_file

    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": HIDDEN,
        "intermediate_size": MLP,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "head_dim": HEAD_DIM,
        "vocab_size": WORDS,
        "tie_word_embeddings": False,
        "max_position_embeddings": positions,
        "torch_dtype": "bfloat16",
        "hidden_act": "silu",
        "rms_norm_eps": 1e-5,
        "rope_theta": 500000.0,
        "bos_token_id": 0,
        "eos_token_id": 1,
    }
    (folder / "config.json").write_text(json.dumps(config))
    generator = torch.Generator().manual_seed(0)

    def matrix(rows: int, columns: int, gain: float = 1.0) -> torch.Tensor:
        return (torch.randn(rows, columns, generator=generator) * gain * columns**-0.5).bfloat16()

    gains = torch.ones(HIDDEN, dtype=torch.bfloat16)
    tensors = {
        "model.embed_tokens.weight": matrix(WORDS, HIDDEN, HIDDEN**0.5),
        "lm_head.weight": matrix(WORDS, HIDDEN, 4.0),
        "model.norm.weight": gains,
    }
    for layer in range(LAYERS):
        for name, rows, columns, gain in (
            ("self_attn.q_proj", HEADS * HEAD_DIM, HIDDEN, 1.5),
            ("self_attn.k_proj", KV_HEADS * HEAD_DIM, HIDDEN, 1.5),
            ("self_attn.v_proj", KV_HEADS * HEAD_DIM, HIDDEN, 1.0),
            ("self_attn.o_proj", HIDDEN, HEADS * HEAD_DIM, 2.0),
            ("mlp.gate_proj", MLP, HIDDEN, 1.0),
            ("mlp.up_proj", MLP, HIDDEN, 1.0),
            ("mlp.down_proj", HIDDEN, MLP, 1.0),
        ):
            tensors[f"model.layers.{layer}.{name}.weight"] = matrix(rows, columns, gain)
        for name in ("input_layernorm", "post_attention_layernorm"):
            tensors[f"model.layers.{layer}.{name}.weight"] = gains.clone()
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def prompt(seed: int, tokens: int) -> list[int]:
    import torch

    return torch.randint(2, WORDS, (tokens,), generator=torch.Generator().manual_seed(seed)).tolist()
