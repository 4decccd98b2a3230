"""Two sets of records -> verdicts, cell by cell.  Imports no torch.

A cell is a case and a backend.  Of several records of BASE for a cell (the last good runs) the one in the middle is compared,
and how far they lie apart raises the effect floor: what differs between good runs is no change.
"""

from __future__ import annotations

import json
import math
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from statistics import median

from harness.backends import CONTROL
from harness.effect import Effect, paired_effect
from harness.machine import MachineKey
from harness.record import Outcome, Record
from harness.stats import outlier_labels, round_medians
from harness.thresholds import LEAST, MOST, Threshold, threshold
from harness.verdict import Cell, Comparison, Coverage, Verdict

SAME_WITHIN = 0.01
TIMED = (Outcome.OK, Outcome.THROTTLED)


@dataclass(frozen=True)
class Rules:
    """alpha: per cell.  false_discovery_rate: of a grid [Benjamini and Hochberg].  window: records of BASE per cell, the
    latest ones.  succeeds: a cell of which BASE only has THROTTLED records counts as new, and not as INVALID."""

    alpha: float = 0.001
    false_discovery_rate: float = 0.01
    window: int = 10
    thresholds: Sequence[Threshold] = ()
    succeeds: bool = False


def compare(base: Iterable[Record], new: Iterable[Record], rules: Rules | None = None) -> Comparison:
    """Verdicts of NEW against BASE for every cell that either has."""
    rules, base, new = rules or Rules(), list(base), list(new)
    controls = [control(side, rules) for side in (new, base)]
    void = controls[0].void or (f"BASE: {controls[1].void}" if controls[1].void else None)
    windows, latest = _by_cell(base), {cell: found[-1] for cell, found in _by_cell(new).items()}
    names = list(dict.fromkeys([*latest, *windows]))
    drafts = [_draft(windows.get(name, []), latest.get(name), controls, rules) for name in names]
    return Comparison(_judged(drafts, rules), void, max((one.noise for one in controls if one.noise is not None), default=None))


def cell_key(record: Record) -> str:
    """Two records with the same text are of the same cell.  The memory plan may differ, which is then NOT_COMPARABLE."""
    case = {name: value for name, value in record.case.items() if name != "kv"}
    return json.dumps([case, record.backend], sort_keys=True)


def cell_name(record: Record) -> str:
    """A cell in words, for people and for the globs of thresholds."""
    case = record.case
    size = case["ctx"] // 1024
    ctx = f"{size // 1024}M" if size and size % 1024 == 0 else f"{size}K" if case["ctx"] % 1024 == 0 else str(case["ctx"])
    budget = case["select"]["budget_tokens"]
    return f"{case['model']['name']} {case['level']} {ctx} x {case['batch']} budget {budget} {record.backend}"


@dataclass(frozen=True)
class Control:
    """The A/A comparisons of a run.

    void    why the run is: one of them found a change above the threshold of its cell.  Less than that is real (two copies of
            one buffer can differ by a percent in time, always the same one) and raises the effect floor
    noises  time of each in ns, and the largest change that it cannot rule out
    """

    void: str | None
    noises: list[tuple[float, float]]

    @property
    def noise(self) -> float | None:
        return max((noise for _, noise in self.noises), default=None)

    def noise_at(self, ns: float) -> float:
        """Of the comparison whose time is nearest: what shakes a step of 10 us does not shake one of 1 ms."""
        return min(self.noises, key=lambda one: abs(math.log(one[0] / ns)), default=(0.0, 0.0))[1]


def control(records: Iterable[Record], rules: Rules) -> Control:
    """What the second instances ("flashinfer#2") in a run tell."""
    by_cell = {cell_key(record): record for record in sorted(records, key=lambda record: record.time)}
    effects = []
    for record in by_cell.values():
        if record.backend.endswith(CONTROL):
            first = by_cell.get(cell_key(replace(record, backend=record.backend.removesuffix(CONTROL))))
            if first and first.rounds_ns and record.rounds_ns and (effect := paired_effect(first.rounds_ns, record.rounds_ns)):
                effects.append((first, effect))
    void = next(
        (
            f"A/A comparison of {cell_name(first)} found {effect.change:+.1%} (p = {effect.p:.1g}) where there is no change"
            for first, effect in effects
            if effect.p < rules.alpha and abs(effect.change) > threshold(rules.thresholds, cell_name(first))
        ),
        None,
    )
    return Control(void, [(latency_ns(first), max(abs(effect.low), abs(effect.high))) for first, effect in effects])


def latency_ns(record: Record) -> float:
    """Median over rounds of a record that has some."""
    return median(round_medians(record.rounds_ns or []))


def timed(record: Record | None) -> bool:
    return record is not None and record.outcome in TIMED and bool(record.rounds_ns)


def _by_cell(records: Iterable[Record]) -> dict[str, list[Record]]:
    """Records of each cell, oldest first, without those of the A/A comparison."""
    cells: dict[str, list[Record]] = defaultdict(list)
    for record in sorted(records, key=lambda record: record.time):
        if not record.backend.endswith(CONTROL):
            cells[cell_key(record)].append(record)
    return cells


