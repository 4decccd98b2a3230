"""Every CUDA C++ kernel compiles with NVRTC for every architecture, without spills and within a table of registers, and what
the kernel before it writes is read behind the wait for it.

Runs without a GPU.  The table is what a block may use at its launch size, or what keeps two kernels side by side on an SM
(score.cu tells why that matters); a compiler that needs more than it must be looked at.
"""

from __future__ import annotations

import hashlib
import importlib.util
import re
import subprocess
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from locks_kernels.cuda import projection
from locks_kernels.cuda.launch import ATTEND_RING, SELECT_THREADS, Launch
from locks_kernels.cuda.program import compile_cubin
from locks_kernels.shapes import DecodeShape

ARCHITECTURES = ("sm_80", "sm_90a", "sm_100a")
SHARED_BYTES = {"sm_80": 163 << 10, "sm_90a": 227 << 10, "sm_100a": 227 << 10}
SHAPES = {
    "llama": DecodeShape(32, 8),
    "glm": DecodeShape(32, 4),
    "mqa": DecodeShape(16, 1, dtype="float16"),
    "wide": DecodeShape(8, 2, head_dim=256, page_size=32),
    "narrow": DecodeShape(9, 3, head_dim=64, rank=2),
    "long pages": DecodeShape(5, 1, page_size=64, rank=4),
}
# Bytes that are spilled all the same: two whole columns of a 64-token page are 128 registers; what the scorer's appending warps
# keep for their next token.
SPILLS = {("build", "long pages"): 80, ("score", "llama"): 8, ("score", "glm"): 16, ("score", "mqa"): 16}  # all of sm_100a
# kernel: most registers a thread, by shape
REGISTERS = {
    "score": {"llama": 96, "glm": 96, "mqa": 96, "wide": 128, "narrow": 96, "long pages": 112},
    "select_pages": {"llama": 72, "glm": 88, "mqa": 128, "wide": 72, "narrow": 72, "long pages": 72},
    "attend": {"llama": 184, "glm": 184, "mqa": 184, "wide": 232, "narrow": 128, "long pages": 184},
    "whole_step": {"llama": 128, "narrow": 128},
    "build": {"llama": 152, "glm": 152, "mqa": 152, "wide": 255, "narrow": 128, "long pages": 255},
    "append_finalise": {"llama": 104, "glm": 104, "mqa": 112, "wide": 240, "narrow": 80, "long pages": 255},
    "finalise_slots": {"llama": 104, "glm": 104, "mqa": 112, "wide": 240, "narrow": 80, "long pages": 255},
}


# Memory instructions that a kernel may have in front of its wait.  The lengths come by LDG.E, the query by LDG.E.128; scores,
# their parts, tables, block table and pages must not, though C++ lets a compiler move loads through `const __restrict__`.
BEFORE_THE_WAIT = {
    "score": {},  # of the appending warps, which come first; the others read records and lengths before theirs
    "select_pages": {"LDG.E": 99},
    "attend": {"LDG.E": 1, "LDG.E.128": 99},
    "whole_step": {},  # of the wait of a step that does not start early
    "build": {},
    "append_finalise": {},
    "finalise_slots": {},
}


def tool(name: str) -> str:
    spec = importlib.util.find_spec("triton")
    assert spec and spec.submodule_search_locations
    return str(Path(spec.submodule_search_locations[0]) / "backends/nvidia/bin" / name)


def resources(binary: bytes, folder: Path) -> dict[str, tuple[int, int, int]]:
    """Registers, stack bytes and static shared bytes of each kernel in a binary."""
    file = folder / "kernel.cubin"
    file.write_bytes(binary)
    command = [tool("cuobjdump"), "-res-usage", str(file)]
    text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    found = re.findall(r"Function (\w+):\s+REG:(\d+) STACK:(\d+) SHARED:(\d+)", text)
    return {name: (int(registers), int(stack), int(shared)) for name, registers, stack, shared in found}


def code_of(binary: bytes, folder: Path) -> dict[str, str]:
    """Disassembly by kernel."""
    file = folder / "kernel.cubin"
    file.write_bytes(binary)
    text = subprocess.run([tool("nvdisasm"), "-c", str(file)], capture_output=True, text=True, check=True).stdout
    return {re.match(r"\w+", section)[0]: section for section in text.split(".section\t.text.")[1:]}  # type: ignore[index]


