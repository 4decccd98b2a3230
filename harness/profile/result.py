"""What a profiler gave, as plain data.  Imports no torch."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from enum import StrEnum
from typing import Any


class Status(StrEnum):
    OK = "OK"
    NO_TOOL = "NO_TOOL"
    NO_PERMISSION = "NO_PERMISSION"
    NO_KERNELS = "NO_KERNELS"
    COUNTERS_HELD = "COUNTERS_HELD"
    TIMEOUT = "TIMEOUT"
    FAILED = "FAILED"


HINTS = {
    Status.NO_TOOL: "install {tool} and put it on PATH; latencies do not need it",
    Status.NO_PERMISSION: "run as root and outside of a sandbox, or load the driver with NVreg_RestrictProfilingToAdminUsers=0",
    Status.NO_KERNELS: "the tool saw no kernel: profile with another --tool, or update it for this driver",
    Status.COUNTERS_HELD: "another process holds the counters, often DCGM: its owner can pause it with `dcgmi profile --pause`",
    Status.TIMEOUT: "try a shorter --ctx, or a longer --timeout",
    Status.FAILED: "the profiled process ended with an error: the case may not fit beside the tool",
}


@dataclass(frozen=True)
class Kernel:
    """One launch (nsys, torch: all launches of one name).  Absent is None, and `missing` says why.

    stage           of the backend, by NVTX; None where it has no stages or the tool does not tell
    time_share      of all kernels seen; bandwidth_tbps: bytes over the tool's own duration, no performance claim
    occupancy       share of the warps that fit which were resident, 0 to 1
    stalls          mean warps per scheduler that waited, by reason
    """

    name: str
    launches: int = 1
    stage: str | None = None
    duration_ns: float | None = None
    time_share: float | None = None
    dram_bytes_read: int | None = None
    dram_bytes_written: int | None = None
    bandwidth_tbps: float | None = None
    occupancy: float | None = None
    stalls: dict[str, float] = field(default_factory=dict)
    missing: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Profile:
    """tool: ncu, nsys or torch.  hint: what to do where status is not OK.  trace: file for a viewer, if there is one."""

    tool: str
    status: Status
    reason: str | None = None
    kernels: list[Kernel] = field(default_factory=list)
    trace: str | None = None

    @property
    def hint(self) -> str | None:
        text = HINTS.get(self.status)
        return text.format(tool=self.tool) if text else None

    @property
    def dram_bytes(self) -> int | None:
        """Read and written by all kernels; None if one of them does not say."""
        parts = [part for kernel in self.kernels for part in (kernel.dram_bytes_read, kernel.dram_bytes_written)]
        known = [part for part in parts if part is not None]
        return sum(known) if known and len(known) == len(parts) else None

    def record(self) -> dict[str, Any]:
        """As stored in a record."""
        return asdict(self) | {"hint": self.hint, "dram_bytes": self.dram_bytes}


def last_line(output: str) -> str:
    """What a tool said last."""
    lines = [line.strip() for line in output.splitlines() if line.strip()]
    return lines[-1] if lines else "it printed nothing"
