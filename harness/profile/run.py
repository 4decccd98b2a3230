"""A stored row -> the same case under a profiler -> the row with what it found.  Imports no torch: the target does."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from harness.environment import SOURCE
from harness.errors import UserError
from harness.profile import ncu, nsys
from harness.profile.ncu import with_time_shares
from harness.profile.result import Kernel, Profile, Status, last_line
from harness.record import Record

TOOLS = ("ncu", "nsys", "torch")
TIMEOUT_S = 600.0


def profile(record: Record, tool: str, traces: Path, timeout_s: float = TIMEOUT_S) -> Profile:
    """Run the record's case once under `tool`; files for viewers are left in `traces`.  A failure is a status."""
    if tool not in TOOLS:
        raise UserError(f"unknown tool {tool!r}; use one of {', '.join(TOOLS)}")
    if tool != "torch" and record.case["device"] == "cpu":
        raise UserError(f"{tool} sees GPUs only and this row is of a CPU; use --tool torch")
    path = sys.executable if tool == "torch" else shutil.which(tool)
    if path is None:
        return Profile(tool, Status.NO_TOOL, f"{tool} is not on PATH")
    traces.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as folder:
        job = Path(folder) / "job.json"
        data: dict[str, Any] = {"case": record.case, "backend": record.backend}
        data["pooled"] = (record.kv or {}).get("plan") == "pooled"
        trace, sums = traces / f"{record.key}.{tool}", Path(folder) / "sums.json"
        if tool == "torch":
            data |= {"trace": f"{trace}.json", "sums": str(sums)}
        job.write_text(json.dumps(data))
        target = [sys.executable, "-m", "harness.profile.target", str(job)]
        try:
            if tool == "ncu":
                return ncu.parse(*_run(ncu.command(path, target), timeout_s))
            if tool == "nsys":
                output, code = _run(nsys.record_command(path, trace, target), timeout_s)
                if code:
                    return Profile(tool, Status.FAILED, last_line(output))
                return replace(nsys.parse(*_run(nsys.sum_command(path, trace), timeout_s)), trace=f"{trace}.nsys-rep")
            output, code = _run(target, timeout_s)
            return _torch_profile(sums, f"{trace}.json", output, code)
        except subprocess.TimeoutExpired:
            return Profile(tool, Status.TIMEOUT, f"no end within {timeout_s:g} s")


def joined(record: Record, found: Profile) -> Record:
    """The row with the profile: same key and time, so that it takes the place of the one without.

    A profile that failed leaves the bytes of an earlier one alone.
    """
    profiles = (record.profiles or {}) | {found.tool: found.record()}
    measured = found.dram_bytes if found.status is Status.OK and found.tool == "ncu" else record.dram_bytes_measured
    return replace(record, profiles=profiles, dram_bytes_measured=measured)


def _torch_profile(sums: Path, trace: str, output: str, code: int) -> Profile:
    if code or not sums.exists():
        return Profile("torch", Status.FAILED, f"exit code {code}: {last_line(output)}")
    kernels = [Kernel(**data) for data in json.loads(sums.read_text())]
    if not kernels:
        return Profile("torch", Status.NO_KERNELS, "torch's profiler saw no kernel of this backend")
    return Profile("torch", Status.OK, kernels=with_time_shares(kernels), trace=trace)


def _run(command: Sequence[str], timeout_s: float) -> tuple[str, int]:
    """All that the command printed, and its exit code.  TimeoutExpired after its whole process group is dead."""
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(SOURCE), os.environ.get("PYTHONPATH", "")])}
    with tempfile.TemporaryFile("w+") as output:  # not a pipe: a child that outlives the tool would keep it open
        process = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT, env=environment, start_new_session=True)
        try:
            code = process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            raise
        output.seek(0)
        return output.read(), code
