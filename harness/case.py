"""What is measured: one cell of a sweep, as plain data.  Imports nothing heavy."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from locks_kernels.shapes import DecodeShape, SelectOptions, ShapeError

Level = Literal["attention", "token", "engine"]


@dataclass(frozen=True)
class Model:
    """Geometry of a dense decoder-only transformer; a preset of profiles/models.toml or given by hand.

    `qk_norm`: RMS norm on each query and key head (Qwen3).  `qkv_bias`: biases on the QKV projection (Qwen2.5, GLM-4).
    `unsupported`: levels this preset cannot be measured at, with the reason.
    """

    name: str
    layers: int
    query_heads: int
    kv_heads: int
    head_dim: int
    hidden: int
    mlp: int
    vocabulary: int
    qk_norm: bool = False
    qkv_bias: bool = False
    tied_embeddings: bool = False
    unsupported: tuple[tuple[str, str], ...] = ()


@dataclass(frozen=True)
class Case:
    """One cell: every backend of a case sees the same keys, values, queries and block tables."""

    level: Level
    model: Model
    ctx: int
    batch: int
    select: SelectOptions
    page_size: int = 16
    rank: int = 8
    dtype: str = "bfloat16"
    kv: str = "auto"  # memory plan asked for: auto, resident, layers=k, pooled, tp=n
    seed: int = 0
    device: Literal["cuda", "cpu"] = "cuda"

    def shape(self, tensor_parallel: int = 1) -> DecodeShape:
        """Geometry of one layer on one of `tensor_parallel` ranks; ShapeError if the heads do not divide."""
        if tensor_parallel < 1 or self.model.query_heads % tensor_parallel or self.model.kv_heads % tensor_parallel:
            raise ShapeError(
                f"{self.model.name} has {self.model.query_heads} query and {self.model.kv_heads} KV heads, which do not "
                f"divide over {tensor_parallel} ranks; use --kv tp=n with an n that divides both"
            )
        return DecodeShape(
            self.model.query_heads // tensor_parallel,
            self.model.kv_heads // tensor_parallel,
            self.model.head_dim,
            self.page_size,
            self.rank,
            self.dtype,
        )
