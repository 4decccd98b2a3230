"""Summaries of complete pages, and the append that completes them: kernels, then their launchers.

One kernel goes from keys to packed records.  The eigenvectors of the centred Gram matrix come from one-sided Jacobi
rotations of its rows: in round r, row i is paired with row i ^ r, so a round rotates every row once and PAGE - 1 rounds
visit every pair.  At the end row i is eigenvalue i times eigenvector i.  Everything is fp32.
"""

# The bodies of kernels are not Python to a type checker.
# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

import torch
import triton
import triton.language as tl

from locks_kernels.cache import PagedCache, Sequences
from locks_kernels.reference import EIGENVALUE_FLOOR, SCALE_FLOOR
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
def _leading_eigenvectors(gram, BLOCK_P: tl.constexpr, PAGE: tl.constexpr, SWEEPS: tl.constexpr):
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
def _summarise(
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

    # centroid, natural order of channels
    centre_even = tl.sum(even, 1) / PAGE
    centre_odd = tl.sum(odd, 1) / PAGE
    largest = tl.maximum(tl.max(tl.abs(centre_even), 1), tl.max(tl.abs(centre_odd), 1))
    scale, bits = _bf16_scale(largest, 127.0)
    tl.store(half_ptr + AT_CENTROID_SCALE // 2, bits, mask=mask_p)
    centroid = tl.join(
        _quantise(centre_even / scale[:, None], -127.0, 127.0), _quantise(centre_odd / scale[:, None], -127.0, 127.0)
    )
    byte_ptr = record_ptr[:, None, None] + AT_CENTROID + 2 * offs_c[None, :, None] + tl.arange(0, 2)[None, None, :]
    tl.store(byte_ptr, centroid.to(tl.uint8), mask=mask_p[:, None, None])

    even = even - centre_even[:, None, :]
    odd = odd - centre_odd[:, None, :]
    gram = tl.dot(even, tl.permute(even, (0, 2, 1)), input_precision="ieee")
    gram = tl.dot(odd, tl.permute(odd, (0, 2, 1)), acc=gram, input_precision="ieee")
    vectors = _leading_eigenvectors(gram, BLOCK_P, PAGE, SWEEPS)

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


@triton.jit
def _build_kernel(
    key_ptr,
    summary_ptr,
    ids_ptr,
    count,
    stride_kp,
    stride_kh,
    stride_kt,
    stride_sp,
    stride_sh,
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
    h = tl.program_id(1).to(tl.int64)
    offs_p = tl.program_id(0) * BLOCK_P + tl.arange(0, BLOCK_P)
    page = tl.load(ids_ptr + offs_p, mask=offs_p < count, other=-1).to(tl.int64)
    mask_p = page >= 0
    # keys [BLOCK_P, PAGE, HALF, 2]
    offs_t = tl.arange(0, PAGE)[None, :, None]
    offs_d = tl.arange(0, 2 * HALF)[None, None, :]
    k_ptr = key_ptr + (page * stride_kp)[:, None, None] + h * stride_kh + offs_t * stride_kt + offs_d
    keys = tl.load(k_ptr, mask=mask_p[:, None, None], other=0.0).to(tl.float32)
    even, odd = tl.split(tl.reshape(keys, (BLOCK_P, PAGE, HALF, 2)))
    _summarise(
        even,
        odd,
        summary_ptr + page * stride_sp + h * stride_sh,
        mask_p,
        BLOCK_P,
        HALF,
        PAGE,
        RANK,
        SWEEPS,
        AT_COEFFICIENTS,
        AT_CENTROID,
        AT_COEFFICIENT_SCALE,
        AT_BASIS_SCALE,
        AT_CENTROID_SCALE,
    )


@triton.jit
def _append_kernel(
    key_ptr,
    value_ptr,
    summary_ptr,
    new_key_ptr,
    new_value_ptr,
    table_ptr,
    seq_lens_ptr,
    stride_kp,
    stride_kh,
    stride_kt,
    stride_sp,
    stride_sh,
    stride_nb,
    stride_nh,
    stride_vb,
    stride_vh,
    stride_tb,
    FINALISE: tl.constexpr,
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
    h = tl.program_id(0).to(tl.int64)
    b = tl.program_id(1).to(tl.int64)
    tokens = tl.load(seq_lens_ptr + b)
    if tokens <= 0:
        return
    last = tokens - 1
    slot = last % PAGE
    page = tl.load(table_ptr + b * stride_tb + last // PAGE).to(tl.int64)
    if page < 0:
        return
    offs_d = tl.arange(0, 2 * HALF)
    page_at = page * stride_kp + h * stride_kh
    new_key = tl.load(new_key_ptr + b * stride_nb + h * stride_nh + offs_d).to(key_ptr.dtype.element_ty)
    new_value = tl.load(new_value_ptr + b * stride_vb + h * stride_vh + offs_d).to(value_ptr.dtype.element_ty)
    tl.store(key_ptr + page_at + slot * stride_kt + offs_d, new_key)
    tl.store(value_ptr + page_at + slot * stride_kt + offs_d, new_value)
    if FINALISE:  # noqa: SIM102  (decided at compile time, the next one at run time)
        if slot == PAGE - 1:
            # The new row comes from its source: the store above need not be visible to this program's other threads.
            offs_t = tl.arange(0, PAGE)[None, :, None]
            old_ptr = key_ptr + page_at + offs_t * stride_kt + offs_d[None, None, :]
            old = tl.load(old_ptr, mask=offs_t < PAGE - 1, other=0.0).to(tl.float32)
            keys = tl.where(offs_t < PAGE - 1, old, new_key.to(tl.float32)[None, None, :])  # [1, PAGE, 2 * HALF]
            even, odd = tl.split(tl.reshape(keys, (BLOCK_P, PAGE, HALF, 2)))
            one = tl.arange(0, BLOCK_P)
            _summarise(
                even,
                odd,
                summary_ptr + page * stride_sp + h * stride_sh + one,
                one == 0,
                BLOCK_P,
                HALF,
                PAGE,
                RANK,
                SWEEPS,
                AT_COEFFICIENTS,
                AT_CENTROID,
                AT_COEFFICIENT_SCALE,
                AT_BASIS_SCALE,
                AT_CENTROID_SCALE,
            )


def _constants(cache: PagedCache) -> dict[str, int]:
    shape, at = cache.shape, RecordLayout.of(cache.shape).offsets
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


def build(cache: PagedCache, page_ids: torch.Tensor) -> None:
    """`reference.build`: summarise the physical pages `page_ids`, int32 or int64 [n], contiguous; negative ones are skipped.

    The padding behind a record's fields is left as it is.
    """
    if page_ids.numel() == 0:
        return
    elements = 8192 if triton.knobs.runtime.interpret else 1024  # of a Gram matrix: one page of 16 per warp
    block = max(1, elements // cache.shape.page_size**2)
    _build_kernel[(triton.cdiv(page_ids.numel(), block), cache.shape.kv_heads)](
        cache.keys,
        cache.summaries,
        page_ids,
        page_ids.numel(),
        *cache.keys.stride()[:3],
        *cache.summaries.stride()[:2],
        BLOCK_P=block,
        **_constants(cache),
        num_warps=4,
    )


def append(cache: PagedCache, sequences: Sequences, keys: torch.Tensor, values: torch.Tensor) -> None:
    """`reference.append`: write the token at `seq_lens - 1`.  keys, values: [B, H, D], last axis contiguous."""
    _append(cache, sequences, keys, values, finalise=False)


def append_finalise(cache: PagedCache, sequences: Sequences, keys: torch.Tensor, values: torch.Tensor) -> None:
    """`append`, then `reference.finalise` in the same launch."""
    _append(cache, sequences, keys, values, finalise=True)


def _append(cache: PagedCache, sequences: Sequences, keys: torch.Tensor, values: torch.Tensor, finalise: bool) -> None:
    _append_kernel[(cache.shape.kv_heads, sequences.batch)](
        cache.keys,
        cache.values,
        cache.summaries,
        keys,
        values,
        sequences.block_table,
        sequences.seq_lens,
        *cache.keys.stride()[:3],
        *cache.summaries.stride()[:2],
        *keys.stride()[:2],
        *values.stride()[:2],
        sequences.block_table.stride(0),
        FINALISE=finalise,
        BLOCK_P=1,
        **_constants(cache),
        num_warps=1 if cache.shape.page_size == 16 else 4,
    )
