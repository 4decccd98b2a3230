"""Backends for subprocesses of tests: a folder for PYTHONPATH with a module and the entry points that name its classes."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]


def environment(folder: Path, source: str, backends: Mapping[str, str]) -> dict[str, str]:
    """Write the plug-in into `folder`; the environment in which it is found.  backends: name -> "module:Class"."""
    info = folder / "plug_in_of_a_test-1.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: plug-in-of-a-test\nVersion: 1\n")
    points = "".join(f"{name} = {where}\n" for name, where in backends.items())
    (info / "entry_points.txt").write_text(f"[locks_bench.backends]\n{points}")
    (folder / "plug_in_of_a_test.py").write_text(source)
    path = os.pathsep.join([str(folder), str(ROOT), os.environ.get("PYTHONPATH", "")])
    return os.environ | {"PYTHONPATH": path}
