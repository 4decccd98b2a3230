"""The kernels around attention against the same functions in torch."""

from __future__ import annotations

import pytest
import torch

from locks_kernels import layer_ops
from locks_kernels.cache import PagedCache, Sequences
from locks_kernels.layer_ops import NewToken
from locks_kernels.shapes import DecodeShape

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"

# Error of one stored value; Triton's interpreter truncates to bfloat16, where a device rounds.
ROUNDING = {torch.float16: 2**-11, torch.bfloat16: 2**-7}


def random_tensor(dtype: torch.dtype, *shape: int, scale: float = 1.0) -> torch.Tensor:
    generator = torch.Generator(DEVICE).manual_seed(sum(shape))
    return (torch.randn(shape, generator=generator, device=DEVICE) * scale).to(dtype)


def relative_error(found: torch.Tensor, expected: torch.Tensor) -> float:
    return float((found.float() - expected.float()).norm() / expected.float().norm())


def wide(*tensors: torch.Tensor | None) -> list[torch.Tensor | None]:
    return [tensor if tensor is None else tensor.float() for tensor in tensors]


@pytest.fixture
def fused(monkeypatch):
    """With the fused kernels for all batches that they can take."""
    pytest.importorskip("triton")
    from locks_kernels import layer_triton

    monkeypatch.setattr(layer_triton, "GEMV_BATCH", 4)
    return layer_triton


@pytest.mark.parametrize("dtype", ROUNDING)
@pytest.mark.parametrize("batch", [1, 2, 3, 4, 6])
@pytest.mark.parametrize(("width", "rows"), [(1096, 10), (128, 19)])
def test_projections_equal_torch(fused, dtype, batch, width, rows):
    x, gain = random_tensor(dtype, batch, width), random_tensor(dtype, width)
    weight = random_tensor(dtype, 2 * rows, width, scale=width**-0.5)
    tolerance = ROUNDING[dtype] * (1 if batch <= 4 else 2)  # above batch 4 the normed vector is stored, too
    found = x.new_full((batch, 2 * rows), float("nan"))
    expected = torch.empty_like(found, dtype=torch.float32)
    layer_ops.norm_linear(*wide(x, gain, weight), expected)
    fused.norm_linear(x, gain, weight, found)
    assert relative_error(found, expected) < tolerance
    found = x.new_full((batch, rows), float("nan"))
    expected = torch.empty_like(found, dtype=torch.float32)
    layer_ops.norm_gate_up(*wide(x, gain, weight), expected)
    fused.norm_gate_up(x, gain, weight, found)
    assert relative_error(found, expected) < tolerance
    found = random_tensor(dtype, batch, 2 * rows)
    expected = found.float()
    layer_ops.linear_add(*wide(x, weight), expected)
    fused.linear_add(x, weight, found)
    assert relative_error(found, expected) < tolerance


def test_rope_table_is_exact_at_a_million_tokens(fused):
    seq_lens = torch.tensor([1, 2, 17, 131072, 1 << 20], dtype=torch.int32, device=DEVICE)
    found = torch.empty(5, 128, device=DEVICE)
    fused.rope_table(seq_lens, found)
    angle = (seq_lens.double() - 1)[:, None].cpu() / 500_000.0 ** (torch.arange(64, dtype=torch.float64) / 64)
    expected = torch.cat((angle.cos(), angle.sin()), 1)
    assert (found.cpu() - expected).abs().max() < 2e-6
    layer_ops.rope_table(seq_lens, found)
    assert (found.cpu() - expected).abs().max() < 2e-6


@pytest.mark.parametrize("lengths", [(33,), (33, 0, 16, 1), (33, 0, 16, 1, 48)])
@pytest.mark.parametrize("extra", ["", "bias", "head_gains"])
def test_norm_qkv_equals_torch_and_appends(fused, lengths, extra):
    query_heads, kv_heads, dim = (2, 2, 64) if len(lengths) > 1 else (3, 1, 128)
    half, batch, width, rows = torch.float16, len(lengths), 200, (query_heads + 2 * kv_heads) * dim
    shape = DecodeShape(query_heads, kv_heads, dim, dtype="float16")
    seq_lens = torch.tensor(lengths, dtype=torch.int32, device=DEVICE)
    sequences = Sequences(torch.randperm(3 * batch, device=DEVICE).view(batch, 3).int(), seq_lens)
    table = torch.empty(batch, dim, device=DEVICE)
    layer_ops.rope_table(seq_lens, table)
    inputs = (random_tensor(half, batch, width), random_tensor(half, width), random_tensor(half, rows, width, scale=0.1))
    bias = random_tensor(half, rows) if extra == "bias" else None
    gains = (random_tensor(half, dim), random_tensor(half, dim, scale=2.0)) if extra == "head_gains" else None
    results = []
    for ops, dtype in ((layer_ops, torch.float32), (fused, half)):
        cache = PagedCache.allocate(shape, 3 * batch, DEVICE)
        cache.keys.fill_(7.0)
        cache.values.fill_(9.0)
        heads = (query_heads, kv_heads, kv_heads)
        placed, bare = ([torch.empty(batch, n, dim, dtype=dtype, device=DEVICE) for n in heads] for _ in range(2))
        cast = [None if part is None else part.to(dtype) for part in (*inputs, bias)]
        head_gains = None if gains is None else tuple(gain.to(dtype) for gain in gains)
        ops.norm_qkv(*cast, table, head_gains, NewToken(*placed, (cache, sequences)))
        ops.norm_qkv(*cast, table, head_gains, NewToken(*bare))
        assert all(torch.equal(one, other) for one, other in zip(bare, placed, strict=True))
        results.append((*placed, cache.keys, cache.values))
    for expected, found in zip(*results, strict=True):
        torch.testing.assert_close(found.float(), expected.float(), rtol=8 * ROUNDING[half], atol=0.01)
        assert relative_error(found, expected) < 3 * ROUNDING[half]
    written = (results[1][3] != 7.0).any(-1).sum()
    assert written == kv_heads * sum(length > 0 for length in lengths), "one slot per live sequence, none for the empty one"


