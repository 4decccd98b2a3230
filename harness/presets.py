"""Model geometries: presets of profiles/models.toml, or a shape given by hand.  Imports no torch."""

from __future__ import annotations

import difflib
import re
import tomllib
from collections.abc import Iterable
from functools import cache
from pathlib import Path

from harness.case import Model
from harness.errors import UserError

# profiles/ lies beside this package in a checkout and in an installed copy alike.
MODELS_FILE = Path(__file__).resolve().parents[1] / "profiles" / "models.toml"
SHAPE = re.compile(r"(\d+)x(\d+)x(\d+)(?:x(\d+))?")
SHAPE_LAYERS = 32


@cache
def models() -> dict[str, Model]:
    """All presets by name, in the order of the file."""
    presets = tomllib.loads(MODELS_FILE.read_text())
    return {
        name: Model(name=name, unsupported=tuple(data.pop("unsupported", {}).items()), **data) for name, data in presets.items()
    }


def find_model(text: str) -> Model:
    """A preset, or a shape `HQxHxD[xLAYERS]` (query heads, KV heads, head width; 32 layers unless given).

    A shape has no weights, so it can be measured at level attention only; its hidden width is that of its query heads.
    UserError names the nearest preset.
    """
    if match := SHAPE.fullmatch(text):
        query_heads, kv_heads, head_dim, layers = (int(number) if number else SHAPE_LAYERS for number in match.groups())
        if layers < 1:
            raise UserError(f"model {text} has no layers; use at least 1")
        no_weights = f"{text} is a shape without weights; use --level attention, or a preset of `locks-bench list`"
        hidden = query_heads * head_dim
        nothing = tuple((level, no_weights) for level in ("token", "engine"))
        return Model(text, layers, query_heads, kv_heads, head_dim, hidden, 0, 0, unsupported=nothing)
    if text in models():
        return models()[text]
    raise UserError(f"unknown model {text!r}; {nearest(text, models(), 'a shape such as 32x8x128')}")


def nearest(text: str, names: Iterable[str], otherwise: str = "") -> str:
    """The advice of an error about an unknown name: the nearest known one, or all of them; and what else there is."""
    known, last = list(names), f", or {otherwise}" if otherwise else ""
    close = difflib.get_close_matches(text.lower(), known, n=1, cutoff=0.5)
    return f"did you mean {close[0]!r}{last}?" if close else f"use one of {', '.join(known)}{last}"
