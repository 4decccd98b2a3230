"""The one configuration object of the plugin: JSON in the environment variable LOCKS_VLLM."""

from __future__ import annotations

import functools
import json
import os
from dataclasses import dataclass, fields
from typing import Any

from locks_kernels.shapes import RANKS, SelectOptions, ShapeError

VARIABLE = "LOCKS_VLLM"
CHOICES: dict[str, tuple[object, ...]] = {
    "rank": RANKS,
    "combine": ("share", "peak"),
    "unsupported": ("error", "dense"),
    "kernels": ("auto", "cuda", "triton"),
    "selector": ("locks", "oracle"),
}
LEAST = {"budget": 1, "sink_pages": 0, "recent_pages": 1, "min_context": 0}


class SettingsError(ValueError):
    """LOCKS_VLLM says something that has no meaning; the message is one line and says what to write."""


@dataclass(frozen=True)
class Settings:
    """What a user may say.

    budget        tokens attended per KV head and step, those of sink and recent pages included
    rank          of a page's summary
    sink_pages    always attended at the beginning
    recent_pages  always attended at the end, the open one included
    combine       of the query heads of a group, see SelectOptions
    dense_layers  indices of layers that stay on the engine's own attention
    min_context   tokens; sequences of at most that many attend everything
    unsupported   what the plugin cannot serve: "error" refuses at start, "dense" stays on the engine's own attention
    kernels       on a GPU: "auto" is "cuda", or "triton" where that cannot run
    selector      "oracle" ranks pages by their exact attention mass, to compare with; on the CPU only
    """

    budget: int = 2048
    rank: int = 8
    sink_pages: int = 1
    recent_pages: int = 1
    combine: str = "share"
    dense_layers: tuple[int, ...] = ()
    min_context: int = 0
    unsupported: str = "error"
    kernels: str = "auto"
    selector: str = "locks"

    @classmethod
    def parse(cls, text: str) -> Settings:
        try:
            given = json.loads(text)
        except ValueError as error:
            raise SettingsError(f"{VARIABLE} is not JSON ({error}); write for example {_EXAMPLE}") from None
        if not isinstance(given, dict):
            raise SettingsError(f"{VARIABLE} must be a JSON object; write for example {_EXAMPLE}")
        known = [field.name for field in fields(cls)]
        for name, value in given.items():
            if name not in known:
                raise SettingsError(f"{VARIABLE} has no {name!r}; it knows {', '.join(known)}")
            if (wrong := _wrong(name, value)) is not None:
                raise SettingsError(f"{VARIABLE}: {name} is {json.dumps(value)}; {wrong}")
        return cls(**{**given, "dense_layers": tuple(given.get("dense_layers", ()))})

    def options(self, page_size: int, max_tokens: int) -> SelectOptions:
        """For pages of `page_size` and sequences of at most `max_tokens`; tables no wider than such a sequence needs.

        SettingsError where the budget has no room for sink, recent and one more page.
        """
        whole = max(-(-max_tokens // page_size), self.sink_pages + self.recent_pages + 1) * page_size
        options = SelectOptions(
            budget_tokens=min(self.budget, whole),
            sink_pages=self.sink_pages,
            recent_pages=self.recent_pages,
            combine=self.combine,  # type: ignore[arg-type]
            dense_tokens=min(self.min_context, whole),
        )
        try:
            options.kept_pages(page_size)
        except ShapeError as error:
            raise SettingsError(f"{VARIABLE}: {error}") from None
        return options


_EXAMPLE = '{"budget": 2048, "dense_layers": [0, 1]}'


def _wrong(name: str, value: Any) -> str | None:
    if name in CHOICES:
        return None if value in CHOICES[name] else f"use one of {', '.join(map(str, CHOICES[name]))}"
    if name in LEAST:
        return None if _whole(value) and value >= LEAST[name] else f"use a whole number, at least {LEAST[name]}"
    listed = isinstance(value, list) and all(_whole(index) and index >= 0 for index in value)
    return None if listed else "use a list of layer indices, counted from 0"


def _whole(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def asked() -> bool:
    """Whether the variable is set.  Parses it, so that a mistake stops every process at its start."""
    if os.environ.get(VARIABLE, "").strip() == "":
        return False
    current()
    return True


@functools.cache
def current() -> Settings:
    """Of this process; the defaults where the variable is not set."""
    return Settings.parse(os.environ.get(VARIABLE, "").strip() or "{}")
