"""The parent's side of an engine: its process, its silence, its end."""

from __future__ import annotations

import multiprocessing
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Protocol

from harness.engine.worker import Broken, EngineEvent, EngineJob, serve


class Host(Protocol):
    def events(self, job: EngineJob, log: Path) -> Iterator[EngineEvent]:
        """Start an engine and hand over what it says until it has ended.  An end without a word is Broken."""
        ...


class TimedOut(Exception):
    """The engine said nothing for too long and was killed."""


class EngineProcess:
    """A process of its own per engine.  It is no daemon, since vLLM starts processes too."""

    def __init__(self, silence_s: float) -> None:
        self._silence_s = silence_s

    def events(self, job: EngineJob, log: Path) -> Iterator[EngineEvent]:
        """TimedOut after `silence_s` without an event."""
        context = multiprocessing.get_context("spawn")
        ours, theirs = context.Pipe()
        process = context.Process(target=serve, args=(theirs, job, str(log)))
        process.start()
        theirs.close()
        try:
            while True:
                if not ours.poll(self._silence_s):
                    raise TimedOut(f"no sign of life within {self._silence_s:g} s")
                try:
                    yield ours.recv()
                except (EOFError, ConnectionError):
                    break
            process.join(30)
            if process.exitcode not in (0, None):
                yield Broken("unexpectedly", f"its process ended with exit code {process.exitcode}")
        finally:
            ours.close()
            _end_group(process.pid)
            process.join()


def _end_group(leader: int | None) -> None:
    """Kill the worker with all that vLLM started from it.  It leads a group of its own once it has begun."""
    assert leader is not None
    for kill in (os.killpg, os.kill):
        try:
            kill(leader, signal.SIGKILL)
        except (ProcessLookupError, PermissionError):
            continue
