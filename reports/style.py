"""One colour, marker and dash for each backend, the same in all figures of all reports."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, dataclass
from itertools import count


@dataclass(frozen=True)
class Style:
    """symbol: a plotly marker name.  dash: a plotly dash name."""

    color: str
    symbol: str
    dash: str = "solid"


# Told apart by people with any of the common colour deficiencies, and at least 3:1 against both the white and the dark page.
COLORS = ("#2a78d6", "#d55e00", "#009271", "#c065a0", "#8a7a1f", "#7a7f87", "#7a5cc9", "#b0403f")
SYMBOLS = ("circle", "square", "diamond", "triangle-up", "cross", "x", "star", "hexagon")
DASHES = ("solid", "dash", "dot", "dashdot")
KNOWN = ("locks", "fa3", "flashinfer", "locks-triton", "fa3-paged", "sdpa", "locks-cuda")
SAME_AS = {"locks-r8": "locks"}  # a selector that a backend runs under another name


def styles(backends: Iterable[str]) -> dict[str, dict[str, str]]:
    """Style of each backend by name.  The known ones always have theirs; others get what is left, in order of name."""
    used = set(backends)
    others = sorted(used - set(KNOWN) - set(SAME_AS))
    slots = {name: slot for slot, name in enumerate(KNOWN)}
    slots |= {name: slots[other] for name, other in SAME_AS.items()}
    taken = {slots[name] for name in used if name in slots}
    slots |= dict(zip(others, (slot for slot in count() if slot not in taken), strict=False))
    return {name: asdict(_style(slots[name])) for name in sorted(used)}


def _style(slot: int) -> Style:
    turn = slot // len(COLORS)
    # The marker moves on with each turn of the colours, so that no two of the first 64 share both.
    return Style(COLORS[slot % len(COLORS)], SYMBOLS[(slot + turn) % len(SYMBOLS)], DASHES[turn % len(DASHES)])
