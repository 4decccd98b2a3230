"""What one engine says -> the records of its cells, each stored at once."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Protocol

from harness.engine.cells import EngineCase
from harness.engine.record import break_off, fill, finish
from harness.engine.texts import Text
from harness.engine.worker import Broken, Cell, CellFailed, CellTimed, Checked, Measuring, Started
from harness.record import Outcome, Record


class Keeper(Protocol):
    """The sweep that an engine belongs to."""

    late: set[EngineCase]

    def blank(self, case: EngineCase, name: str, batch: int | None = None) -> Record: ...
    def keep(self, case: EngineCase, name: str, record: Record) -> None: ...
    def begun(self, case: EngineCase, name: str, note: str) -> None: ...


class EngineRun:
    """Events of one engine -> records.  `waiting` shrinks as cells get theirs."""

    def __init__(self, sweep: Keeper, name: str, waiting: dict[Cell, EngineCase]) -> None:
        self.sweep, self.name, self.waiting = sweep, name, waiting
        self.started: Started | None = None
        self.gate: dict[str, Any] = {}
        self.texts: list[Text] | None = None
        self.measuring: Measuring | None = None
        self.failed = False

    def take(self, event: object, log: Path) -> None:
        """One event; `log` is named where the engine broke."""
        match event:
            case Started():
                self.started = event
            case Checked(gate=gate, texts=texts, reason=reason):
                self.gate, self.texts = gate, None if reason else texts
                if reason:
                    self._settle(list(self.waiting), Outcome.INCORRECT, reason)
            case Measuring(cell=cell):
                self.measuring = event
                self.sweep.begun(self.waiting[cell], self.name, self._note())
            case CellTimed(cell=cell, timed=timed, meters=meters):
                case = self.waiting.pop(cell)
                record = self._record(case, timed.batch)
                finish(record, case, timed, meters)
                self.sweep.keep(case, self.name, record)
                self.measuring = None
            case CellFailed(cell=cell, kind="late"):
                self.sweep.late.add(self.waiting.pop(cell))
            case CellFailed(cell=cell, kind=kind, reason=reason):
                self._settle([cell], Outcome.OOM if kind == "does not fit" else Outcome.INVALID, reason)
            case Broken():
                self._broken(event, log)

    def give_up(self, outcome: Outcome, reason: str) -> None:
        """The engine is gone: the cell it was at is to blame, or all if it had not begun."""
        self.failed = True
        self._settle([self.measuring.cell] if self.measuring else list(self.waiting), outcome, reason)

    def end(self) -> None:
        """After the last event: whatever has no outcome and cannot get one from another engine."""
        if self.waiting and not self.failed:
            self.give_up(Outcome.CRASHED, "the engine ended without a result")

    def _broken(self, event: Broken, log: Path) -> None:
        if self.failed or not self.waiting:  # at its end, when all is told
            return
        self.failed = True
        for cell in [self.measuring.cell] if self.measuring else list(self.waiting):
            case = self.waiting.pop(cell)
            record = self._record(case, self.measuring.batch if self.measuring else None)
            break_off(record, event, f"{log.parent.name}/{log.name}")
            self.sweep.keep(case, self.name, record)
        self.measuring = None

    def _settle(self, cells: list[Cell], outcome: Outcome, reason: str) -> None:
        for cell in cells:
            case = self.waiting.pop(cell)
            tried = self.measuring.batch if self.measuring and self.measuring.cell == cell else None
            record = self._record(case, tried)
            record.outcome, record.reason = outcome, reason
            self.sweep.keep(case, self.name, record)
        self.measuring = None

    def _note(self) -> str:
        assert self.started is not None
        tokens = self.started.blocks * self.started.block_size
        return f"{self.name}: engine up in {self.started.seconds:.0f} s, its cache holds {tokens:,} tokens"

    def _record(self, case: EngineCase, batch: int | None) -> Record:
        record = self.sweep.blank(case, self.name, batch)
        if self.started is not None:
            fill(record, case, self.started, self.gate)
        return record
