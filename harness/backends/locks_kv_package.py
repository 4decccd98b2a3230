"""The method author's package `locks-kv` as modules to drive: one copy per flag set, without vLLM, and its summaries in our
layout.

The package is a plug-in of vLLM, and what it measures and caches at import depends on environment variables.  So that one
process can measure several flag sets, its source is imported once for each, under a name of its own; and of its `backend`
package, whose `__init__` imports vLLM, only the modules are used that its kernels import themselves.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
import shutil
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

from harness.libraries import LOCKS_KV
from locks_kernels.summary import SummaryFields

IMPORT_NAME = "locks"
SUPPORTED = "0.1.4"  # what is driven here is no public interface, so it holds for one version
FLAG_PREFIXES = ("LOCKS_", "RKI4_")  # of the variables that the package reads ...
OUR_PREFIX = "LOCKS_BENCH_"  # ... and of those that are ours


@dataclass(frozen=True)
class Package:
    """One imported copy: its modules, the variables it is to see for all of its life, and a suffix for the name of its scorer's
    extension: torch keeps one build per name, and would rebuild it whenever another flag set is up."""

    flags: Mapping[str, str]
    suffix: str
    state: ModuleType
    build: ModuleType
    parameters: ModuleType
    score: ModuleType
    select: ModuleType
    attend: ModuleType

    @contextmanager
    def active(self) -> Iterator[None]:
        """Its flags in the environment: some are read at every launch."""
        with environment(self.flags):
            yield

    def compile(self) -> None:
        """Build its CUDA extensions, or load them from torch's cache: minutes at the first call on a machine."""
        with self.active(), environment(_toolchain()):
            with _extension_suffix(self.suffix):
                self.score._get()
            if self.select._get() is None:  # its answer to every call after one that failed
                raise RuntimeError("locks-kv's selection kernels could not be built")


_loaded: dict[str, Package] = {}


def load(name: str, flags: Mapping[str, str]) -> Package:
    """The package imported under `name` with `flags` in the environment; the same object for the same name."""
    if name not in _loaded:
        with environment(flags):
            root = _import_package(f"_locks_kv_{name}")
            part = partial(_import_part, root)
            _loaded[name] = Package(
                flags=dict(flags),
                suffix=f"_{name}" if flags else "",
                state=part("selection.rki4_state"),
                build=part("selection.rki4_build"),
                parameters=part("selection.select"),
                score=part("selection.rki4_score_cuda"),
                select=part("selection.select_cuda"),
                attend=part("attention.decode"),
            )
    return _loaded[name]


def _import_package(alias: str) -> str:
    found = importlib.util.find_spec(IMPORT_NAME)
    if found is None or not found.submodule_search_locations:
        raise ImportError(f"locks-kv is installed, but its package {IMPORT_NAME!r} cannot be found")
    folder = Path(next(iter(found.submodule_search_locations)))
    spec = importlib.util.spec_from_file_location(alias, folder / "__init__.py", submodule_search_locations=[str(folder)])
    assert spec and spec.loader
    package = importlib.util.module_from_spec(spec)
    sys.modules[alias] = package
    spec.loader.exec_module(package)
    # Stands in for the package whose __init__ imports vLLM; its modules are found in its folder all the same.
    without_init = ModuleType(f"{alias}.backend")
    without_init.__path__ = [str(folder / "backend")]
    sys.modules[f"{alias}.backend"] = without_init
    return alias


def _import_part(root: str, name: str) -> ModuleType:
    return importlib.import_module(f"{root}.{name}")


@contextmanager
def environment(variables: Mapping[str, str]) -> Iterator[None]:
    """Set environment variables for a while."""
    before = {name: os.environ.get(name) for name in variables}
    os.environ.update(variables)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


@contextmanager
def _extension_suffix(suffix: str) -> Iterator[None]:
    """What is built meanwhile gets this suffix to its name."""
    from torch.utils import cpp_extension

    original = cpp_extension.load_inline

    def load_inline(name: str, *args: Any, **options: Any) -> ModuleType:
        return original(name + suffix, *args, **options)

    cpp_extension.load_inline = load_inline
    try:
        yield
    finally:
        cpp_extension.load_inline = original


def _toolchain() -> dict[str, str]:
    """Search paths that let a bare nvcc build against torch: headers of the CUDA libraries and the runtime to link with, as
    they lie beside torch when pip brought it.  They come last: a complete toolkit stays as it is."""
    from torch.utils import cpp_extension

    beside = sorted(Path(torch.__file__).parents[1].glob("nvidia/cu*"))
    paths = {
        "CPLUS_INCLUDE_PATH": [str(folder / "include") for folder in beside if (folder / "include").is_dir()],
        "LIBRARY_PATH": _runtime_folder(beside, Path(cpp_extension.get_default_build_root())),
    }
    return {name: os.pathsep.join(filter(None, [os.environ.get(name), *folders])) for name, folders in paths.items() if folders}


def _runtime_folder(beside: list[Path], root: Path) -> list[str]:
    """A folder with a `libcudart.so`: pip's runtime has its version in the name, which `-lcudart` does not find."""
    runtimes = [file for folder in beside for file in sorted(folder.glob("lib/libcudart.so.*"))]
    if not runtimes:
        return []
    folder = root / "locks_kv_cudart"
    folder.mkdir(parents=True, exist_ok=True)
    link = folder / "libcudart.so"
    if link.is_symlink() and link.resolve() != runtimes[-1].resolve():
        link.unlink(missing_ok=True)  # of another environment
    with suppress(FileExistsError):
        link.symlink_to(runtimes[-1])
    return [str(folder)]


def unavailable() -> str | None:
    """Why the package cannot be driven on this machine, or None."""
    if reason := LOCKS_KV.missing():
        return reason
    if (installed := LOCKS_KV.version()) != SUPPORTED:
        return f"locks-kv {installed} is installed and its internals may differ: pip install locks-kv=={SUPPORTED}"
    if changed := [name for name in sorted(os.environ) if name.startswith(FLAG_PREFIXES) and not name.startswith(OUR_PREFIX)]:
        return f"{', '.join(changed)} in the environment would change its kernels; unset them: its flag sets are backends here"
    from torch.utils import cpp_extension

    if cpp_extension.CUDA_HOME is None:
        return "locks-kv compiles its kernels at first use: put nvcc of CUDA's toolkit on the PATH or set CUDA_HOME"
    if shutil.which("ninja") is None:
        return "locks-kv compiles its kernels at first use and needs ninja on the PATH: pip install ninja"
    return None


def summary_fields(slabs: tuple[torch.Tensor, ...], pages: torch.Tensor) -> SummaryFields:
    """Its summaries of the physical `pages` (int64 [n]) as ours, all [n, H, ...].

    slabs: basis uint8 [NB, H, R, D/2] with the even channel in the low nibble, its scale bf16 [NB, H, R], coefficients int8
    [NB, H, PAGE, R], their scale bf16 [NB, H, PAGE], centroid int8 [NB, H, D], its scale bf16 [NB, H]; eigenvalues ascend.
    """
    packed, basis_scale, coefficients, coefficient_scale, centroid, centroid_scale = (slab[pages] for slab in slabs[:6])
    nibbles = torch.stack((packed & 0xF, packed >> 4), dim=-1).flatten(-2)
    return SummaryFields(
        basis=((nibbles ^ 8).to(torch.int8) - 8).flip(-2),
        coefficients=coefficients.flip(-1),
        centroid=centroid,
        coefficient_scale=coefficient_scale,
        basis_scale=basis_scale.flip(-1),
        centroid_scale=centroid_scale,
    )
