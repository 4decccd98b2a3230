"""A panel in plain sentences with numbers and intervals: what a reader who decides wants to know, in that order."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from reports import evidence
from reports.panels import Entry, Panel
from reports.payoff import Crossover, claimed, crossover, sparse_backends, speedup_interval, verdict
from reports.text import bracket, duration, listing, near_size, short_size, times

LEVEL_WORDS = {"attention": "attention of one layer", "token": "one decode step of the whole model", "engine": "serving"}
MOST_BATCHES = 6
MOST_CELLS = 3


@dataclass(frozen=True)
class Answer:
    question: str
    sentences: list[str]


@dataclass(frozen=True)
class Tile:
    """One figure in large type."""

    label: str
    value: str
    note: str


@dataclass(frozen=True)
class Summary:
    headline: str
    tiles: list[Tile]
    answers: list[Answer]


def summary(panel: Panel, fidelity: Sequence[str] = ()) -> Summary:
    """The answers of one panel.  Says so where its rows carry none.  `fidelity`: what selectors keep, in sentences."""
    ranked = sparse_backends(panel)
    lead = ranked[0] if ranked else None
    crossings = [found for batch in panel.batches if lead and (found := crossover(panel, lead, batch))]
    answers = [
        Answer("Does sparse decoding pay?", _pays(panel, ranked, crossings)),
        Answer("By how much?", _gain(panel, ranked)),
        Answer("What does it cost in fidelity?", list(fidelity[:MOST_CELLS]) or evidence.fidelity()),
        Answer("Can I believe it?", evidence.trust(panel)),
        Answer("Where does the remaining time go?", evidence.remaining_time(panel, lead)),
        Answer("What changed since the run before?", evidence.changes(panel)),
    ]
    return Summary(_headline(panel, lead, crossings), _tiles(panel, lead, crossings), answers)


def _headline(panel: Panel, lead: str | None, crossings: list[Crossover]) -> str:
    if lead is None:
        return _no_claim(panel)
    best = _best(panel, lead)
    what = LEVEL_WORDS.get(panel.level, panel.level)
    speed = times(best.row["speedup_vs_best_dense"], speedup_interval(panel, best))
    peak = f"{what} is {speed} as fast with {lead} as with the fastest dense kernel at {_cell(best)}"
    if best.row["speedup_vs_best_dense"] < 1:
        return f"Sparse decoding does not pay in the measured range: at its best, {peak}."
    first = _first(crossings)
    if first is None:
        return f"Sparse decoding pays in some cells only: {peak}."
    return f"Sparse decoding pays {_from(first)} at batch {first.batch}: {peak}."


def _first(crossings: list[Crossover]) -> Crossover | None:
    """The batch that begins to win at the shortest context."""
    starts = [found for found in crossings if found.kind != "never"]
    return min(starts, key=lambda found: (found.at or found.above, found.batch), default=None)


def _no_claim(panel: Panel) -> str:
    if any(entry.row["device"] == "cpu" for entry in panel.entries):
        return "Measured on a CPU: these rows show that everything runs and is right. They are no performance claim."
    if not any(entry.drawn for entry in panel.entries):
        return "No row of this set-up is OK, so nothing can be said about speed; the reasons are under Failures and skips."
    if not any(entry.drawn and not entry.dense for entry in panel.entries):
        return "Only dense backends have a number here, so nothing can be said about sparse decoding."
    return "No sparse backend has a number that can be compared with a dense one of the same case and machine."


def _tiles(panel: Panel, lead: str | None, crossings: list[Crossover]) -> list[Tile]:
    tiles = []
    if lead is not None:
        best = _best(panel, lead)
        tiles.append(
            Tile(
                "largest speed-up",
                f"{best.row['speedup_vs_best_dense']:.2f}x",
                f"{bracket(speedup_interval(panel, best))} {lead} against {best.row['best_dense']}, {_cell(best)}",
            )
        )
        if found := _first(crossings):
            place = near_size(found.at) if found.at else f"{'≤ ' if found.kind == 'always' else '> '}{short_size(found.below)}"
            tiles.append(Tile("pays from a context of", place, f"{_bounds(found)} tokens, batch {found.batch}".strip()))
        tiles.append(
            Tile(
                "latency there",
                duration(best.row["latency_us"]),
                f"{bracket(best.row['latency_ci95_us'])} µs, {LEVEL_WORDS.get(panel.level, panel.level)}",
            )
        )
    good = sum(entry.drawn for entry in panel.entries)
    tiles.append(Tile("rows with a number", f"{good} of {len(panel.entries)}", evidence.outcome_counts(panel.entries)))
    return tiles


def _pays(panel: Panel, ranked: list[str], crossings: list[Crossover]) -> list[str]:
    if not ranked:
        return [_no_claim(panel)]
    sentences = [_crossing_sentence(panel, found) for found in crossings[:MOST_BATCHES]]
    if len(crossings) > MOST_BATCHES:
        sentences.append(f"{len(crossings) - MOST_BATCHES} more batches are in the heat map.")
    if any(found.kind == "at" for found in crossings):
        sentences.append(
            "A crossover is interpolated between two measured contexts on logarithmic axes; its 95 % interval holds the noise "
            "of the measurements, not the error of the interpolation."
        )
    if panel.level == "attention":
        sentences.append(
            "This is attention alone: a whole decode step also reads the weights, so its gain is smaller (level token)."
        )
    return sentences


def _crossing_sentence(panel: Panel, found: Crossover) -> str:
    where = f"Batch {found.batch}: {found.backend}"
    if found.kind == "always":
        only = "the only measured context" if len(panel.contexts) == 1 else "the smallest context with a number on"
        return f"{where} beats the fastest dense backend from {only}, {short_size(found.below)}."
    if found.kind == "never":
        return (
            f"{where} does not beat the fastest dense backend at the largest context with a number, {short_size(found.above)}."
        )
    if found.kind == "between":
        return (
            f"{where} begins to win between {short_size(found.below)} and {short_size(found.above)}; contexts in between have "
            "no number, so no crossover is drawn."
        )
    measured = f"slower at the measured {short_size(found.below)}, faster at {short_size(found.above)}"
    return f"{where} wins from {near_size(found.at or 0)} {_bounds(found)} tokens of context on ({measured})."


def _gain(panel: Panel, ranked: list[str]) -> list[str]:
    if not ranked:
        return ["Nothing to compare."]
    lead, sentences = ranked[0], []
    cells = claimed(panel, lead)
    longest = max(entry.row["ctx"] for entry in cells)
    told = _spread([entry for entry in cells if entry.row["ctx"] == longest])
    told += [entry for entry in cells if entry.row["speedup_vs_best_dense"] < 1 and entry not in told][:MOST_CELLS]
    for entry in told:
        rival, interval = panel.rival(entry), speedup_interval(panel, entry)
        assert rival is not None and interval is not None  # claimed entries have both
        sentences.append(
            f"{_cell(entry)}: {lead} takes {duration(entry.row['latency_us'], entry.row['latency_ci95_us'])}, "
            f"{rival.row['backend']} {duration(rival.row['latency_us'], rival.row['latency_ci95_us'])}: "
            f"{times(entry.row['speedup_vs_best_dense'], interval)} ({verdict(interval)})."
        )
    if len(cells) > len(told):
        sentences.append(f"The heat map has all {len(cells)} cells.")
    if others := ranked[1:]:
        parts = [f"{name} at most {_best(panel, name).row['speedup_vs_best_dense']:.2f}x" for name in others]
        sentences.append(f"Other sparse backends: {listing(parts)}.")
    return sentences


def _spread(cells: list[Entry]) -> list[Entry]:
    """At most MOST_CELLS of them: the first, the last and one between."""
    return cells if len(cells) <= MOST_CELLS else [cells[0], cells[len(cells) // 2], cells[-1]]


def _best(panel: Panel, backend: str) -> Entry:
    return max(claimed(panel, backend), key=lambda entry: entry.row["speedup_vs_best_dense"])


def _cell(entry: Entry) -> str:
    return f"{short_size(entry.row['ctx'])} x batch {entry.row['batch']}"


def _from(found: Crossover) -> str:
    if found.kind == "at":
        return f"from {near_size(found.at or 0)} {_bounds(found)} tokens of context on"
    if found.kind == "always":
        return f"from the smallest context with a number, {short_size(found.below)},"
    return f"from somewhere between {short_size(found.below)} and {short_size(found.above)} tokens of context on"


def _bounds(found: Crossover) -> str:
    if found.kind != "at":
        return ""
    low = near_size(found.low) if found.low else "below the measured"
    high = near_size(found.high) if found.high else "above the measured"
    return f"[{low}, {high}]"
