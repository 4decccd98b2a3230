"""Sentences on what stands behind the numbers of a panel: gate, noise, roof, stages, what is missing, what changed."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from itertools import chain

from harness.compare import Rules, control
from harness.verdict import Verdict
from reports.history import comparison, told
from reports.panels import Entry, Panel
from reports.payoff import claimed
from reports.rows import WARM
from reports.text import count, duration, listing, number, percent, short_size

NOT_MEASURED = "not measured in these records"


def outcome_counts(entries: Iterable[Entry]) -> str:
    """ "10 OK, 2 SKIPPED", OK first, then by number."""
    found = Counter(entry.row["outcome"] for entry in entries)
    return ", ".join(f"{found[name]:,} {name}" for name in sorted(found, key=lambda name: (name != "OK", -found[name], name)))


def fidelity() -> list[str]:
    """What records of latency say about output quality: only that kernels do what their method says."""
    return [
        "Fidelity of the method (page recall, attention mass kept, answers found) is "
        f"{NOT_MEASURED}: run “locks-bench fidelity”. The gate of each row shows that a kernel computes what its method says, "
        "not that the method keeps the right pages."
    ]


def trust(panel: Panel) -> list[str]:
    """Why the numbers may be believed, and what speaks against it."""
    good = [entry for entry in panel.entries if entry.drawn]
    sentences = [
        f"{count(len(panel.entries), 'row')}: {outcome_counts(panel.entries)}. A failed row has no number and no mark."
    ]
    if good:
        sentences += [_gate(good), _noise(good), _control(panel), _clocks(good), *_roof(good), _cache(good), _source(good)]
    if flagged := [entry for entry in good if entry.row["flags"]]:
        sentences.append(
            f"{count(len(flagged), 'speed-up')} above the ratio of the bytes, so one of two numbers must be wrong; "
            "not counted above."
        )
    warned = [entry.row for entry in good if entry.row["warnings"]]
    if unfair := sorted({row["backend"] for row in warned if row["level"] != "engine"}):
        sentences.append(
            f"Scorers that stay below 70 % of the read roof over long contexts: {listing(unfair)}. Their methods could do "
            "better than their kernels here."
        )
    if apart := sum(row["level"] == "engine" for row in warned):
        sentences.append(f"{count(apart, 'row')} of level engine beside an engine that was set up for other lengths.")
    if any(entry.row["device"] == "cpu" for entry in good):
        sentences.append("These rows were measured on a CPU and claim no performance.")
    return sentences


def _gate(good: list[Entry]) -> str:
    gates = [entry.record.gate for entry in good if entry.record.gate]
    errors = [gate["relative_error"] for gate in gates if isinstance(gate.get("relative_error"), int | float)]
    worst = f"; the largest relative error is {max(errors):.4f}" if errors else ""
    tolerances = sorted({gate["tolerance"] for gate in gates if isinstance(gate.get("tolerance"), int | float)})
    allowed = f" (allowed: {listing([f'{value:g}' for value in tolerances])})" if errors and tolerances else ""
    if not gates:
        return "These records do not tell what was checked before the time was taken."
    return f"The output of {len(gates)} of {len(good)} OK rows was checked before the time was taken{worst}{allowed}."


def _noise(good: list[Entry]) -> str:
    def half(entry: Entry) -> float:
        low, high = entry.row["latency_ci95_us"]
        return float((high - low) / 2 / entry.row["latency_us"])

    worst = max(good, key=half)
    rounds = [entry.row["rounds"] for entry in good]
    span = str(min(rounds)) if min(rounds) == max(rounds) else f"{min(rounds)} to {max(rounds)}"
    place = f"{worst.row['backend']}, {short_size(worst.row['ctx'])} x {worst.row['batch']}"
    return (
        f"Noise: each median stands on {span} rounds; the widest 95 % interval is "
        f"±{100 * half(worst):.2f} % of its median ({place})."
    )


def _control(panel: Panel) -> str:
    found = control([entry.record for entry in panel.entries], Rules())
    if found.void:
        return f"The run is void: {found.void}."
    if found.noise is None:
        return "No backend was measured twice under two names (A/A), so the noise between backends is not known."
    return f"A/A: one backend under two names differs by at most {100 * found.noise:.2f} %."


def _clocks(good: list[Entry]) -> str:
    readings = [entry.record.meters or {} for entry in good]
    clocks = [mhz for meters in readings for mhz in meters.get("sm_mhz") or () if mhz is not None]
    if not clocks:
        return f"Clocks and temperature were {NOT_MEASURED}."
    warmth = [celsius for meters in readings for celsius in meters.get("temperature_c") or () if celsius is not None]
    events = set(chain.from_iterable(chain.from_iterable(filter(None, meters.get("events") or ())) for meters in readings))
    heat = f", at most {max(warmth):.0f} °C" if warmth else ""
    why = f"; reasons that clocks were held: {listing(sorted(events))}" if events else ""
    return f"SM clocks at the end of rounds: {min(clocks):.0f} to {max(clocks):.0f} MHz{heat}{why}."


def _roof(good: list[Entry]) -> list[str]:
    shares = [(entry.row["bandwidth_tbps"] / entry.row["read_roof_tbps"], entry) for entry in good if _has_roof(entry)]
    if not shares:
        return [f"The read roof of the memory was {NOT_MEASURED}, so bandwidths have no bound to be checked against."]
    share, fastest = max(shares, key=lambda pair: pair[0])
    above = sum(part > 1 for part, _ in shares)
    verdict = (
        "none is above it"
        if not above
        else f"{count(above, 'row')} above it, so the roof or those times are wrong by that much"
    )
    return [
        f"Memory reads reach {fastest.row['read_roof_tbps']:.2f} TB/s at best on this machine, measured in the same run; the "
        f"nearest row ({fastest.row['backend']}, {short_size(fastest.row['ctx'])}) is at {percent(share)}, and {verdict}."
    ]


def _has_roof(entry: Entry) -> bool:
    return bool(entry.row["bandwidth_tbps"] is not None and entry.row["read_roof_tbps"])


def _cache(good: list[Entry]) -> str:
    warm = sum(entry.row["cache_state"] in WARM for entry in good)
    if warm:
        return f"{count(warm, 'row')} of {len(good)} may have found data in the L2 cache and claim nothing."
    states = sorted({entry.row["cache_state"] or "not recorded" for entry in good})
    return f"Cache state: {listing(states)}; no row may have found its data in the L2 cache." if states else ""


def _source(good: list[Entry]) -> str:
    commits = sorted({str(entry.row["commit"])[:10] for entry in good if entry.row["commit"]})
    dirty = any(entry.record.environment.get("dirty") for entry in good)
    days = sorted({entry.row["time"][:10] for entry in good})
    when = days[0] if len(days) == 1 else f"{days[0]} to {days[-1]}"
    where = f"commit{'s' if len(commits) > 1 else ''} {listing(commits[:4])}" if commits else "a source without a commit"
    return f"Measured {when} from {where}{', with changes that are not committed' if dirty else ''}."


def remaining_time(panel: Panel, lead: str | None) -> list[str]:
    """Stages of the leading backend in its longest cell, against their floors."""
    cells = [entry for entry in claimed(panel, lead) if entry.row["stages_us"]] if lead else []
    if not cells:
        return [f"Stages were {NOT_MEASURED}."]
    entry = max(cells, key=lambda entry: (entry.row["ctx"], -entry.row["batch"]))
    stages, floors = entry.row["stages_us"], entry.row["stage_floors_us"] or {}
    total = sum(stages.values())
    largest = max(stages, key=lambda name: stages[name])
    where = f"{lead} at {short_size(entry.row['ctx'])} x batch {entry.row['batch']}"
    sentences = [f"{where}: {largest} takes {duration(stages[largest])}, {percent(stages[largest] / total)} of all stages."]
    if floors:
        above = {name: stages[name] - floor for name, floor in floors.items()}
        worst = max(above, key=lambda name: above[name])
        sentences += [
            f"Most is left to gain in {worst}: {duration(stages[worst])} against a floor of {duration(floors[worst])}, "
            "the time that its bytes take at the measured read roof.",
            f"All stages with a floor together: {number(sum(stages[name] for name in floors))} µs against "
            f"{number(sum(floors.values()))} µs.",
        ]
    return sentences


def changes(panel: Panel) -> list[str]:
    """The largest changes between each row and the one it replaced."""
    found = comparison(panel)
    if found is None:
        return ["These records hold one measurement of each case: no history yet. Give several stores to see one."]
    verdicts = Counter(str(cell.verdict) for cell in found.cells)
    lost = f" {count(len(found.lost), 'case')} lost the number that was there." if found.lost else ""
    counts = ", ".join(f"{verdicts[name]} {name}" for name in sorted(verdicts))
    sentences = [f"{count(len(found.cells), 'case')} measured before: {counts}.{lost}"]
    if found.void:
        sentences.append(f"The comparison is void: {found.void}.")
    moved = [cell for cell in found.cells if cell.verdict is not Verdict.SAME]
    return sentences + [f"{cell.name}: {cell.verdict}, {told(cell)}." for cell in moved[:4]]
