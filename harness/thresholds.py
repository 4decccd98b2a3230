"""Which change of which cell is worth an alarm: a file of globs, each with its reason."""

from __future__ import annotations

import tomllib
from collections.abc import Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path

from harness.errors import UserError

LEAST = 0.01  # under a percent nobody can act on a change
MOST = 0.5  # a threshold above this hides everything


@dataclass(frozen=True)
class Threshold:
    """Changes of cells whose name matches the glob `cells` count from `change` on (0.02 is 2 %)."""

    cells: str
    change: float
    reason: str

    def __post_init__(self) -> None:
        if not LEAST <= self.change <= MOST:
            raise UserError(
                f"threshold {self.change:.1%} for {self.cells!r} is refused: use {LEAST:.0%} to {MOST:.0%}; "
                "noise above that is to be measured away, not allowed for"
            )
        if not self.reason.strip():
            raise UserError(f"threshold for {self.cells!r} has no reason; say why it is what it is")


def threshold(thresholds: Sequence[Threshold], cell: str) -> float:
    """Of a cell by its name: the last that matches, else the least there is."""
    return next((one.change for one in reversed(thresholds) if fnmatchcase(cell, one.cells)), LEAST)


def load_thresholds(file: Path) -> list[Threshold]:
    """From a TOML file of [[threshold]] tables; UserError says what is wrong with it."""
    try:
        text = file.read_text()
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"--thresholds {file} cannot be read ({getattr(error, 'strerror', 'not text')})") from error
    try:
        tables = tomllib.loads(text)["threshold"]
        return [_threshold(table) for table in tables]
    except (tomllib.TOMLDecodeError, KeyError, TypeError, ValueError) as error:
        raise UserError(
            f"{file} is no file of thresholds ({type(error).__name__}: {error}); "
            'each [[threshold]] has cells = "glob", change = 0.02 and reason = "..."'
        ) from error


def _threshold(table: dict[str, object]) -> Threshold:
    kinds = {"cells": str, "change": float, "reason": str}
    for name, value in table.items():
        if not isinstance(value, kinds.get(name, ())):
            raise TypeError(f"{name} = {value!r}")
    return Threshold(**table)  # type: ignore[arg-type]
