"""Weights of a preset as one tensor-parallel rank holds them: sizes from the geometry alone, and random tensors."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

from harness.errors import UserError
from locks_kernels.shapes import DTYPE_BYTES

if TYPE_CHECKING:
    import torch

    from harness.case import Model


@dataclass(frozen=True)
class RankGeometry:
    """One rank's share of a model: heads, MLP columns and vocabulary rows are divided, everything else is whole.

    A rank is measured alone, without the communication that follows O and down projections.  UserError if heads or MLP do
    not divide.
    """

    model: Model
    tensor_parallel: int = 1

    def __post_init__(self) -> None:
        for what in ("query_heads", "kv_heads", "mlp"):
            if getattr(self.model, what) % self.tensor_parallel:
                raise UserError(
                    f"{self.model.name} has {what}={getattr(self.model, what)}, which does not divide over "
                    f"{self.tensor_parallel} ranks; ask for another --kv tp=n"
                )

    @property
    def query_heads(self) -> int:
        return self.model.query_heads // self.tensor_parallel

    @property
    def kv_heads(self) -> int:
        return self.model.kv_heads // self.tensor_parallel

    @property
    def mlp(self) -> int:
        return self.model.mlp // self.tensor_parallel

    @property
    def vocabulary(self) -> int:
        return -(-self.model.vocabulary // self.tensor_parallel)

    @cached_property
    def layer(self) -> dict[str, tuple[int, ...]]:
        """Shape of each weight of one layer; projections are [out, in], query rows before key before value rows, gate
        rows before up rows."""
        model = self.model
        qkv = (self.query_heads + 2 * self.kv_heads) * model.head_dim
        shapes: dict[str, tuple[int, ...]] = {
            "attention_gain": (model.hidden,),
            "qkv": (qkv, model.hidden),
            "output": (model.hidden, self.query_heads * model.head_dim),
            "mlp_gain": (model.hidden,),
            "gate_up": (2 * self.mlp, model.hidden),
            "down": (model.hidden, self.mlp),
        }
        if model.qkv_bias:
            shapes["qkv_bias"] = (qkv,)
        if model.qk_norm:
            shapes["query_gain"] = shapes["key_gain"] = (model.head_dim,)
        return shapes

    @property
    def head(self) -> tuple[int, int]:
        """Shape of the LM head and of the input embedding, which are one tensor in a model with tied embeddings."""
        return self.vocabulary, self.model.hidden


def weight_bytes(model: Model, batch: int = 1, tensor_parallel: int = 1, dtype: str = "bfloat16") -> int:
    """Bytes of weights that one decode step reads: all layers, final norm, LM head and one embedding row per sequence."""
    elements = _elements(RankGeometry(model, tensor_parallel)) + batch * model.hidden
    return elements * DTYPE_BYTES[dtype]


def resident_weight_bytes(model: Model, tensor_parallel: int = 1, dtype: str = "bfloat16") -> int:
    """Bytes that the weights occupy: what a step reads and the whole input embedding, unless it is the LM head."""
    geometry = RankGeometry(model, tensor_parallel)
    embedding = 0 if model.tied_embeddings else _product(geometry.head)
    return (_elements(geometry) + embedding) * DTYPE_BYTES[dtype]


def _elements(geometry: RankGeometry) -> int:
    """Weights of all layers, final norm and LM head."""
    layer = sum(_product(shape) for shape in geometry.layer.values())
    return geometry.model.layers * layer + geometry.model.hidden + _product(geometry.head)


def _product(shape: tuple[int, ...]) -> int:
    product = 1
    for extent in shape:
        product *= extent
    return product


@dataclass(frozen=True)
class LayerWeights:
    """One layer, shapes as in `RankGeometry.layer`; None where the model has no such weight."""

    attention_gain: torch.Tensor
    qkv: torch.Tensor
    output: torch.Tensor
    mlp_gain: torch.Tensor
    gate_up: torch.Tensor
    down: torch.Tensor
    qkv_bias: torch.Tensor | None = None
    query_gain: torch.Tensor | None = None
    key_gain: torch.Tensor | None = None

    @property
    def head_gains(self) -> tuple[torch.Tensor, torch.Tensor] | None:
        return None if self.query_gain is None or self.key_gain is None else (self.query_gain, self.key_gain)


@dataclass(frozen=True)
class Weights:
    """A whole rank.  embedding and head: [V, hidden], the same tensor if tied; final_gain: [hidden]."""

    geometry: RankGeometry
    embedding: torch.Tensor
    layers: tuple[LayerWeights, ...]
    final_gain: torch.Tensor
    head: torch.Tensor


def random_weights(geometry: RankGeometry, dtype: torch.dtype, device: torch.device | str, seed: int) -> Weights:
    """Normal weights of standard deviation 1 / sqrt(fan in), generated on the device, different in every layer.

    Norm gains are near one and biases small, so that every projection of a normed vector has unit variance: queries and
    keys look like the workload's, logits stay finite, the residual grows with the square root of the depth.
    """
    import torch

    generator = torch.Generator(device).manual_seed(seed)

    def tensor(name: str, shape: tuple[int, ...]) -> torch.Tensor:
        mean, deviation = {"gain": (1.0, 0.1), "bias": (0.0, 0.1)}.get(name.rsplit("_", 1)[-1], (0.0, shape[-1] ** -0.5))
        return torch.empty(shape, dtype=dtype, device=device).normal_(mean, deviation, generator=generator)

    head = tensor("head", geometry.head)
    return Weights(
        geometry,
        embedding=head if geometry.model.tied_embeddings else tensor("embedding", geometry.head),
        layers=tuple(
            LayerWeights(**{name: tensor(name, shape) for name, shape in geometry.layer.items()})
            for _ in range(geometry.model.layers)
        ),
        final_gain=tensor("final_gain", (geometry.model.hidden,)),
        head=head,
    )
