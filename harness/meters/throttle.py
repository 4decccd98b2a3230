"""What the clocks say about rounds: slow ones are set aside and counted, too many make the row THROTTLED.

A clock that only the power cap lowers is not slow: at batch 16 an H200 reads memory at 94 % of its roof and sits at its 700 W
with the SM clock under 75 % of the default in a third of the rounds, while the times agree within 0.5 %.  That is the part's
own steady state under this load: the rounds are counted (`power_capped_share`) and stay.  Drift of the times is judged apart.
"""

from __future__ import annotations

from harness.record import Record

SLOW_SHARE = 0.75  # of the default clock
MOST_SLOW = 0.2  # of all rounds
STEADY_STATE = ["power cap"]


def set_slow_rounds_aside(record: Record) -> None:
    """Move the samples of rounds under SLOW_SHARE of the default clock to meters["set_aside_ns"], by their place.

    More than MOST_SLOW of them stay where they are: then nothing is left that could stand for the case, and
    meters["slow_share"] makes the row THROTTLED.
    """
    meters, rounds = record.meters or {}, record.rounds_ns or []
    clocks, default = meters.get("sm_mhz") or [], meters.get("default_sm_mhz")
    if not default or not rounds:
        return
    events = meters.get("events") or [None] * len(clocks)
    low = [place for place, clock in enumerate(clocks) if clock is not None and clock < SLOW_SHARE * default]
    slow = [place for place in low if events[place] != STEADY_STATE]
    meters["power_capped_share"] = (len(low) - len(slow)) / len(rounds)
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