@pytest.mark.gpu
@pytest.mark.skipif(DEVICE == "cpu", reason="needs a CUDA device")
@pytest.mark.parametrize("dtype", ROUNDING)
@pytest.mark.parametrize(("width", "rows"), [(64, 1), (576, 131), (4096, 14336), (18944, 3584), (4096, 70_001)])
def test_cuda_projections_equal_torch(fused, dtype, width, rows):
    """Columns that do not fill a warp's load, rows that do not fill a block, more rows than a wave takes; several in a row,
    each of which starts before the one ahead has ended.
    """
    from locks_kernels.cuda import projection

    assert projection.unsupported(width, torch.device("cuda")) is None
    x, gain, bias = random_tensor(dtype, 1, width), random_tensor(dtype, width), random_tensor(dtype, rows)
    weight = random_tensor(dtype, rows, width, scale=width**-0.5)
    square = random_tensor(dtype, width, width, scale=0.1 * width**-0.5)
    normed = layer_ops._rms_norm(x.float(), gain)
    assert torch.equal(normed.isfinite(), torch.ones_like(normed, dtype=torch.bool))
    expected = normed @ weight.float().T
    out = x.new_full((1, rows), float("nan"))
    projection.gemv(x, weight, out, gain)
    assert relative_error(out, expected) < ROUNDING[dtype]
    projection.gemv(x, weight, out, gain, bias, "bias")
    assert relative_error(out, expected + bias.float()) < ROUNDING[dtype]
    projection.gemv(x, weight, out, epilogue="add")
    assert relative_error(out, expected + bias.float() + x.float() @ weight.float().T) < 2 * ROUNDING[dtype]
    if rows % 2 == 0:
        half = out[:, : rows // 2].contiguous()
        projection.gemv(x, weight, half, gain, epilogue="silu_mul")
        gate, up = expected.chunk(2, -1)
        assert relative_error(half, torch.nn.functional.silu(gate) * up) < ROUNDING[dtype]
    chained, plain = x.clone(), x.float()
    for _ in range(20):  # reads what the launch before wrote
        projection.gemv(chained, square, chained, epilogue="add")
        plain = plain.to(dtype).float()
        plain = plain + plain @ square.float().T
    assert relative_error(chained, plain) < 20 * ROUNDING[dtype]


@pytest.mark.gpu
@pytest.mark.skipif(DEVICE == "cpu", reason="needs a CUDA device")
@pytest.mark.parametrize("biased", (False, True))
@pytest.mark.parametrize(("width", "heads", "dim"), [(4096, (32, 8), 128), (576, (9, 3), 64), (3584, (28, 4), 128)])
def test_cuda_norm_qkv_equals_torch_and_appends(fused, width, heads, dim, biased):
    shape = DecodeShape(*heads, dim)
    rows = (heads[0] + 2 * heads[1]) * dim
    sequences = Sequences(torch.tensor([[2, 0, 1]], device=DEVICE).int(), torch.tensor([33], device=DEVICE).int())
    table = torch.empty(1, dim, device=DEVICE)
    layer_ops.rope_table(sequences.seq_lens, table)
    x, gain = random_tensor(torch.bfloat16, 1, width), random_tensor(torch.bfloat16, width)
    weight = random_tensor(torch.bfloat16, rows, width, scale=width**-0.5)
    bias = random_tensor(torch.bfloat16, rows) if biased else None
    results = []
    for ops, dtype in ((layer_ops, torch.float32), (fused, torch.bfloat16)):
        cache = PagedCache.allocate(shape, 3, DEVICE)
        cache.keys.fill_(7.0)
        cache.values.fill_(9.0)
        placed = [torch.empty(1, n, dim, dtype=dtype, device=DEVICE) for n in (heads[0], heads[1], heads[1])]
        cast = [None if part is None else part.to(dtype) for part in (x, gain, weight, bias)]
        ops.norm_qkv(*cast, table, None, NewToken(*placed, (cache, sequences)))
        results.append((*placed, cache.keys, cache.values))
    for expected, found in zip(*results, strict=True):
        assert relative_error(found, expected) < 2 * ROUNDING[torch.bfloat16]
    assert (results[1][3] != 7.0).any(-1).sum() == heads[1]
