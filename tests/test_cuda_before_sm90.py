"""The code that devices before sm_90 get (no clusters, no bulk copies, no early launch), on whatever GPU there is.

The driver translates the PTX of that code for the device at hand.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping

import pytest
import torch
from kernel_cases import assert_close_output, assert_good_table, make, make_query, make_stages, randn

from locks_kernels import reference
from locks_kernels.cuda import program
from locks_kernels.decode import LocksDecoder
from locks_kernels.shapes import DecodeShape, SelectOptions

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

SHAPES = [
    DecodeShape(8, 2),
    DecodeShape(8, 1, page_size=64),
    DecodeShape(9, 3, 64, 16, 8, "float16"),
    DecodeShape(5, 1, 256, 64, 4),
    DecodeShape(32, 8, 128, 32, 2),
]


def compile_ptx(source: str, macros: Mapping[str, object], arch: str) -> bytes:
    from cuda.bindings import nvrtc

    assert arch == "sm_80"
    text = (program.SOURCES / f"{source}.cu").read_bytes()
    defined = [f"-D{name}={value}" for name, value in macros.items()]
    options = [o.encode() for o in ("-arch=compute_80", "-std=c++17", f"-I{program.SOURCES}", *defined)]
    _, unit = nvrtc.nvrtcCreateProgram(text, source.encode(), 0, [], [])
    (error,) = nvrtc.nvrtcCompileProgram(unit, len(options), options)
    assert error == nvrtc.nvrtcResult.NVRTC_SUCCESS
    ptx = bytearray(nvrtc.nvrtcGetPTXSize(unit)[1])
    nvrtc.nvrtcGetPTX(unit, ptx)
    return re.sub(rb"\.version \d+\.\d+", b".version 8.0", bytes(ptx), count=1)  # which older drivers than NVRTC know, too


@pytest.fixture
def as_sm_80(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (8, 0))
    monkeypatch.setattr(program, "compile_cubin", compile_ptx)
    program.load.cache_clear()
    yield
    program.load.cache_clear()


@pytest.mark.parametrize("shape", SHAPES, ids=repr)
def test_steps_equal_the_reference(as_sm_80: None, shape: DecodeShape) -> None:
    page = shape.page_size
    options = SelectOptions(6 * page)
    cache, sequences = make(shape, (0, 1, 3 * page - 1, 400 * page - 2, 33 * page), room=1)
    make_stages("cuda", cache, sequences, options)  # skips where unsupported
    decoder = LocksDecoder(cache, sequences, options, "cuda")
    assert not decoder.stages.score_kernel.overlaps and decoder.stages.attend_blocks == 1
    cache.summaries.fill_(0xFF)
    decoder.prefill()
    for step in range(4):
        sequences.seq_lens += (sequences.seq_lens > 0).int()
        query = make_query(shape, 5, seed=step)
        keys, values = (randn(5, shape.kv_heads, shape.head_dim, seed=9 * step + i).to(query.dtype) for i in (1, 2))
        out = decoder.step(query, keys, values)
        combined = reference.combine(reference.score(query, cache, sequences), shape.kv_heads, options.combine)
        assert_good_table(decoder.tables, combined, sequences, shape, options)
        assert_close_output(out, reference.attend(query, cache, sequences, decoder.tables)[0], shape.dtype)
