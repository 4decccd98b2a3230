"""`locks-bench doctor`: what this machine can and cannot measure, and how to fix it.  Always exits with 0."""

from __future__ import annotations

import platform
import shutil
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer
from rich import box
from rich.markup import escape
from rich.table import Table

from bench import output
from bench.listing import backend_rows
from harness import environment

DRIVER_PARAMETERS = Path("/proc/driver/nvidia/params")
LOW_DISK_BYTES = 1 << 30


@dataclass(frozen=True)
class Finding:
    """One line of the report; `fix` is what to do where `good` is False."""

    what: str
    good: bool
    detail: str
    fix: str = ""


def doctor(
    store: Annotated[str, typer.Option(metavar="DIR", help="Store whose disk is looked at.")] = "results",
) -> None:
    """Tell what this machine can measure, and how to fix what it cannot."""
    found = findings(Path(store))
    table = Table(box=box.SIMPLE_HEAD)
    for heading in ("", "what", "found", "to do"):
        table.add_column(heading)
    for finding in found:
        mark = "[green]ok[/green]" if finding.good else "[yellow]--[/yellow]"
        table.add_row(mark, *map(escape, (finding.what, finding.detail, finding.fix)))
    output.print_wide(table)
    print(verdict(found))


def findings(store: Path) -> list[Finding]:
    """All findings; a check that breaks is a finding too."""
    checks: list[tuple[str, Callable[[], Finding]]] = [
        ("python", _python),
        ("cpu", _cpu),
        ("torch", _torch),
        ("gpu", _gpu),
        ("driver", _driver),
        ("triton", _triton),
        ("cuda compiler", _compiler),
        ("counters", _counters),
        ("meters", _meters),
        ("disk", lambda: _disk(store)),
    ]
    found = [_guarded(what, check) for what, check in checks]
    return found + [
        Finding(f"backend {row['name']}", row["available"], row["version"] or "", row["missing"] or "")
        for row in backend_rows()
    ]


def verdict(found: list[Finding]) -> str:
    """One line: what a sweep on this machine is worth."""
    good = {finding.what for finding in found if finding.good}
    backends = ", ".join(
        finding.what.removeprefix("backend ") for finding in found if finding.what.startswith("backend ") and finding.good
    )
    if "gpu" in good:
        return f"Rows of this machine are performance numbers. Backends that run: {backends}."
    return (
        f"No GPU: rows run on the CPU, show that everything works, and claim no performance. Backends that may run: {backends}."
    )


def _guarded(what: str, check: Callable[[], Finding]) -> Finding:
    try:
        return check()
    except Exception as error:  # a broken library is what a doctor is for
        return Finding(what, False, f"{type(error).__name__}: {error}", "reinstall it")


def _python() -> Finding:
    return Finding("python", sys.version_info >= (3, 11), platform.python_version(), "use Python 3.11 or newer")


def _cpu() -> Finding:
    cpu = environment.cpu()
    return Finding("cpu", True, f"{cpu['name']}, {cpu['cores']} cores")


def _torch() -> Finding:
    import torch

    built = f"built for CUDA {torch.version.cuda}" if torch.version.cuda else "CPU build"
    fix = (
        ""
        if torch.version.cuda
        else "on a machine with a GPU: pip install --force-reinstall torch, without constraints-cpu.txt"
    )
    return Finding("torch", bool(torch.version.cuda), f"{torch.__version__}, {built}", fix)


def _gpu() -> Finding:
    import torch

    device = environment.gpu()
    if device is None:
        return Finding("gpu", False, "none that torch can use", "check nvidia-smi, CUDA_VISIBLE_DEVICES and the torch build")
    free, total = torch.cuda.mem_get_info()
    sizes = f"{device['sm_count']} SMs, L2 {device['l2_bytes'] >> 20} MB, {free / 1e9:.0f} of {total / 1e9:.0f} GB free"
    busy = free < 0.9 * total
    return Finding(
        "gpu", True, f"{device['name']}, {sizes}", "another process uses it: its rows may be disturbed" if busy else ""
    )


def _driver() -> Finding:
    version = environment.driver()
    return Finding(
        "driver", version is not None, version or "NVML does not answer", "" if version else "install the NVIDIA driver"
    )


def _triton() -> Finding:
    version = environment.version("triton")
    return Finding("triton", version is not None, version or "not installed", "" if version else "pip install triton (Linux)")


def _compiler() -> Finding:
    versions = [f"{name} {environment.version(name)}" for name in ("cuda-core", "nvidia-cuda-nvrtc")]
    try:
        from cuda.core import Program, ProgramOptions

        Program('extern "C" __global__ void empty() {}', "c++", ProgramOptions(arch="sm_90")).compile("cubin")
    except Exception as error:
        fix = "pip install 'locks-bench[cuda]'"
        return Finding("cuda compiler", False, f"{', '.join(versions)}: {type(error).__name__}: {error}", fix)
    return Finding("cuda compiler", True, ", ".join(versions))


def _counters() -> Finding:
    if shutil.which("ncu") is None:
        return Finding(
            "counters", False, "Nsight Compute (ncu) is not on PATH", "install it to measure bytes; latency does not need it"
        )
    restricted = DRIVER_PARAMETERS.exists() and "RmProfilingAdminOnly: 1" in DRIVER_PARAMETERS.read_text()
    fix = "run as root, or load the driver with NVreg_RestrictProfilingToAdminUsers=0"
    return Finding(
        "counters", not restricted, "for root only" if restricted else "open to this user", fix if restricted else ""
    )


def _meters() -> Finding:
    from harness.meters.session import GpuMeters, open_meters

    if environment.gpu() is None:
        return Finding("meters", False, "no GPU to read", "latency does not need them")
    meters = open_meters("cuda")
    if not isinstance(meters, GpuMeters):
        return Finding("meters", False, meters.reason or "", "energy and clocks stay unknown; latency does not need them")
    gpu = meters.gpu
    idle = "unknown" if meters.idle_w is None else f"{meters.idle_w:.0f} W"
    lacks = f"; lacks {', '.join(sorted(gpu.missing))}" if gpu.missing else ""
    return Finding("meters", not gpu.missing, f"power {gpu.power_kind or 'unknown'}, idle {idle}{lacks}")


def _disk(store: Path) -> Finding:
    folder = next(parent for parent in (store.resolve(), *store.resolve().parents) if parent.is_dir())
    free = shutil.disk_usage(folder).free
    good = free > LOW_DISK_BYTES
    return Finding("disk", good, f"{free / 1e9:.0f} GB free for {store}", "" if good else "free some, or use another --store")
