"""Numbers as text, the same in every table, sentence and figure.  Absent is a dash; nothing that is not 0 looks like it."""

from __future__ import annotations

from collections.abc import Sequence

ABSENT = "-"


def short_size(tokens: int) -> str:
    """Tokens as they are typed: 8192 -> "8K" (1024-based)."""
    for suffix, factor in (("M", 1024 * 1024), ("K", 1024)):
        if tokens % factor == 0:
            return f"{tokens // factor}{suffix}"
    return str(tokens)


def near_size(tokens: float) -> str:
    """Tokens that were interpolated: 12700.0 -> "12.4K" (1024-based), four digits at most."""
    for suffix, factor in (("M", 1024 * 1024), ("K", 1024)):
        if tokens >= factor:
            return f"{tokens / factor:.4g}{suffix}"
    return f"{tokens:.0f}"


def number(value: float | None) -> str:
    """Three significant digits or more, never an exponent."""
    if value is None:
        return ABSENT
    if 0 < value < 0.005:
        return "<0.01"
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.{1 if abs(value) >= 100 else 2}f}"


def bracket(bounds: Sequence[float] | None) -> str:
    """An interval: "[144.6, 145.2]"; nothing where there is none."""
    return f"[{', '.join(map(number, bounds))}]" if bounds else ""


def duration(microseconds: float, bounds: Sequence[float] | None = None) -> str:
    """A time with its interval in the unit that suits it: "144.9 us [144.6, 145.2]"."""
    factor, unit = (1e-3, "ms") if microseconds >= 10_000 else (1.0, "µs")
    interval = bracket([bound * factor for bound in bounds]) if bounds else ""
    return f"{number(microseconds * factor)} {unit} {interval}".strip()


def times(ratio: float, bounds: Sequence[float] | None = None) -> str:
    """A ratio with its interval: "6.80x [6.78, 6.82]"."""
    return f"{ratio:.2f}x {bracket(bounds)}".strip()


def percent(share: float) -> str:
    """A share: 0.0123 -> "1.2 %"."""
    return f"{100 * share:.{0 if share >= 0.1 else 1}f} %"


def count(amount: int, noun: str) -> str:
    """ "1 row", "2 rows"."""
    return f"{amount:,} {noun}{'' if amount == 1 else 's'}"


def listing(names: Sequence[str]) -> str:
    """ "a", "a and b", "a, b and c"."""
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} and {names[-1]}" if names else ""
