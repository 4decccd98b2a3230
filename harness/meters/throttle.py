"""What the clocks say about rounds: slow ones are set aside and counted, too many make the row THROTTLED."""

from __future__ import annotations

from harness.record import Record

SLOW_SHARE = 0.75  # of the default clock
MOST_SLOW = 0.2  # of all rounds


def set_slow_rounds_aside(record: Record) -> None:
    """Move the samples of rounds under SLOW_SHARE of the default clock to meters["set_aside_ns"], by their place.

    More than MOST_SLOW of them stay where they are: then nothing is left that could stand for the case, and
    meters["slow_share"] makes the row THROTTLED.
    """
    meters, rounds = record.meters or {}, record.rounds_ns or []
    clocks, default = meters.get("sm_mhz") or [], meters.get("default_sm_mhz")
    if not default or not rounds:
        return
    slow = [place for place, clock in enumerate(clocks) if clock is not None and clock < SLOW_SHARE * default]
    meters["slow_share"] = len(slow) / len(rounds)
    if slow and meters["slow_share"] <= MOST_SLOW:
        meters["set_aside_ns"] = {str(place): rounds[place] for place in slow}
        record.rounds_ns = [samples for place, samples in enumerate(rounds) if place not in slow]


def throttled(record: Record) -> str | None:
    """Why the clocks make a row THROTTLED, or None."""
    meters = record.meters or {}
    share = meters.get("slow_share") or 0.0
    if share <= MOST_SLOW:
        return None
    events = sorted({event for reasons in meters.get("events") or [] for event in reasons or []})
    why = f" ({', '.join(events)})" if events else ""
    return f"{share:.0%} of the rounds ran under {SLOW_SHARE:.0%} of the default clock{why}; let the GPU cool and repeat"
