"""The packed summary of one page of one KV head: fields, sizes, pack and unpack.

Field widths are those of LOCKS r8i4 (arXiv 2607.24555 and the author's package): int4 basis, int8 coefficients and
centroid, bfloat16 scales; 5D + 10*PAGE + 18 = 818 bytes at D 128, PAGE 16, R 8.  The order of the fields is ours, so
that every field starts where a 16-byte load may start; a record is padded to a multiple of 64 bytes (832).
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from functools import cached_property
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

    from locks_kernels.shapes import DecodeShape

RECORD_ALIGNMENT = 64


@dataclass(frozen=True)
class RecordLayout:
    """Byte offsets of the fields inside one record."""

    head_dim: int
    page_size: int
    rank: int

    @classmethod
    def of(cls, shape: DecodeShape) -> RecordLayout:
        return cls(shape.head_dim, shape.page_size, shape.rank)

    @cached_property
    def sizes(self) -> dict[str, int]:
        """Bytes of each field, in the order they are stored."""
        return {
            "basis": self.rank * self.head_dim // 2,
            "coefficients": self.page_size * self.rank,
            "centroid": self.head_dim,
            "coefficient_scale": 2 * self.page_size,
            "basis_scale": 2 * self.rank,
            "centroid_scale": 2,
        }

    @cached_property
    def offsets(self) -> dict[str, int]:
        offsets, at = {}, 0
        for name, size in self.sizes.items():
            offsets[name], at = at, at + size
        return offsets

    @property
    def payload_bytes(self) -> int:
        """Bytes that carry information (818)."""
        return sum(self.sizes.values())

    @property
    def record_bytes(self) -> int:
        """Bytes that a record occupies (832)."""
        return -(-self.payload_bytes // RECORD_ALIGNMENT) * RECORD_ALIGNMENT


@dataclass
class SummaryFields:
    """Quantised summary of pages; leading axes are free (here `...`).

    basis              int8  [..., R, D]    values -8..7, one row per basis vector, largest eigenvalue first
    coefficients       int8  [..., PAGE, R]
    centroid           int8  [..., D]
    coefficient_scale  bf16  [..., PAGE]    one per token
    basis_scale        bf16  [..., R]       one per basis vector
    centroid_scale     bf16  [...]
    """

    basis: torch.Tensor
    coefficients: torch.Tensor
    centroid: torch.Tensor
    coefficient_scale: torch.Tensor
    basis_scale: torch.Tensor
    centroid_scale: torch.Tensor

    def reconstruct(self) -> torch.Tensor:
        """Keys that the summary stands for, fp32 [..., PAGE, D]: centroid + coefficients @ basis."""
        basis = self.basis.float() * self.basis_scale.float()[..., None]
        coefficients = self.coefficients.float() * self.coefficient_scale.float()[..., None]
        centroid = self.centroid.float() * self.centroid_scale.float()[..., None]
        return centroid[..., None, :] + coefficients @ basis


def pack(summary: SummaryFields) -> torch.Tensor:
    """Records as uint8 [..., record_bytes]; two basis channels share a byte, the even one in the low nibble."""
    import torch

    *lead, rank, head_dim = summary.basis.shape
    layout = RecordLayout(head_dim, summary.coefficients.shape[-2], rank)
    nibbles = summary.basis.view(torch.uint8) & 0xF
    stored = {
        "basis": nibbles[..., 0::2] | (nibbles[..., 1::2] << 4),
        "centroid_scale": summary.centroid_scale[..., None],
    }
    records = torch.zeros(*lead, layout.record_bytes, dtype=torch.uint8, device=summary.basis.device)
    for field in fields(SummaryFields):
        at = layout.offsets[field.name]
        value = stored.get(field.name, getattr(summary, field.name))
        raw = value.contiguous().view(torch.uint8).reshape(*lead, layout.sizes[field.name])
        records[..., at : at + layout.sizes[field.name]] = raw
    return records


def unpack(records: torch.Tensor, layout: RecordLayout) -> SummaryFields:
    """The fields of uint8 records [..., record_bytes]; the inverse of `pack`."""
    import torch

    lead = records.shape[:-1]

    def raw(name: str, dtype: torch.dtype, *shape: int) -> torch.Tensor:
        at = layout.offsets[name]
        part = records[..., at : at + layout.sizes[name]].clone(memory_format=torch.contiguous_format)
        return part.view(dtype).reshape(*lead, *shape)

    rank, page, dim = layout.rank, layout.page_size, layout.head_dim
    packed = raw("basis", torch.uint8, rank, dim // 2)
    nibbles = torch.stack((packed & 0xF, packed >> 4), dim=-1).reshape(*lead, rank, dim)
    return SummaryFields(
        basis=((nibbles ^ 8).to(torch.int8) - 8),
        coefficients=raw("coefficients", torch.int8, page, rank),
        centroid=raw("centroid", torch.int8, dim),
        coefficient_scale=raw("coefficient_scale", torch.bfloat16, page),
        basis_scale=raw("basis_scale", torch.bfloat16, rank),
        centroid_scale=raw("centroid_scale", torch.bfloat16),
    )
