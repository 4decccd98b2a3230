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
    scored, kept = _scored_and_kept(shape, options, tokens)
    units = batch * shape.kv_heads
    attended = min(kept * shape.page_size, tokens)
    return {
        "summary": units * scored * layout.payload_bytes,
        "summary_padding": units * scored * (layout.record_bytes - layout.payload_bytes),
        "selected_kv": units * attended * 2 * shape.head_dim * shape.element_bytes,
        "scores": 2 * batch * shape.query_heads * scored * SCORE_BYTES,
        "page_table": (batch * scored + 2 * units * kept) * TABLE_ENTRY_BYTES,
    }


def locks_stage_bytes(shape: DecodeShape, options: SelectOptions, tokens: int, batch: int) -> dict[str, int]:
    """The same bytes by the stage that moves them.  `append_finalise` is left out: what it moves depends on the token."""
    parts = locks_bytes(shape, options, tokens, batch)
    scored, kept = _scored_and_kept(shape, options, tokens)
    kept_table = batch * shape.kv_heads * kept * TABLE_ENTRY_BYTES
    return {
        "score": parts["summary"] + parts["summary_padding"] + parts["scores"] // 2 + batch * scored * TABLE_ENTRY_BYTES,
        "select": parts["scores"] // 2 + kept_table,
        "attend": parts["selected_kv"] + kept_table,
    }


def _scored_and_kept(shape: DecodeShape, options: SelectOptions, tokens: int) -> tuple[int, int]:
    """Pages of one sequence that are scored (none if all are kept anyway), and pages that are attended."""
    pages = shape.pages(tokens)
    kept = pages if pages <= options.table_pages(shape.page_size) else options.kept_pages(shape.page_size)
    return (max(pages - options.recent_pages, 0) if pages > kept else 0), kept


def kv_bytes(parts: dict[str, int]) -> int:
    """The KV traffic proper of a step: keys, values and what stands for them (no scores, no tables, no padding)."""
    return sum(parts.get(name, 0) for name in ("kv", "selected_kv", "summary"))
