"""The libraries behind the backends, known without importing them: `list` answers before torch could be imported."""

from __future__ import annotations

from dataclasses import dataclass

from harness.environment import version


@dataclass(frozen=True)
class Library:
    """title: what a person calls it.  package: its name for pip.  install: arguments of the `pip install` that brings it."""

    title: str
    package: str
    install: str

    def version(self) -> str | None:
        return version(self.package)

    def missing(self) -> str | None:
        """Why a backend on top of it cannot run, with the command that brings it, or None."""
        return None if self.version() else f"{self.title} is not installed: pip install {self.install}"


FA3 = Library("FlashAttention-3", "fa3-fwd", "fa3-fwd einops")
FLASHINFER = Library("FlashInfer", "flashinfer-python", "flashinfer-python")
LOCKS_KV = Library("locks-kv, the method author's package,", "locks-kv", "locks-kv==0.1.4 ninja")
VLLM = Library("vLLM", "vllm", "vllm")
TORCH = Library("PyTorch", "torch", "torch")
TRITON = Library("Triton", "triton", "triton")
CUDA_CORE = Library("cuda-core, which compiles the CUDA kernels,", "cuda-core", "'cuda-core[cu13]' nvidia-cuda-nvrtc")

BY_BACKEND = {
    "fa3": FA3,
    "fa3-paged": VLLM,
    "flashinfer": FLASHINFER,
    "locks": TORCH,
    "locks-cuda": CUDA_CORE,
    "locks-kv[best]": LOCKS_KV,
    "locks-kv[default]": LOCKS_KV,
    "locks-triton": TRITON,
    "sdpa": TORCH,
    **dict.fromkeys(("quest-group", "cuboid-mean", "mean-std-vector", "mean-std-scalar", "centroid", "sliding-window"), TRITON),
    **dict.fromkeys(("oracle", "shared-svd-r8", "shared-svd-r32", "random-pages", "kvzip-pair-uniform"), TRITON),
    **dict.fromkeys((f"locks-r{rank}{combine}" for rank in (8, 4, 2) for combine in ("", "-peak")), TORCH),
}