def _draft(base: list[Record], new: Record | None, controls: Sequence[Control], rules: Rules) -> Cell:
    """A cell with everything but the verdict on its effect: UNCLEAR stands for that."""
    good = [record for record in base if timed(record)]
    shown = new or base[-1]
    name = cell_name(shown)
    cell = Cell(cell_key(shown), name, shown.backend, shown.case, Verdict.UNCLEAR, command=shown.command)
    if new is not None and new.outcome is Outcome.INVALID:
        return replace(cell, verdict=Verdict.INVALID, reason=new.reason, coverage=Coverage.LOST if good else Coverage.NONE)
    if new is None or not timed(new) or not good:
        return _uncovered(cell, good, base, new)
    alike = [record for record in good if _differs(record, new) is None]
    if not alike:
        return replace(cell, verdict=Verdict.NOT_COMPARABLE, reason=_differs(good[-1], new))
    if new.outcome is Outcome.THROTTLED:
        return replace(cell, verdict=Verdict.INVALID, reason=f"NEW is THROTTLED: {new.reason}")
    settled = [record for record in alike if record.outcome is Outcome.OK][-rules.window :]
    if not settled and rules.succeeds:
        return _uncovered(cell, settled, alike, new)
    if not settled:
        return replace(cell, verdict=Verdict.INVALID, reason=f"BASE is THROTTLED: {alike[-1].reason}")
    alike = sorted(settled, key=latency_ns)
    middle = alike[len(alike) // 2]
    spread = max(latency_ns(alike[-1]) / latency_ns(middle), latency_ns(middle) / latency_ns(alike[0])) - 1
    floor = max(threshold(rules.thresholds, name), spread, *(one.noise_at(latency_ns(middle)) for one in controls))
    if floor > MOST:
        return replace(
            cell, verdict=Verdict.INVALID, reason=f"noise of {floor:.0%} hides any change; measure on a quiet machine"
        )
    cell = replace(
        cell,
        floor=floor,
        window=len(alike),
        base_ns=latency_ns(middle),
        new_ns=latency_ns(new),
        outliers=(_outliers(middle), _outliers(new)),
    )
    effect = paired_effect(middle.rounds_ns or [], new.rounds_ns or [])
    if effect is None:
        return replace(cell, verdict=Verdict.INVALID, reason="too few rounds to compare, or a time of zero")
    return replace(cell, effect=effect)


def _uncovered(cell: Cell, good: list[Record], base: list[Record], new: Record | None) -> Cell:
    def said(record: Record | None) -> str:
        return "has no such row" if record is None else f"{record.outcome}: {record.reason}"

    if good:
        coverage, reason = Coverage.LOST, f"coverage lost: NEW {said(new)}"
    elif timed(new):
        coverage, reason = Coverage.GAINED, f"coverage gained: BASE {said(base[-1] if base else None)}"
    else:
        coverage, reason = Coverage.NONE, f"no time on either side: {said(new or base[-1])}"
    return replace(cell, verdict=Verdict.NOT_COMPARABLE, reason=reason, coverage=coverage)


def _differs(base: Record, new: Record) -> str | None:
    """Why two timed records of a cell are not to be compared, or None."""
    if (base.key, base.time) == (new.key, new.time):
        return "the same record on both sides: that compares a run with itself"
    if machines := MachineKey.of(base.environment).differs(MachineKey.of(new.environment)):
        return machines
    plans = [(record.kv or {}).get("plan") for record in (base, new)]
    for what, before, after in (
        ("timer", base.timer, new.timer),
        ("cache state", base.cache_state, new.cache_state),
        ("memory plan", *plans),
    ):
        if before != after:
            return f"another {what}: {before} against {after}"
    return None


def _outliers(record: Record) -> int:
    return sum(label is not None for label in outlier_labels(round_medians(record.rounds_ns or [])))


def _judged(cells: list[Cell], rules: Rules) -> list[Cell]:
    from scipy.stats import false_discovery_control

    tested = [cell.effect.p for cell in cells if cell.effect]
    adjusted = iter(false_discovery_control(tested) if tested else [])
    return [_judge(cell, cell.effect, float(next(adjusted)), rules) if cell.effect else cell for cell in cells]


def _judge(cell: Cell, effect: Effect, adjusted: float, rules: Rules) -> Cell:
    floor = cell.floor or LEAST
    significant = effect.p < rules.alpha and adjusted < rules.false_discovery_rate
    if significant and abs(math.log1p(effect.change)) > math.log1p(floor):
        return replace(cell, verdict=Verdict.SLOWER if effect.change > 0 else Verdict.FASTER)
    if effect.low > -SAME_WITHIN and effect.high < SAME_WITHIN:
        return replace(cell, verdict=Verdict.SAME)
    if significant:
        return replace(cell, reason=f"a change of {effect.change:+.1%} is under the effect floor of {floor:.1%}")
    return replace(cell, reason=f"anything from {effect.low:+.1%} to {effect.high:+.1%} is possible")
