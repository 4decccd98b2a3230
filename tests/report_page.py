"""Reads a page of the report as a test needs it: ids, figures, addresses that a browser would fetch, and the embedded data."""

from __future__ import annotations

import base64
import gzip
import json
from html.parser import HTMLParser
from typing import Any

SECTIONS = (
    *("summary", "latency", "speedup", "throughput", "bytes", "stages", "energy", "fidelity", "stability", "history"),
    *("failures", "rows", "environment", "method"),
)
FIGURES = (
    "latency",
    "speedup",
    "throughput",
    "pareto",
    "bytes",
    "stages",
    "roof",
    "energy",
    "fidelity",
    "fidelity-time",
    "stability",
    "history",
)
MOST_BYTES = 8_000_000


class Page(HTMLParser):
    """Elements by id, the text of scripts, and all addresses that a browser would fetch."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.ids: list[str] = []
        self.figures: list[str] = []
        self.fetched: list[str] = []
        self.tags: list[str] = []
        self.scripts: dict[str | None, str] = {}
        self.words: list[str] = []
        self._script: tuple[str | None] | None = None
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = dict(attrs)
        self.tags.append(tag)
        self.ids += [given["id"]] if given.get("id") else []  # type: ignore[list-item]
        self.figures += [given["data-figure"]] if given.get("data-figure") else []  # type: ignore[list-item]
        if tag in ("script", "img", "iframe") and given.get("src"):
            self.fetched.append(str(given["src"]))
        if tag == "link" and not str(given.get("href")).startswith("data:"):
            self.fetched.append(str(given["href"]))
        self._script = (given.get("id"),) if tag == "script" else None

    def handle_endtag(self, tag: str) -> None:
        self._script = None

    def handle_data(self, data: str) -> None:
        if self._script is None:
            self.words.append(data)
        elif self._script[0]:
            self.scripts[self._script[0]] = data

    @property
    def text(self) -> str:
        return " ".join(" ".join(self.words).split())

    def data(self) -> dict[str, Any]:
        plain = self.scripts["data"]
        return json.loads(plain if plain.startswith("{") else gzip.decompress(base64.b64decode(plain)))

    def rows(self) -> list[dict[str, Any]]:
        data = self.data()
        columns = {
            name: column if isinstance(column, list) else [column["values"][code] for code in column["codes"]]
            for name, column in data["columns"].items()
        }
        return [{name: column[place] for name, column in columns.items()} for place in range(data["count"])]

    def raw(self) -> list[dict[str, Any]]:
        return json.loads(gzip.decompress(base64.b64decode(self.scripts["raw"])))


def drawn(data: Any) -> set[int]:
    """Every row that a figure names."""
    if isinstance(data, dict):
        own = set(flat(data["rows"])) if "rows" in data else set()
        return own.union(*(drawn(value) for name, value in data.items() if name != "rows"))
    return set().union(*map(drawn, data)) if isinstance(data, list) else set()


def flat(rows: Any) -> list[int]:
    return [rows] if isinstance(rows, int) else [index for part in rows for index in flat(part)]
