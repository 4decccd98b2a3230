"""Random models of a few kilobytes with a tokenizer of single bytes, as folders of transformers."""

from __future__ import annotations

from pathlib import Path

import torch

TINY = {
    "hidden_size": 128,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "vocab_size": 300,
    "max_position_embeddings": 4096,
    "pad_token_id": 0,
}


def random_model(folder: Path, family: str) -> Path:
    """One of `family`, such as Llama."""
    import transformers
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={letter: index + 1 for index, letter in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer).save_pretrained(folder)
    torch.manual_seed(0)
    config = getattr(transformers, f"{family}Config")(**TINY)
    getattr(transformers, f"{family}ForCausalLM")(config).save_pretrained(folder)
    return folder
