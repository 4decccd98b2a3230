"""Compiles the CUDA C++ sources for a device with NVRTC and launches the result.

No CUDA toolkit and no header but our own is needed.  Binaries are kept in `$LOCKS_KERNEL_CACHE` (default
`~/.cache/locks-kernels`) under a hash of the sources, the options and the compiler, so only the first use of a shape compiles
(0.2 to 0.6 s a kernel).
"""

from __future__ import annotations

import contextlib
import ctypes
import hashlib
import importlib.util
import os
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import torch

SOURCES = Path(__file__).parent
DIGEST_BYTES = 32  # SHA-256 of the binary, in front of it in the file: a damaged one is compiled anew


def cache_directory() -> Path:
    default = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "locks-kernels"
    return Path(os.environ.get("LOCKS_KERNEL_CACHE", default))


def compile_cubin(source: str, macros: Mapping[str, object], arch: str) -> bytes:
    """The binary of `source`.cu for `arch` ("sm_90a") with `macros` defined; from the cache if it was compiled before."""
    from cuda.bindings import nvrtc
    from cuda.core import Program, ProgramOptions

    text = (SOURCES / f"{source}.cu").read_text()
    _, *version = nvrtc.nvrtcVersion()
    headers = [file.read_text() for file in sorted(SOURCES.glob("*.cuh"))]
    key = repr((text, headers, sorted(macros.items()), arch, version))
    cached = cache_directory() / f"{source}-{hashlib.sha256(key.encode()).hexdigest()[:24]}.cubin"
    with contextlib.suppress(OSError):  # not there, or another user's
        digest, binary = (content := cached.read_bytes())[:DIGEST_BYTES], content[DIGEST_BYTES:]
        if digest == hashlib.sha256(binary).digest():
            return binary
    options = ProgramOptions(
        arch=arch,
        std="c++17",
        name=f"{source}.cu",
        define_macro=[(name, str(value)) for name, value in macros.items()],
        include_path=str(SOURCES),
        lineinfo=True,
    )
    binary = bytes(Program(text, "c++", options).compile("cubin").code)
    with contextlib.suppress(OSError):  # where nothing can be kept, every process compiles
        cached.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=cached.parent, delete=False) as file:
            file.write(hashlib.sha256(binary).digest() + binary)
        os.replace(file.name, cached)  # whole or not at all, also with two processes
    return binary


def unavailable(device: torch.device, capability: tuple[int, int], what: str) -> str | None:
    """Why kernels that need `what`, known from a compute capability on, cannot run on a device; None if they can."""
    if device.type != "cuda":
        return "needs a CUDA device"
    if torch.cuda.get_device_capability(device) < capability:
        return f"needs compute capability {capability[0]}.{capability[1]} or newer ({what})"
    if importlib.util.find_spec("cuda") is None or importlib.util.find_spec("cuda.core") is None:
        return "needs cuda-core: pip install 'locks-bench[cuda]'"
    return None


def architecture(device: torch.device) -> str:
    """The name NVRTC knows the device by; arch-specific features ("a") from compute capability 9.0 on."""
    major, minor = torch.cuda.get_device_capability(device)
    return f"sm_{major}{minor}" + ("a" if major >= 9 else "")


def check(result: tuple[Any, ...]) -> Any:
    """Value of a CUDA driver call; RuntimeError with the driver's text if it failed."""
    from cuda.bindings import driver

    error, *values = result
    if error != driver.CUresult.CUDA_SUCCESS:
        _, text = driver.cuGetErrorString(error)
        raise RuntimeError(f"CUDA driver: {text.decode() if text else error}")
    return values[0] if values else None


@cache
def context_of(device_index: int) -> Any:
    """The primary context of a device, the one torch uses."""
    from cuda.bindings import driver

    check(driver.cuInit(0))
    return check(driver.cuDevicePrimaryCtxRetain(check(driver.cuDeviceGet(device_index))))


@contextlib.contextmanager
def on_device(device_index: int) -> Iterator[None]:
    """Makes a device current for driver calls; another one may be torch's, and a thread starts with none."""
    from cuda.bindings import driver

    check(driver.cuCtxPushCurrent(context_of(device_index)))
    try:
        yield
    finally:
        check(driver.cuCtxPopCurrent())


