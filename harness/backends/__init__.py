"""The backends of this installation, found by the entry point group `locks_bench.backends`.  Naming them imports no torch."""

from __future__ import annotations

import hashlib
import inspect
from collections.abc import Callable, Iterable, Sequence
from functools import cache
from importlib.metadata import EntryPoint, entry_points
from pathlib import Path

from harness.backend import Backend
from harness.errors import UserError
from harness.presets import nearest

ROOT = Path(__file__).resolve().parents[2]
GROUP = "locks_bench.backends"
CONTROL = "#2"  # "locks#2" is a second instance of "locks": what the two differ by is the noise of a run
DEFAULT = {"cuda": ("fa3", "flashinfer", "locks"), "cpu": ("sdpa", "locks")}


def _found() -> dict[str, EntryPoint]:
    found = _scan(entry_points)
    if not found:
        raise UserError("no backends are installed; install this package first: pip install -e .")
    return found


@cache
def _scan(find: Callable[..., Iterable[EntryPoint]]) -> dict[str, EntryPoint]:
    """Once a process: reading what all packages have to say takes 10 ms, and `list` asks once for every backend."""
    return {point.name: point for point in find(group=GROUP)}


def names() -> list[str]:
    """Names of all backends, those that cannot run on this machine included."""
    return sorted(_found())


def resolve(wanted: Sequence[str] | str, device: str) -> list[str]:
    """The names a user meant: "default" (by device), "all", or names; UserError with the nearest name for an unknown one."""
    if isinstance(wanted, str):
        wanted = wanted.split(",")
    known = names()
    chosen: list[str] = []
    for name in (part.strip() for part in wanted):
        if name in ("default", "all"):
            chosen += DEFAULT[device] if name == "default" else known
        elif name.removesuffix(CONTROL) in known:
            chosen.append(name)
        else:
            raise UserError(f"unknown backend {name!r}; {nearest(name, known)}")
    return list(dict.fromkeys(chosen))


def load(name: str) -> type[Backend]:
    """The class behind one name.  UserError if its module cannot be imported."""
    points, name = _found(), name.removesuffix(CONTROL)
    if name not in points:
        raise UserError(f"unknown backend {name!r}; {nearest(name, points)}")
    try:
        return points[name].load()
    except Exception as error:
        raise UserError(f"backend {name!r} ({points[name].value}) cannot be loaded: {error}") from error


def make(name: str) -> Backend:
    """An instance for one case.  A backend that cannot be loaded, made or asked for its version becomes one that is
    unavailable, and says why."""
    try:
        backend = load(name)()
        backend.version()
        return backend
    except UserError as error:
        return _Unloadable(str(error))
    except Exception as error:
        return _Unloadable(f"backend {name!r} cannot be made: {type(error).__name__}: {error}")


def foreign_source(name: str) -> str | None:
    """Hash of the file that a backend of another package comes from; None for ours, whose sources count as a whole."""
    try:
        made = load(name)
        file = Path(inspect.getfile(made))
    except (UserError, TypeError, OSError):
        return None
    if ROOT in file.resolve().parents and made.__module__.startswith("harness."):
        return None
    return hashlib.sha256(file.read_bytes()).hexdigest()[:12]


class _Unloadable(Backend):
    def __init__(self, reason: str) -> None:
        self._reason = reason

    def unavailable(self) -> str:
        return self._reason
