"""Bytes that each page selector reads in one decode step, from the shape alone.  Runs without torch.

A "unit" is one KV head of one layer.  Keys, values and float summaries have the element size of the cache.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeAlias

from locks_kernels.shapes import DecodeShape, SelectOptions
from locks_kernels.summary import RecordLayout

SCALE_BYTES = 2  # one bfloat16
SECOND_ORDER_RANK = 4
SHADOW_CHUNK, SHADOW_OUTLIERS, SHADOW_LOCAL, SHADOW_RANK = 8, 48, 4, 160

PageBytes: TypeAlias = Callable[[DecodeShape], int]


def _vectors(count: int) -> PageBytes:
    """`count` vectors of D channels per page."""
    return lambda shape: count * shape.head_dim * shape.element_bytes


def second_order_bytes(shape: DecodeShape) -> int:
    """int8 centroid and its scale, SECOND_ORDER_RANK int4 directions with a scale each (394 at D 128)."""
    return shape.head_dim + SCALE_BYTES + SECOND_ORDER_RANK * (shape.head_dim // 2 + SCALE_BYTES)


def locks_page_bytes(shape: DecodeShape, rank: int) -> int:
    """A record without its padding (818 at D 128, page 16, rank 8)."""
    return RecordLayout(shape.head_dim, shape.page_size, rank).payload_bytes


def locks_prefix_bytes(shape: DecodeShape, rank: int, first: int) -> int:
    """What scoring with the `first` leading basis vectors reads of a record of `rank`: all but the other vectors' rows.

    Coefficients lie token by token, so the ones of the other ranks come along in the same sectors.
    """
    return locks_page_bytes(shape, rank) - (rank - first) * shape.head_dim // 2


def shared_rank(shape: DecodeShape, page_bytes: int, bits: int) -> int:
    """Largest rank of a shared basis whose int4 or int8 coefficients, with one scale per token, fit in `page_bytes` a page."""
    return min(shape.head_dim, (page_bytes // shape.page_size - SCALE_BYTES) * 8 // bits)


def shared_page_bytes(shape: DecodeShape, rank: int, bits: int = 16) -> int:
    """Coefficients of a page in a shared basis; below 16 bits with one scale per token.  The basis itself is read once."""
    token = rank * bits // 8 + (SCALE_BYTES if bits < 16 else 0)
    return shape.page_size * token


PAGE_BYTES: dict[str, PageBytes] = {
    "oracle": lambda shape: shape.page_size * shape.head_dim * shape.element_bytes,
    "min-max": _vectors(2),
    "cuboid-mean": _vectors(2),
    "mean-std-vector": _vectors(2),
    "mean-std-scalar": lambda shape: (shape.head_dim + 1) * shape.element_bytes,
    "centroid": _vectors(1),
    "second-order": second_order_bytes,
}


def attend_bytes(shape: DecodeShape, tokens: float) -> float:
    """Keys and values of `tokens` distinct tokens of one unit."""
    return tokens * 2 * shape.head_dim * shape.element_bytes


def most_distinct_tokens(shape: DecodeShape, options: SelectOptions, tokens: int, per_query_head: bool = False) -> int:
    """Tokens a unit touches at most: with a table per query head the tables of a group may have nothing in common."""
    kept = options.kept_pages(shape.page_size) * shape.page_size
    return min(tokens, kept * (shape.group if per_query_head else 1))


def page_selector_bytes(
    shape: DecodeShape, options: SelectOptions, tokens: int, batch: int, page_bytes: int, per_query_head: bool = False
) -> dict[str, int]:
    """One step of one layer by part, for a method that reads `page_bytes` of each scored page and attends kept ones exactly.

    Nothing is scored where everything is kept anyway.
    """
    pages, kept = shape.pages(tokens), options.kept_pages(shape.page_size)
    scored = max(pages - options.recent_pages, 0) if pages > kept else 0
    attended = most_distinct_tokens(shape, options, tokens, per_query_head)
    units = batch * shape.kv_heads
    return {"summary": units * scored * page_bytes, "selected_kv": units * int(attend_bytes(shape, attended))}


@dataclass(frozen=True)
class ShadowKV:
    """ShadowKV: landmarks of chunks of 8 tokens; outliers and the local window come on top of the budget."""

    @staticmethod
    def score_bytes(shape: DecodeShape, tokens: int) -> int:
        return tokens // SHADOW_CHUNK * shape.head_dim * shape.element_bytes

    @staticmethod
    def attended(options: SelectOptions, generated: int = 0) -> int:
        extra = (SHADOW_OUTLIERS + SHADOW_LOCAL) * SHADOW_CHUNK
        return options.budget_tokens + extra + generated

    @staticmethod
    def attend_bytes(shape: DecodeShape, tokens: float) -> float:
        """Keys and values, and rows of the factor that keys are rebuilt from, which the KV heads of a layer share."""
        rank = min(SHADOW_RANK, shape.kv_heads * shape.head_dim)
        return attend_bytes(shape, tokens) + tokens * rank * shape.element_bytes / shape.kv_heads


@dataclass(frozen=True)
class RocketPlan:
    """How RocketKV splits a budget of `budget` tokens of traffic over `tokens` of context.

    capacity  tokens that survive the eviction after prefill     chunk     tokens that share a min/max
    channels  channels of a chunk that a step reads              attended  tokens that a step attends
    """

    capacity: int
    chunk: int
    channels: int
    attended: int

    @classmethod
    def of(cls, tokens: int, budget: int, head_dim: int, max_new: int = 0, evict: bool = True) -> RocketPlan:
        """`evict=False` is the second stage on the full cache.  Published constants; `max_new` is room for the answer."""
        ratio = max(1.0, tokens / budget)
        exponent = min(0.2 + 0.06 * math.log2(ratio), 0.8) if evict else 0.0
        capacity = max(int(tokens / ratio**exponent), min(2 * max_new, tokens))
        left = max(1.0, capacity / budget)
        root = math.ceil(math.sqrt(left))
        chunk = root if root <= left else 1
        return cls(capacity, chunk, min(head_dim, int(head_dim * chunk / left)), max(1, budget // 2))

    def score_bytes(self, shape: DecodeShape) -> int:
        return self.capacity // self.chunk * self.channels * shape.element_bytes


def locks_two_stage_bytes(shape: DecodeShape, options: SelectOptions, tokens: int, rank: int, first: int, times: int) -> int:
    """Summary bytes of one unit: a prefix of every record, then whole records of `times` the kept pages."""
    scored = max(shape.pages(tokens) - options.recent_pages, 0)
    again = min(scored, times * options.kept_pages(shape.page_size))
    return scored * locks_prefix_bytes(shape, rank, first) + again * locks_page_bytes(shape, rank)