@cache
def load(source: str, macros: tuple[tuple[str, object], ...], device_index: int) -> Any:
    """The loaded module of a source on a device, kept for the life of the process."""
    from cuda.bindings import driver

    binary = compile_cubin(source, dict(macros), architecture(torch.device("cuda", device_index)))
    with on_device(device_index):
        return check(driver.cuModuleLoadData(binary))


class Kernel:
    """One kernel of a source, ready to launch on its device's current torch stream with programmatic dependent launch."""

    def __init__(
        self,
        source: str,
        name: str,
        macros: Mapping[str, object],
        device: torch.device,
        threads: int,
        shared_bytes: int = 0,
        in_step: bool = True,
    ) -> None:
        """`in_step`: gets the largest share of an SM for shared memory, as the others of a step do.  An SM changes that share
        only when it is idle, so with different ones no kernel would start beside the one before it.
        """
        from cuda.bindings import driver

        self.device_index = torch.cuda.current_device() if device.index is None else device.index
        module = load(source, tuple(sorted(macros.items())), self.device_index)
        self.threads, self.shared_bytes = threads, shared_bytes
        self.overlaps = torch.cuda.get_device_capability(device) >= (9, 0)
        attributes = driver.CUfunction_attribute
        with on_device(self.device_index):
            self.function = check(driver.cuModuleGetFunction(module, name.encode()))
            attribute = attributes.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
            # The function is shared with other caches of this shape, which may need more.
            if shared_bytes > check(driver.cuFuncGetAttribute(attribute, self.function)):
                check(driver.cuFuncSetAttribute(self.function, attribute, shared_bytes))
            if in_step:
                attribute = attributes.CU_FUNC_ATTRIBUTE_PREFERRED_SHARED_MEMORY_CARVEOUT
                check(driver.cuFuncSetAttribute(self.function, attribute, 100))

    def runs_at_once(self, cluster: int, clusters: int) -> bool:
        """Whether `clusters` clusters of `cluster` blocks are resident together; allows more than 8 blocks, too."""
        from cuda.bindings import driver

        attribute = driver.CUfunction_attribute.CU_FUNC_ATTRIBUTE_NON_PORTABLE_CLUSTER_SIZE_ALLOWED
        with on_device(self.device_index):
            check(driver.cuFuncSetAttribute(self.function, attribute, 1))
            result = driver.cuOccupancyMaxActiveClusters(self.function, self._config((cluster, 1, 1), cluster))
        if result[0] == driver.CUresult.CUDA_ERROR_INVALID_CLUSTER_SIZE:  # a device that has no such clusters at all
            return False
        return check(result) >= clusters

    def _config(self, grid: tuple[int, int, int], cluster: int) -> Any:
        from cuda.bindings import driver

        config = driver.CUlaunchConfig()
        config.gridDimX, config.gridDimY, config.gridDimZ = grid
        config.blockDimX, config.blockDimY, config.blockDimZ = self.threads, 1, 1
        config.sharedMemBytes = self.shared_bytes
        attributes = []
        if self.overlaps:
            overlap = driver.CUlaunchAttribute()
            overlap.id = driver.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION
            overlap.value.programmaticStreamSerializationAllowed = 1
            attributes.append(overlap)
        if cluster > 1:
            clusters = driver.CUlaunchAttribute()
            clusters.id = driver.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION
            clusters.value.clusterDim.x, clusters.value.clusterDim.y, clusters.value.clusterDim.z = cluster, 1, 1
            attributes.append(clusters)
        config.attrs, config.numAttrs = attributes, len(attributes)
        return config

    def launch(
        self, grid: tuple[int, int, int], arguments: Sequence[torch.Tensor | int | tuple[int]], cluster: int = 1
    ) -> None:
        """Tensors pass as pointers, int as 32-bit and (int,) as 64-bit integers."""
        from cuda.bindings import driver

        values: list[int] = []
        kinds: list[Any] = []
        for argument in arguments:
            if isinstance(argument, torch.Tensor):
                values.append(argument.data_ptr())
                kinds.append(ctypes.c_void_p)
            elif isinstance(argument, tuple):
                values.append(argument[0])
                kinds.append(ctypes.c_int64)
            else:
                values.append(argument)
                kinds.append(ctypes.c_int)
        config = self._config(grid, cluster)
        config.hStream = torch.cuda.current_stream(self.device_index).cuda_stream
        with on_device(self.device_index):
            check(driver.cuLaunchKernelEx(config, self.function, (tuple(values), tuple(kinds)), 0))
