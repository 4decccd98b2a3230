"""Bytes that one decode step of one layer must move, by part, from the shape alone.  Runs without torch.

Every function counts what an ideal kernel reads or writes once.  Tokens are per sequence; results are for the whole batch.
"""

from __future__ import annotations

from locks_kernels.shapes import DecodeShape, SelectOptions
from locks_kernels.summary import RecordLayout

TABLE_ENTRY_BYTES = 4
SCORE_BYTES = 4


def dense_bytes(shape: DecodeShape, tokens: int, batch: int) -> dict[str, int]:
    """Full attention: all keys and values once, and the block table.  1024 tokens, H 8, D 128: kv is 4,194,304."""
    kv = 2 * tokens * shape.kv_heads * shape.head_dim * shape.element_bytes
    return {"kv": batch * kv, "page_table": batch * shape.pages(tokens) * TABLE_ENTRY_BYTES}


def locks_bytes(shape: DecodeShape, options: SelectOptions, tokens: int, batch: int) -> dict[str, int]:
    """One LOCKS step: summaries of the scored pages, selected keys and values, scores written and read, both tables.

    `summary` counts the bytes that carry information (818 a page and head at D 128, R 8); `summary_padding` the rest of
    each record, which the kernels read along.
    """
    layout = RecordLayout.of(shape)
    pages = shape.pages(tokens)
    kept = min(options.kept_pages(shape.page_size), pages)
    scored = max(pages - options.recent_pages, 0) if pages > kept else 0
    units = batch * shape.kv_heads
    attended = min(kept * shape.page_size, tokens)
    return {
        "summary": units * scored * layout.payload_bytes,
        "summary_padding": units * scored * (layout.record_bytes - layout.payload_bytes),
        "selected_kv": units * attended * 2 * shape.head_dim * shape.element_bytes,
        "scores": 2 * batch * shape.query_heads * scored * SCORE_BYTES,
        "page_table": (batch * scored + 2 * units * kept) * TABLE_ENTRY_BYTES,
    }


def kv_bytes(parts: dict[str, int]) -> int:
    """The KV traffic proper of a step: keys, values and what stands for them (no scores, no tables, no padding)."""
    return sum(parts.get(name, 0) for name in ("kv", "selected_kv", "summary"))
