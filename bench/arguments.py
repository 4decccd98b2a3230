"""What a user types -> values.  Every error is a UserError that shows an input that works."""

from __future__ import annotations

import re

from harness.errors import UserError

_FACTORS = {"": 1, "K": 1024, "M": 1024 * 1024}
_SECONDS = {"": 1, "S": 1, "M": 60, "H": 3600}


def size(text: str, option: str) -> int:
    """A positive count of tokens or sequences; K and M are 1024-based: "8K" is 8192."""
    match = re.fullmatch(r"(\d+)([KM]?)", text.strip().upper())
    if not match or int(match[1]) < 1:
        raise UserError(f"{option} {text!r} is not a size; write for example 4096, 8K or 1M (K = 1024)")
    return int(match[1]) * _FACTORS[match[2]]


def sizes(text: str, option: str) -> list[int]:
    """A list of sizes, "8K,1M"; repeated ones count once."""
    return list(dict.fromkeys(size(part, option) for part in text.split(",")))


def names(text: str) -> list[str]:
    """A list of names, "fa3,locks"; repeated ones count once."""
    return list(dict.fromkeys(part.strip() for part in text.split(",") if part.strip()))


def seconds(text: str, option: str) -> float:
    """A duration: "90s", "10m", "2h", or seconds."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)([SMH]?)", text.strip().upper())
    if not match or float(match[1]) == 0:
        raise UserError(f"{option} {text!r} is not a duration; write for example 90s, 10m or 2h")
    return float(match[1]) * _SECONDS[match[2]]
