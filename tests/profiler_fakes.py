"""A profiler on PATH that says what a test wants."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import fake_ncu
import pytest
from rich.console import Console


def shown(what: Any) -> str:
    console = Console(width=200, record=True, quiet=False, file=open(os.devnull, "w"))  # noqa: SIM115
    console.print(what)
    return console.export_text()


def tool_on_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Put a tool on PATH that prints a text and ends with a code, after some seconds."""

    def make(name: str, text: str, code: int = 0, seconds: int = 0) -> None:
        (tmp_path / f"{name}.txt").write_text(text)
        script = tmp_path / name
        wait = f"sleep {seconds} & wait\n" if seconds else ""
        script.write_text(f"#!/bin/sh\n{wait}exec {sys.executable} {fake_ncu.__file__} {tmp_path / name}.txt {code}\n")
        script.chmod(0o755)
        monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")

    return make
