"""What a comparison found, as plain data: one cell of a grid, and the whole of it."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from enum import IntEnum, StrEnum
from typing import Any

from harness.effect import Effect


class Verdict(StrEnum):
    """FASTER and SLOWER are significant and above the effect floor; SAME is shown to be, UNCLEAR is neither."""

    FASTER = "FASTER"
    SLOWER = "SLOWER"
    SAME = "SAME"
    UNCLEAR = "UNCLEAR"
    NOT_COMPARABLE = "NOT_COMPARABLE"
    INVALID = "INVALID"


class Coverage(StrEnum):
    """Whether a cell has a time: on both sides, only in BASE, only in NEW, on neither side."""

    KEPT = "kept"
    LOST = "lost"
    GAINED = "gained"
    NONE = "none"


class ExitCode(IntEnum):
    OK = 0
    REGRESSION = 1
    UNCLEAR = 2
    NOT_COMPARABLE = 3


@dataclass(frozen=True)
class Cell:
    """One case and backend on both sides.

    key        compare.cell_key of its records
    name       in words: "llama-3.1-8b attention 128K x 16 budget 2048 locks"
    floor      smallest change that counts: of the run's noise, the spread of the window, and the threshold of the cell
    window     records of BASE that stand behind `base_ns`, which is the one in their middle
    outliers   rounds of BASE and NEW labelled as outliers; all are part of the effect
    """

    key: str
    name: str
    backend: str
    case: dict[str, Any]
    verdict: Verdict
    reason: str | None = None
    coverage: Coverage = Coverage.KEPT
    effect: Effect | None = None
    floor: float | None = None
    window: int = 0
    base_ns: float | None = None
    new_ns: float | None = None
    outliers: tuple[int, int] | None = None
    command: str | None = None


@dataclass(frozen=True)
class Comparison:
    """A grid of cells.

    void         why nothing of the run counts: its A/A comparison found a change where there is none
    noise_floor  largest change that the A/A comparison of the run cannot rule out; None without one
    notes        findings beside the verdicts, such as change points of a history
    """

    cells: list[Cell]
    void: str | None = None
    noise_floor: float | None = None
    notes: list[str] = field(default_factory=list)

    def having(self, *verdicts: Verdict) -> list[Cell]:
        return [cell for cell in self.cells if cell.verdict in verdicts]

    @property
    def lost(self) -> list[Cell]:
        """Cells that had a time and have none: neither a regression nor an improvement, but not nothing either."""
        return [cell for cell in self.cells if cell.coverage is Coverage.LOST]

    @property
    def exit_code(self) -> ExitCode:
        if self.void:
            return ExitCode.UNCLEAR
        if self.having(Verdict.SLOWER):
            return ExitCode.REGRESSION
        if self.lost or self.having(Verdict.INVALID, Verdict.UNCLEAR):
            return ExitCode.UNCLEAR
        if not self.having(Verdict.FASTER, Verdict.SAME) or any(
            cell.coverage is Coverage.KEPT for cell in self.having(Verdict.NOT_COMPARABLE)
        ):
            return ExitCode.NOT_COMPARABLE
        return ExitCode.OK

    def to_dict(self) -> dict[str, Any]:
        """For --json."""
        data = asdict(self)
        return data | {"exit_code": int(self.exit_code), "lost": [cell.name for cell in self.lost]}
