"""From the keys of pages to packed records, inside a program: what both kernels of build.py do.

The eigenvectors of the centred Gram matrix come from one-sided Jacobi rotations of its rows: in round r, row i is paired
with row i ^ r, so a round rotates every row once and PAGE - 1 rounds visit every pair.  At the end row i is eigenvalue i
times eigenvector i.  Everything is fp32.
"""

# The bodies of kernels are not Python to a type checker.
# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

import triton
import triton.language as tl

from locks_kernels.reference import EIGENVALUE_FLOOR, SCALE_FLOOR
from locks_kernels.shapes import DecodeShape
from locks_kernels.summary import RecordLayout

SIGMA_FLOOR = tl.constexpr(EIGENVALUE_FLOOR**0.5)
SCALE_LEAST = tl.constexpr(SCALE_FLOOR)
ROUND_TO_EVEN = tl.constexpr(12582912.0)  # 1.5 * 2^23: adding and subtracting it rounds a small fp32 number
ROWS = tl.constexpr(16)  # leading eigenvectors in hand, at least the largest rank and what a matrix product takes


@triton.jit
def _bf16_scale(largest, BOUND: tl.constexpr):
    """largest / BOUND, floored and rounded to bf16: the fp32 value, and the 16 bits to store."""
    bits = tl.maximum(largest / BOUND, SCALE_LEAST).to(tl.int32, bitcast=True)
    bits = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
    return (bits << 16).to(tl.float32, bitcast=True), bits.to(tl.int16)


@triton.jit
def _quantise(values, LOWEST: tl.constexpr, HIGHEST: tl.constexpr):
    rounded = (values + ROUND_TO_EVEN) - ROUND_TO_EVEN
    return tl.minimum(tl.maximum(rounded, LOWEST), HIGHEST).to(tl.int32)


@triton.jit
def leading_eigenvectors(gram, BLOCK_P: tl.constexpr, PAGE: tl.constexpr, SWEEPS: tl.constexpr):
    """Unit rows [BLOCK_P, ROWS, PAGE] of symmetric matrices [BLOCK_P, PAGE, PAGE], largest eigenvalue first.

    A zero eigenvalue gives a zero row.
    """
    offs_i = tl.arange(0, PAGE)
    trace = tl.sum(tl.sum(tl.where((offs_i[:, None] == offs_i[None, :])[None, :, :], gram, 0.0), 2), 1)
    rows = gram / tl.maximum(trace, 1e-30)[:, None, None]
    index = tl.broadcast_to(offs_i[None, :, None], (BLOCK_P, PAGE, PAGE))
    for _ in range(SWEEPS):
        for r in range(1, PAGE):
            others = tl.gather(rows, index ^ r, 1)
            own_norm = tl.sum(rows * rows, 2)
            other_norm = tl.sum(others * others, 2)
            product = tl.sum(rows * others, 2)  # [BLOCK_P, PAGE]
            rotate = product != 0.0
            zeta = (other_norm - own_norm) / tl.where(rotate, 2.0 * product, 1.0)
            lower = (offs_i < (offs_i ^ r))[None, :]
            sign = tl.where((zeta > 0.0) | ((zeta == 0.0) & lower), 1.0, -1.0)
            tangent = tl.where(rotate, sign / (tl.abs(zeta) + tl.sqrt(1.0 + zeta * zeta)), 0.0)
            cosine = 1.0 / tl.sqrt(1.0 + tangent * tangent)
            rows = cosine[:, :, None] * (rows - tangent[:, :, None] * others)

    # order[k]: the row with the k-th largest norm, ties to the first
    norm = tl.sqrt(tl.sum(rows * rows, 2))  # [BLOCK_P, PAGE]
    before = (norm[:, None, :] > norm[:, :, None]) | (
        (norm[:, None, :] == norm[:, :, None]) & (offs_i[None, None, :] < offs_i[None, :, None])
    )
    rank = tl.sum(before.to(tl.int32), 2)
    offs_r = tl.arange(0, ROWS)
    order = tl.sum(tl.where(rank[:, None, :] == offs_r[None, :, None], offs_i[None, None, :], 0), 2)  # [BLOCK_P, ROWS]
    leading = tl.gather(rows, tl.broadcast_to(order[:, :, None], (BLOCK_P, ROWS, PAGE)), 1)
    length = tl.sqrt(tl.sum(leading * leading, 2))
    return leading / tl.maximum(length, 1e-30)[:, :, None]


