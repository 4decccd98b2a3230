"""The nightly gate: a suspicion is measured again in fresh processes before it is an alarm.  Imports no torch."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from statistics import median

from harness.changes import change_points
from harness.compare import Rules, cell_key, cell_name, compare, latency_ns, timed
from harness.machine import MachineKey
from harness.record import Outcome, Record
from harness.verdict import Cell, Comparison, ExitCode, Verdict

FRESH_PROCESSES = 3
Rerun = Callable[[list[Cell], int], Sequence[Record]]  # suspects, number of the fresh process -> their records


@dataclass(frozen=True)
class GateRules:
    """vouch: an UNCLEAR cell passes if a slow-down beyond this can be ruled out (0.05 is 5 %)."""

    compare: Rules
    vouch: float = 0.05
    processes: int = FRESH_PROCESSES


@dataclass(frozen=True)
class Gate:
    """`comparison` after both stages; `suspects` are the names that the first one found: slower, or throttled tonight."""

    comparison: Comparison
    suspects: list[str]
    vouch: float

    @property
    def alarms(self) -> list[Cell]:
        return self.comparison.having(Verdict.SLOWER)

    @property
    def exit_code(self) -> ExitCode:
        """As of the comparison, but an UNCLEAR cell counts only where a slow-down beyond `vouch` is possible."""
        cells = [replace(cell, verdict=Verdict.SAME) if self._vouched(cell) else cell for cell in self.comparison.cells]
        return replace(self.comparison, cells=cells).exit_code

    def _vouched(self, cell: Cell) -> bool:
        return cell.verdict is Verdict.UNCLEAR and cell.effect is not None and cell.effect.high < self.vouch


def gate(history: Iterable[Record], new: Iterable[Record], rerun: Rerun, rules: GateRules | None = None) -> Gate:
    """Compare NEW with the window of good runs; a SLOWER cell stays one only if the median of its re-runs is SLOWER too.

    A cell that throttled gets the verdict of its re-runs; one of which the window has only throttled times is new.
    """
    rules, history, new = rules or GateRules(Rules()), list(history), list(new)
    rules = replace(rules, compare=replace(rules.compare, succeeds=True))
    first = compare(history, new, rules.compare)
    throttled = {cell_key(record) for record in new if record.outcome is Outcome.THROTTLED}
    doubted = [*first.having(Verdict.SLOWER), *(cell for cell in first.having(Verdict.INVALID) if cell.key in throttled)]
    suspects = [] if first.void else doubted
    notes = _changes(history, new)
    if not suspects:
        return Gate(replace(first, notes=notes), [], rules.vouch)
    runs = [record for number in range(rules.processes) for record in rerun(suspects, number)]
    second = {cell.key: cell for cell in compare(history, _medians(runs, suspects, rules.processes), rules.compare).cells}
    cells = [_agreed(cell, second.get(cell.key)) if cell in suspects else cell for cell in first.cells]
    return Gate(replace(first, cells=cells, notes=notes), [cell.name for cell in suspects], rules.vouch)


def _medians(runs: Sequence[Record], suspects: Sequence[Cell], processes: int) -> list[Record]:
    """Of each suspect the re-run in the middle; none where one of the processes gave no time."""
    result = []
    for suspect in suspects:
        found = [record for record in runs if cell_key(record) == suspect.key and record.outcome is Outcome.OK]
        if len(found) == processes:
            result.append(sorted(found, key=latency_ns)[len(found) // 2])
    return result


def _agreed(first: Cell, second: Cell | None) -> Cell:
    seen = f"{first.effect.change:+.1%} at first" if first.effect else "throttled at first"
    if second is None or second.effect is None:
        verdict = Verdict.UNCLEAR if first.effect else first.verdict
        return replace(first, verdict=verdict, reason=f"{seen}; could not be measured again in fresh processes")
    again = f"{second.effect.change:+.1%} in fresh processes"
    if not first.effect:
        return replace(second, reason=f"{seen}, {again}")
    if second.verdict is Verdict.SLOWER:
        return replace(first, reason=f"{seen}, {again}")
    return replace(second, reason=f"{seen}, {again}: not confirmed")


def _changes(history: Sequence[Record], new: Sequence[Record]) -> list[str]:
    """Change points of every cell's medians over time, on the machine of NEW."""
    machines = {MachineKey.of(record.environment) for record in new}
    notes = []
    for key in dict.fromkeys(cell_key(record) for record in new):
        every = [record for record in (*history, *new) if cell_key(record) == key and timed(record)]
        series = sorted((one for one in every if MachineKey.of(one.environment) in machines), key=lambda one: one.time)
        values = [latency_ns(record) for record in series]
        starts = [0, *change_points(values), len(values)]
        for before, at, end in zip(starts, starts[1:], starts[2:], strict=False):
            moved = median(values[at:end]) / median(values[before:at]) - 1
            commit = str(series[at].environment.get("commit"))[:12]
            notes.append(f"{cell_name(series[at])}: {moved:+.1%} since {series[at].time}, commit {commit}")
    return notes
