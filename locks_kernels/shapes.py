"""The axes of one decode step, and the checks on them.  Imports nothing heavy.

Glossary (used in every file and docstring of this package)

    B     sequences                 HQ  query heads           H   KV heads
    G     HQ / H, the group         D   head width            N   context tokens
    PAGE  tokens per page (16)      P   pages of a sequence   K   pages kept
    R     rank of a page's summary
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

Combine = Literal["share", "peak"]

HEAD_DIMS = (64, 128, 256)
PAGE_SIZES = (16, 32, 64)
RANKS = (2, 4, 8)
MAX_GROUP = 16
MAX_SEQUENCES = 65535  # in a batch; a CUDA grid's second and third axis are no longer
DTYPE_BYTES = {"bfloat16": 2, "float16": 2}


class ShapeError(ValueError):
    """A shape or option that no kernel here accepts; the message says what to change."""


@dataclass(frozen=True)
class DecodeShape:
    """Geometry of one attention layer at decode time (one new token per sequence)."""

    query_heads: int
    kv_heads: int
    head_dim: int = 128
    page_size: int = 16
    rank: int = 8
    dtype: str = "bfloat16"

    def __post_init__(self) -> None:
        if self.query_heads < 1 or self.kv_heads < 1:
            raise ShapeError(f"heads must be positive, got {self.query_heads} query and {self.kv_heads} KV heads")
        if self.query_heads % self.kv_heads:
            raise ShapeError(
                f"{self.query_heads} query heads do not divide into {self.kv_heads} KV heads; use a multiple of the KV heads"
            )
        if self.group > MAX_GROUP:
            raise ShapeError(f"group of {self.group} query heads per KV head; at most {MAX_GROUP} are supported")
        _one_of("head_dim", self.head_dim, HEAD_DIMS)
        _one_of("page_size", self.page_size, PAGE_SIZES)
        _one_of("rank", self.rank, RANKS)
        _one_of("dtype", self.dtype, tuple(DTYPE_BYTES))

    @property
    def group(self) -> int:
        return self.query_heads // self.kv_heads

    @property
    def softmax_scale(self) -> float:
        return 1.0 / math.sqrt(self.head_dim)

    @property
    def element_bytes(self) -> int:
        return DTYPE_BYTES[self.dtype]

    @property
    def page_kv_bytes(self) -> int:
        """Keys and values of one page of one KV head."""
        return 2 * self.page_size * self.head_dim * self.element_bytes

    def pages(self, tokens: int) -> int:
        """Pages that hold `tokens` tokens, the open one included."""
        return -(-tokens // self.page_size)


@dataclass(frozen=True)
class SelectOptions:
    """Which pages a step keeps.  Sink and recent pages count inside the budget (as in the paper).

    `combine`: "share" averages each query head's share of the attention mass over the group (paper, the default);
    "peak" sums the masses after dividing by each head's largest page (the author's code).
    `dense_tokens`: a sequence of at most that many tokens keeps all of its pages, as one within the budget does.
    """

    budget_tokens: int = 2048
    sink_pages: int = 1
    recent_pages: int = 1
    combine: Combine = "share"
    dense_tokens: int = 0

    def __post_init__(self) -> None:
        if self.recent_pages < 1:
            raise ShapeError("recent_pages must be at least 1: the open page has no summary and is always attended")
        if self.sink_pages < 0:
            raise ShapeError(f"sink_pages must not be negative, got {self.sink_pages}")
        _one_of("combine", self.combine, ("share", "peak"))

    def kept_pages(self, page_size: int) -> int:
        """Pages attended per KV head of a sequence that is longer, forced ones included."""
        kept = self.budget_tokens // page_size
        least = self.sink_pages + self.recent_pages + 1
        if kept < least:
            raise ShapeError(
                f"budget of {self.budget_tokens} tokens is {kept} pages of {page_size}; at least {least} pages "
                f"({least * page_size} tokens) are needed for sink, recent and one ranked page"
            )
        return kept

    def table_pages(self, page_size: int) -> int:
        """K: entries of a table row, enough for `kept_pages` and for every page of a sequence that stays dense."""
        return max(self.kept_pages(page_size), self.dense_tokens // page_size)


def _one_of(name: str, value: object, allowed: tuple[object, ...]) -> None:
    if value not in allowed:
        raise ShapeError(f"{name} {value!r} is not supported; use one of {', '.join(map(str, allowed))}")