@triton.jit
def store_summaries(
    even,
    odd,
    record_ptr,
    mask_p,
    BLOCK_P: tl.constexpr,
    HALF: tl.constexpr,
    PAGE: tl.constexpr,
    RANK: tl.constexpr,
    SWEEPS: tl.constexpr,
    AT_COEFFICIENTS: tl.constexpr,
    AT_CENTROID: tl.constexpr,
    AT_COEFFICIENT_SCALE: tl.constexpr,
    AT_BASIS_SCALE: tl.constexpr,
    AT_CENTROID_SCALE: tl.constexpr,
):
    """Store the records of pages whose even and odd channels are fp32 [BLOCK_P, PAGE, HALF] at record_ptr [BLOCK_P]."""
    offs_c = tl.arange(0, HALF)
    offs_t = tl.arange(0, PAGE)
    offs_r = tl.arange(0, ROWS)
    mask_r = (offs_r < RANK)[None, :] & mask_p[:, None]  # [BLOCK_P, ROWS]
    half_ptr = record_ptr.to(tl.pointer_type(tl.int16))

    # centroid, natural order of channels; divided exactly, since a mean of bfloat16 keys may lie just between two steps
    centre_even = tl.sum(even, 1) / PAGE
    centre_odd = tl.sum(odd, 1) / PAGE
    largest = tl.maximum(tl.max(tl.abs(centre_even), 1), tl.max(tl.abs(centre_odd), 1))
    scale, bits = _bf16_scale(largest, 127.0)
    tl.store(half_ptr + AT_CENTROID_SCALE // 2, bits, mask=mask_p)
    centroid = tl.join(
        _quantise(tl.div_rn(centre_even, scale[:, None]), -127.0, 127.0),
        _quantise(tl.div_rn(centre_odd, scale[:, None]), -127.0, 127.0),
    )
    byte_ptr = record_ptr[:, None, None] + AT_CENTROID + 2 * offs_c[None, :, None] + tl.arange(0, 2)[None, None, :]
    tl.store(byte_ptr, centroid.to(tl.uint8), mask=mask_p[:, None, None])

    even = even - centre_even[:, None, :]
    odd = odd - centre_odd[:, None, :]
    gram = tl.dot(even, tl.permute(even, (0, 2, 1)), input_precision="ieee")
    gram = tl.dot(odd, tl.permute(odd, (0, 2, 1)), acc=gram, input_precision="ieee")
    vectors = leading_eigenvectors(gram, BLOCK_P, PAGE, SWEEPS)

    # basis rows [BLOCK_P, ROWS, HALF]; their length is the singular value
    even = tl.dot(vectors, even, input_precision="ieee")
    odd = tl.dot(vectors, odd, input_precision="ieee")
    sigma = tl.maximum(tl.sqrt(tl.sum(even * even, 2) + tl.sum(odd * odd, 2)), SIGMA_FLOOR)
    even = even / sigma[:, :, None]
    odd = odd / sigma[:, :, None]
    largest = tl.maximum(tl.max(tl.abs(even), 2), tl.max(tl.abs(odd), 2))
    scale, bits = _bf16_scale(largest, 7.0)
    tl.store(half_ptr[:, None] + AT_BASIS_SCALE // 2 + offs_r[None, :], bits, mask=mask_r)
    low = _quantise(even / scale[:, :, None], -8.0, 7.0) & 15
    high = _quantise(odd / scale[:, :, None], -8.0, 7.0) & 15
    byte_ptr = record_ptr[:, None, None] + offs_r[None, :, None] * HALF + offs_c[None, None, :]
    tl.store(byte_ptr, (low | (high << 4)).to(tl.uint8), mask=mask_r[:, :, None])

    coefficients = tl.where((offs_r < RANK)[None, :, None], vectors * sigma[:, :, None], 0.0)  # [BLOCK_P, ROWS, PAGE]
    scale, bits = _bf16_scale(tl.max(tl.abs(coefficients), 1), 127.0)
    tl.store(half_ptr[:, None] + AT_COEFFICIENT_SCALE // 2 + offs_t[None, :], bits, mask=mask_p[:, None])
    byte_ptr = record_ptr[:, None, None] + AT_COEFFICIENTS + offs_t[None, None, :] * RANK + offs_r[None, :, None]
    quantised = _quantise(coefficients / scale[:, None, :], -127.0, 127.0)
    tl.store(byte_ptr, quantised.to(tl.uint8), mask=mask_r[:, :, None])


def constants(shape: DecodeShape) -> dict[str, int]:
    """The compile-time arguments of `store_summaries` that follow from the shape."""
    at = RecordLayout.of(shape).offsets
    return {
        "HALF": shape.head_dim // 2,
        "PAGE": shape.page_size,
        "RANK": shape.rank,
        "SWEEPS": shape.page_size.bit_length() + 1,  # 6, 7, 8: one more than random and graded pages needed
        "AT_COEFFICIENTS": at["coefficients"],
        "AT_CENTROID": at["centroid"],
        "AT_COEFFICIENT_SCALE": at["coefficient_scale"],
        "AT_BASIS_SCALE": at["basis_scale"],
        "AT_CENTROID_SCALE": at["centroid_scale"],
    }
