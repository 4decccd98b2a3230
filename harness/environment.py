"""Where and with what a record was made: device, driver, libraries, source.  Imports no torch by itself; no host name."""

from __future__ import annotations

import hashlib
import os
import platform
import subprocess
import sys
from functools import cache
from importlib import metadata
from pathlib import Path
from typing import Any

SOURCE = Path(__file__).resolve().parents[1]
# Only these decide what a measurement does: an edited README or a record added beside them is not a dirty tree.
MEASURED_PATHS = ("locks_kernels", "harness", "profiles", "pyproject.toml")
COMMIT_VARIABLE = "LOCKS_BENCH_COMMIT"
LIBRARIES = {
    "torch": "torch",
    "triton": "triton",
    "flashinfer": "flashinfer-python",
    "fa3": "fa3-fwd",
    "vllm": "vllm",
    "cuda-core": "cuda-core",
    "nvrtc": "nvidia-cuda-nvrtc",
}


def capture(device: str) -> dict[str, Any]:
    """The environment of a record; `device` is "cuda" or "cpu".  What is unknown is None."""
    return {
        "device": device,
        "gpu": gpu() if device == "cuda" else None,
        "driver": driver() if device == "cuda" else None,
        "cpu": cpu(),
        "versions": {"python": platform.python_version(), "cuda": cuda_version() if device == "cuda" else None}
        | {name: version(package) for name, package in LIBRARIES.items()},
        **source(),
        "argv": [Path(sys.argv[0]).name, *sys.argv[1:]],
    }


def identity(environment: dict[str, Any]) -> dict[str, Any]:
    """The part of an environment that must agree for a record to count as measured already."""
    device, versions = environment.get("gpu") or {}, environment.get("versions") or {}
    return {
        "gpu": [device.get("name"), device.get("sm_count")],
        "cpu": None if device else environment.get("cpu"),
        "torch": versions.get("torch"),
        "triton": versions.get("triton"),
    } | {name: environment.get(name) for name in ("driver", "commit", "dirty", "kernel_sources")}


def gpu() -> dict[str, Any] | None:
    """Name and sizes of the current CUDA device as torch sees it, or None."""
    import torch

    if not torch.cuda.is_available():
        return None
    properties = torch.cuda.get_device_properties(torch.cuda.current_device())
    return {
        "name": properties.name,
        "uuid": str(properties.uuid),
        "sm_count": properties.multi_processor_count,
        "l2_bytes": properties.L2_cache_size,
        "memory_bytes": properties.total_memory,
        "compute_capability": [properties.major, properties.minor],
        "power_limit_w": power_limit_w(),
    }


def cuda_version() -> str | None:
    """CUDA version that torch was built for."""
    import torch

    return torch.version.cuda


def power_limit_w() -> float | None:
    """Enforced power limit of the current CUDA device, or None where NVML does not know the device."""
    import pynvml

    from harness.meters.device import NoMeters, current_identity, find_handle

    try:
        pynvml.nvmlInit()
        return pynvml.nvmlDeviceGetEnforcedPowerLimit(find_handle(pynvml, current_identity())) / 1000
    except (pynvml.NVMLError, NoMeters):
        return None


def driver() -> str | None:
    """Version of the NVIDIA driver, or None."""
    import pynvml

    try:
        pynvml.nvmlInit()
        try:
            return str(pynvml.nvmlSystemGetDriverVersion())
        finally:
            pynvml.nvmlShutdown()
    except pynvml.NVMLError:
        return None


@cache
def cpu() -> dict[str, Any]:
    """Name and count of the processors this process may use."""
    name = platform.processor() or platform.machine()
    information = Path("/proc/cpuinfo")
    if information.exists():
        models = [line for line in information.read_text().splitlines() if line.startswith("model name")]
        name = models[0].split(":", 1)[1].strip() if models else name
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return {"name": name, "cores": cores}


def version(package: str) -> str | None:
    """Installed version of a package, without importing it, or None."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


@cache
def source() -> dict[str, Any]:
    """Commit and dirty flag of the checkout (None for an installed copy) and the hash of the kernels' sources.

    A copy without its repository, as in a container, may be told: LOCKS_BENCH_COMMIT=<hash> or <hash>-dirty.
    """
    commit = dirty = None
    if told := os.environ.get(COMMIT_VARIABLE):
        commit, dirty = told.removesuffix("-dirty"), told.endswith("-dirty")
    elif _git("rev-parse", "--show-toplevel") == str(SOURCE):  # else an installed copy inside somebody else's repository
        commit = _git("rev-parse", "HEAD")
        changes = _git("status", "--porcelain", "--", *MEASURED_PATHS)
        dirty = None if changes is None else bool(changes)
    return {"commit": commit, "dirty": dirty, "kernel_sources": kernel_sources()}


def kernel_sources() -> str:
    """Hash of every source file of locks_kernels: two trees with the same one run the same kernels."""
    digest = hashlib.sha256()
    root = SOURCE / "locks_kernels"
    for file in sorted(file for file in root.rglob("*") if file.suffix in (".py", ".cu", ".cuh")):
        digest.update(f"{file.relative_to(root)}\0".encode() + file.read_bytes() + b"\0")
    return digest.hexdigest()[:16]


def _git(*arguments: str) -> str | None:
    # safe.directory: reading a checkout that another user owns (a container's bind mount) is harmless here.
    command = ["git", "-c", "safe.directory=*", "-C", str(SOURCE), *arguments]
    try:
        result = subprocess.run(command, capture_output=True, text=True, timeout=10)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return result.stdout.strip() if result.returncode == 0 else None
