"""Text for prompts: real prose that this Python installation has, or the user's, and words made of it.  Imports no torch."""

from __future__ import annotations

import hashlib
import re
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from harness.errors import UserError

CALIBRATION_SHARE = 0.1  # the end of the text is kept from prompts, for bases that are learnt from other text
LEAST_CHARACTERS = 20_000
NOISE = (
    "The lift in the old tower was out of order again.",
    "Nobody had counted the lamps along the harbour road.",
    "A train went by, and then it was quiet for a while.",
    "The gardener watered the same three pots every morning.",
)
SENTENCE_END = re.compile(r"(?<=[.!?])\s+(?=[A-Z\"'(])")


@dataclass(frozen=True)
class Haystack:
    """name: what a record calls it."""

    name: str
    text: str

    @classmethod
    def builtin(cls) -> Haystack:
        """The reference topics that come with Python (pydoc_data.topics): about 600,000 characters of technical prose."""
        from pydoc_data.topics import topics

        return cls("python-topics", "\n".join(_plain(topics[key]) for key in sorted(topics)))

    @classmethod
    def file(cls, path: Path) -> Haystack:
        """UserError if the file cannot be read or is short."""
        try:
            text = path.read_text(errors="replace")
        except OSError as error:
            raise UserError(f"cannot read the haystack {path}: {error.strerror}") from error
        if len(text) < LEAST_CHARACTERS:
            raise UserError(f"the haystack {path} has {len(text)} characters; give at least {LEAST_CHARACTERS:,} of prose")
        return cls(path.name, _plain(text))

    @cached_property
    def sentences(self) -> list[str]:
        """All but the calibration part, in order."""
        found = [" ".join(part.split()) for part in SENTENCE_END.split(self.text[: self._cut])]
        return [sentence for sentence in found if 20 <= len(sentence) <= 400]

    @cached_property
    def words(self) -> list[str]:
        """Distinct lower-case words of four to ten letters, sorted."""
        return sorted(set(re.findall(r"\b[a-z]{4,10}\b", self.text)))

    @property
    def calibration(self) -> str:
        return self.text[self._cut :]

    @property
    def _cut(self) -> int:
        return int(len(self.text) * (1 - CALIBRATION_SHARE))

    def record(self) -> dict[str, Any]:
        return {"name": self.name, "sha256": hashlib.sha256(self.text.encode()).hexdigest()[:16]}


def _plain(text: str) -> str:
    """Without the rows of signs that underline headings and draw tables."""
    return re.sub(r"[*=\-~^+|]{3,}", " ", text)
