"""A suite: which cases and backends a sweep measures, as a TOML file.  Imports no torch.

    title = "what it is for"
    backends = ["fa3", "flashinfer", "locks"]      # of all grids that name none
    device = "cpu"                                 # only where the suite is for one device

    [[grid]]                                       # every combination of its axes
    ctx = ["8K", "128K"]                           # one value or a list; sizes as on the command line
    batch = [1, 16]
    backends = ["flashinfer", "flashinfer#2"]      # "#2": a second instance, the A/A comparison of the run

    [[skip]]                                       # cells that are not asked for
    where = { ctx = "1M", batch = 16 }
    backends = ["fa3"]                             # only of these; of all if absent
    reason = "..."

A case that several grids name is measured once, with the backends of all of them side by side.
"""

from __future__ import annotations

import itertools
import tomllib
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from bench import arguments
from bench.request import Device, Request, cases
from harness import backends as known_backends
from harness.case import Case
from harness.engine import cells as engine
from harness.errors import UserError
from harness.presets import nearest

SUITES = Path(__file__).parent / "suites"
AXES: dict[str, Any] = {  # with the value of a grid that does not name it; None: as the device decides
    "ctx": None,
    "batch": 1,
    "model": "llama-3.1-8b",
    "level": "attention",
    "budget": None,
    "kv": "auto",
    "combine": "share",
    "rank": 8,
    "page_size": 16,
    "dtype": "bfloat16",
    "seed": 0,
}
SIZES = ("ctx", "batch", "budget")  # written as numbers or as on the command line
TOP = ("title", "device", "backends", "grid", "skip")


@dataclass(frozen=True)
class Skip:
    """Cells left out: those with all values of `where`, of `backends` only if there are some."""

    where: dict[str, Any]
    reason: str
    backends: tuple[str, ...] = ()

    def matches(self, values: dict[str, Any]) -> bool:
        return all(_same(axis, values[axis], wanted) for axis, wanted in self.where.items())


@dataclass(frozen=True)
class Suite:
    """As written.  device: "cuda", "cpu", or None where it runs on both."""

    name: str
    title: str
    grids: list[dict[str, Any]]
    skips: list[Skip] = field(default_factory=list)
    backends: tuple[str, ...] = ("default",)
    device: str | None = None

    def cells(self, device: Device) -> dict[Case, list[str]]:
        """Backends of each case, in the order of the file.  UserError or ShapeError names what cannot be."""
        found: dict[Case, list[str]] = {}
        for grid in self.grids:
            for values in _combinations(grid):
                resolve = engine.resolve if values["level"] == engine.LEVEL else known_backends.resolve
                names = resolve(tuple(grid.get("backends", self.backends)), device)
                chosen = [name for name in names if not any(self._skipped(skip, values, name) for skip in self.skips)]
                (case,) = cases(_request(values), device)
                if chosen:
                    known = found.setdefault(case, [])
                    known += [name for name in chosen if name not in known]
        if not found:
            raise UserError(f"suite {self.name}: empty axes or its skip rules leave no cell")
        return found

    @staticmethod
    def _skipped(skip: Skip, values: dict[str, Any], backend: str) -> bool:
        return (not skip.backends or backend in skip.backends) and skip.matches(values)


def names() -> list[str]:
    """The suites that come with the package."""
    return sorted(file.stem for file in SUITES.glob("*.toml"))


def load_suite(wanted: str) -> Suite:
    """By name, or by path of a TOML file.  UserError says what is wrong with it."""
    file = Path(wanted) if wanted.endswith(".toml") else SUITES / f"{wanted}.toml"
    if not file.exists():
        raise UserError(f"no suite {wanted!r}; {nearest(wanted, names(), 'the path of a .toml file')}")
    try:
        return _suite(file.stem, tomllib.loads(file.read_text()))
    except (OSError, tomllib.TOMLDecodeError, KeyError, TypeError, ValueError) as error:
        if isinstance(error, KeyError):
            raise UserError(f"{file}: {error} is missing") from error
        raise UserError(f"{file}: {error}") from error


def _suite(name: str, data: dict[str, Any]) -> Suite:
    _known(data, TOP, "")
    if data.get("device") not in (None, "cuda", "cpu"):
        raise ValueError(f"device {data['device']!r} is not known; use cuda or cpu, or leave it out")
    for grid in _tables(data["grid"], "grid"):
        _known(grid, (*AXES, "backends"), "[[grid]] ")
        _typed(grid, "[[grid]] ")
        _names(grid)
    skips = []
    for table in _tables(data.get("skip", []), "skip"):
        _known(table, ("where", "reason", "backends"), "[[skip]] ")
        (where,) = _tables([table["where"]], "skip")
        _known(where, tuple(AXES), "[[skip]] where ")
        _typed(where, "[[skip]] where ")
        skips.append(Skip(where, str(table["reason"]), _names(table)))
    return Suite(name, str(data["title"]), data["grid"], skips, _names(data) or ("default",), data.get("device"))


def _tables(value: Any, name: str) -> list[dict[str, Any]]:
    if not isinstance(value, list) or not all(isinstance(one, dict) for one in value):
        raise ValueError(f"{name} must be tables; write [[{name}]] above each, as in bench/suites/")
    return value


def _names(table: dict[str, Any]) -> tuple[str, ...]:
    found = table.get("backends", [])
    if not isinstance(found, list) or not all(isinstance(one, str) for one in found):
        raise ValueError(f'backends = {found!r} is not a list of names; write for example ["fa3", "locks"]')
    return tuple(found)


def _typed(table: dict[str, Any], where: str) -> None:
    for name, values in table.items():
        if name in AXES:
            allowed = (int, str) if name in SIZES else type(AXES[name])
            for value in values if isinstance(values, list) else [values]:
                if isinstance(value, bool) or not isinstance(value, allowed):
                    kind = "a size" if name in SIZES else "text" if allowed is str else "a number"
                    raise ValueError(f"{where}{name} = {value!r} is not {kind}")


def _known(data: dict[str, Any], allowed: tuple[str, ...], where: str) -> None:
    for name in data:
        if name not in allowed:
            raise ValueError(f"{where}{name!r} is not known; {nearest(name, allowed)}")


def _combinations(grid: dict[str, Any]) -> list[dict[str, Any]]:
    axes = {name: grid.get(name, default) for name, default in AXES.items()}
    lists = [value if isinstance(value, list) else [value] for value in axes.values()]
    return [dict(zip(axes, values, strict=True)) for values in itertools.product(*lists)]


def _request(values: dict[str, Any]) -> Request:
    text = {name: None if value is None else str(value) for name, value in values.items() if name in SIZES}
    return Request(**(values | text))


def _same(axis: str, value: Any, wanted: Any) -> bool:
    """Whether an axis has one of the wanted values; 131072 and "128K" are the same size."""
    if isinstance(wanted, list):
        return any(_same(axis, value, one) for one in wanted)
    if axis in SIZES and value is not None:
        return arguments.size(str(value), axis) == arguments.size(str(wanted), axis)
    return value == wanted