def memory_instructions(code: str) -> Counter[str]:
    instructions = re.findall(r"\b((?:LDG|LDGSTS|STG|ATOMG|UBLKCP)\b[.\w]*)", code)
    return Counter(i.replace(".CONSTANT", "") for i in instructions)


def before_the_wait(binary: bytes, folder: Path) -> dict[str, Counter[str]]:
    """Memory instructions of each kernel in front of its wait for the kernel before it; kernels without a wait are left out."""
    parts = {name: code.partition("ACQBULK") for name, code in code_of(binary, folder).items()}
    return {name: memory_instructions(in_front) for name, (in_front, wait, _) in parts.items() if wait}


def compilations(shape: DecodeShape, arch: str) -> list[tuple[str, dict[str, object]]]:
    """What CudaStages compiles for a shape at batch 1 and at a batch that fills the device."""
    plan = Launch(shape, 1, 8192, 2048 // shape.page_size, 132, SHARED_BYTES[arch])
    clusters = (1,) if arch == "sm_80" else (1, 8)
    stages = min(ATTEND_RING, plan.attend_stages(1))
    # a table that is short enough for a step in one launch
    short = replace(plan, max_pages=1024)
    return [
        *([("step", plan.step_macros)] if short.whole_step and arch != "sm_80" else []),
        ("score", plan.score_macros),
        *(("select", plan.select_macros(cluster)) for cluster in clusters),
        *(("attend", {**plan.macros, "CLUSTER": cluster, "STAGES": stages}) for cluster in clusters),
        ("build", plan.macros),
    ]


@pytest.mark.parametrize("arch", ARCHITECTURES)
@pytest.mark.parametrize("name", SHAPES)
def test_kernels_compile_do_not_spill_and_wait(name: str, arch: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOCKS_KERNEL_CACHE", str(tmp_path / "cache"))
    kernels = set()
    for source, macros in compilations(SHAPES[name], arch):
        binary = compile_cubin(source, macros, arch)
        waits = before_the_wait(binary, tmp_path)
        for kernel, (registers, stack, _) in resources(binary, tmp_path).items():
            kernels.add(kernel)
            spilled = SPILLS.get((kernel, name), 0) if arch == "sm_100a" else 0
            assert stack <= spilled, f"{kernel} spills {stack} bytes with {macros}"
            assert registers <= REGISTERS[kernel][name], f"{kernel} takes {registers} registers with {macros}"
            if arch != "sm_80":
                assert waits[kernel] <= Counter(BEFORE_THE_WAIT[kernel]), f"{kernel} before its wait: {waits[kernel]}"
    expected = {kernel for kernel, limits in REGISTERS.items() if name in limits}
    assert kernels == (expected - {"whole_step"} if arch == "sm_80" else expected)


@pytest.mark.parametrize("group", (1, 4))
@pytest.mark.parametrize("head_dim", (64, 128))
def test_a_step_in_one_launch_has_its_shared_memory(
    group: int, head_dim: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LOCKS_KERNEL_CACHE", str(tmp_path / "cache"))
    plan = Launch(DecodeShape(group, 1, head_dim), 1, 1024, 128, 132, SHARED_BYTES["sm_90a"])
    _, _, static = resources(compile_cubin("step", plan.step_macros, "sm_90a"), tmp_path)["whole_step"]
    assert static <= plan.step_static_bytes <= static + 4096


@pytest.mark.parametrize("arch", ("sm_90a", "sm_100a"))
def test_a_step_that_starts_early_reads_lengths_table_and_records(
    arch: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By words and bulk copies; queries, keys and values go by 16 bytes and belong behind the second wait."""
    monkeypatch.setenv("LOCKS_KERNEL_CACHE", str(tmp_path / "cache"))
    plan = Launch(SHAPES["llama"], 1, 1024, 128, 132, SHARED_BYTES[arch])
    code = code_of(compile_cubin("step", plan.step_macros, arch), tmp_path)["whole_step"]
    _, first_wait, rest = code.partition("ACQBULK")
    _, cluster_started, rest = rest.partition("UCGABAR_ARV")
    early, second_wait, _ = rest.partition("ACQBULK")
    assert first_wait and cluster_started and second_wait
    assert set(memory_instructions(early)) == {"LDG.E", "UBLKCP.S.G"}


@pytest.mark.parametrize("pages", (8192, 65_536))
def test_the_selection_fits_beside_the_scorer(pages: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On an H200 at 128K and 1M, in registers and shared memory, so that it is there when the last score is written.

    Not with twice the warps, which groups over 4 and ranks below 8 take: there the arithmetic is worth more."""
    monkeypatch.setenv("LOCKS_KERNEL_CACHE", str(tmp_path / "cache"))
    plan = Launch(SHAPES["llama"], 1, pages, 2048 // SHAPES["llama"].page_size, 132, SHARED_BYTES["sm_90a"])
    cluster = plan.select_cluster(16)
    score, select = (
        resources(compile_cubin(source, macros, "sm_90a"), tmp_path)
        for source, macros in (("score", plan.score_macros), ("select", plan.select_macros(cluster)))
    )
    of_partition = 0  # four of them share an SM's warps
    for warps, (registers, *_) in ((plan.score_threads // 32, score["score"]), (SELECT_THREADS // 32, select["select_pages"])):
        of_partition += -(-warps // 4) * 32 * (-(-registers // 8) * 8)
    assert of_partition <= 16384
    static = score["score"][2] + select["select_pages"][2] + 2 * 1024  # a KB of each block is the driver's
    assert plan.score_ring_bytes + plan.select_shared_bytes(cluster) + static <= 228 << 10


# columns, epilogue, norm, D: most registers a thread.  Up to 128, two blocks share an SM.
PROJECTIONS = {
    (4096, "qkv", True, 128): 128,
    (3584, "qkv_bias", True, 128): 128,
    (576, "bias", True, 2): 64,
    (4096, "silu_mul", True, 2): 128,
    (4096, "none", True, 2): 128,
    (14336, "add", False, 2): 128,
    (28672, "add", False, 2): 160,  # llama-3.1-70b's
}


@pytest.mark.parametrize("arch", ("sm_90a", "sm_100a"))  # older devices have no bulk copies and use Triton's
@pytest.mark.parametrize("case", PROJECTIONS, ids=lambda case: f"{case[0]}-{case[1]}")
def test_projections_compile_do_not_spill_and_only_weights_come_before_the_wait(
    case: tuple[int, str, bool, int], arch: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LOCKS_KERNEL_CACHE", str(tmp_path / "cache"))
    width, epilogue, norm, head_dim = case
    binary = compile_cubin("projection", projection.macros(width, epilogue, norm, torch.bfloat16, head_dim), arch)
    ((name, (registers, stack, _)),) = resources(binary, tmp_path).items()
    assert (name, stack) == ("qkv" if "qkv" in epilogue else "gemv", 0)
    assert registers <= PROJECTIONS[case]
    assert set(before_the_wait(binary, tmp_path)[name]) == {"UBLKCP.S.G"}


def test_a_compiled_kernel_comes_from_the_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOCKS_KERNEL_CACHE", str(tmp_path))
    macros = Launch(SHAPES["narrow"], 1, 64, 8, 132, SHARED_BYTES["sm_90a"]).macros
    first = compile_cubin("build", macros, "sm_90a")
    (cached,) = tmp_path.iterdir()
    stand_in = b"stands for the binary"
    cached.write_bytes(hashlib.sha256(stand_in).digest() + stand_in)
    assert compile_cubin("build", macros, "sm_90a") == stand_in != first
    assert compile_cubin("build", {**macros, "R": 4}, "sm_90a") != stand_in


def test_a_damaged_cache_file_is_compiled_anew(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOCKS_KERNEL_CACHE", str(tmp_path))
    macros = Launch(SHAPES["narrow"], 1, 64, 8, 132, SHARED_BYTES["sm_90a"]).select_macros(1)
    binary = compile_cubin("select", macros, "sm_90a")
    (cached,) = tmp_path.iterdir()
    whole = cached.read_bytes()
    for damaged in (b"", whole[:-1], whole[:5000] + b"?" + whole[5001:]):
        cached.write_bytes(damaged)
        assert compile_cubin("select", macros, "sm_90a") == binary
        assert cached.read_bytes() == whole


def test_without_a_place_for_the_cache_kernels_compile(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("LOCKS_KERNEL_CACHE", str(tmp_path / "file" / "cache"))
    macros = Launch(SHAPES["narrow"], 1, 64, 8, 132, SHARED_BYTES["sm_90a"]).select_macros(1)
    assert compile_cubin("select", macros, "sm_90a").startswith(b"\x7fELF")
