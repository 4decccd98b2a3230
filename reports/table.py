"""Rows -> rich tables for a terminal.  Returns what is to be shown; printing is the caller's business."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from rich import box
from rich.console import Group, RenderableType
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from reports.rows import WARM, Row
from reports.text import ABSENT, number, short_size

NO_CLAIM = "Measured on a CPU: these rows show that everything runs and is right. They are no performance claim."
ATTENTION_TOKENS = "tok/s of level attention: the ceiling that attention alone sets, all layers of the model."


def _interval(row: Row) -> str:
    interval = row["latency_ci95_us"]
    return f"{number(row['latency_us'])} [{', '.join(map(number, interval))}]" if interval else number(row["latency_us"])


def _bandwidth_share(row: Row) -> str:
    speed, roof = row["bandwidth_tbps"], row["read_roof_tbps"]
    return f"{100 * speed / roof:.0f}" if speed is not None and roof else "-"


def _backend(row: Row) -> str:
    kernels = row["resolved"].get("kernels")
    return f"{row['backend']} ({kernels})" if kernels and kernels != row["backend"] else row["backend"]


def _speedup(row: Row) -> str:
    speedup = row["speedup_vs_best_dense"]
    marks = (" !" if row["flags"] else "") + (f" {row['cache_state']}" if row["cache_state"] in WARM else "")
    return "-" if speedup is None else f"{speedup:.2f}x{marks}"


def _megabytes(bytes_: int | None) -> str:
    return "-" if bytes_ is None else number(bytes_ / 1e6)


MOST_BOUND = 6  # launch-bound rows named below a table
COLUMNS: tuple[tuple[str, Callable[[Row], str], bool], ...] = (  # heading, cell, right-aligned
    ("model", lambda row: row["model"], False),
    ("level", lambda row: row["level"], False),
    ("ctx", lambda row: short_size(row["ctx"]), True),
    ("batch", lambda row: str(row["batch"]), True),
    ("budget", lambda row: short_size(row["budget"]) if row["budget"] else ABSENT, True),
    ("backend", _backend, False),
    ("outcome", lambda row: row["outcome"], False),
    ("latency us [95 %]", _interval, True),
    ("vs dense", _speedup, True),
    ("KV MB", lambda row: _megabytes(row["kv_bytes_per_step"]), True),
    ("TB/s", lambda row: number(row["bandwidth_tbps"]), True),
    ("% roof", _bandwidth_share, True),
    ("tok/s", lambda row: number(row["tokens_per_s"]), True),
    ("kv plan", lambda row: (row["kv"] or {}).get("plan") or "-", False),
)


def latency_report(rows: Iterable[Row]) -> RenderableType:
    """The table of rows, the stages where they were measured, and the reason of every row that is not OK."""
    rows = list(rows)
    parts: list[RenderableType] = [_latency_table(rows)]
    if any(row["stages_us"] for row in rows):
        parts.append(_stage_table(rows))
    if engine := [row for row in rows if row["level"] == "engine" and row["kv_capacity_tokens"]]:
        parts.append(_engine_table(engine))
    parts += [Text(line) for line in _notes(rows)]
    return Group(*parts)


def _latency_table(rows: list[Row]) -> Table:
    table = Table(box=box.SIMPLE_HEAD, title=", ".join(sorted({row["machine"] or "unknown machine" for row in rows})))
    for heading, _, right in COLUMNS:
        table.add_column(heading, justify="right" if right else "left", no_wrap=True)
    for before, row in zip([None, *rows], rows, strict=False):
        if before and _cell(before) != _cell(row):
            table.add_section()
        table.add_row(*(escape(cell(row)) for _, cell, _ in COLUMNS), style=None if row["outcome"] == "OK" else "yellow")
    return table


def _engine_table(rows: list[Row]) -> Table:
    table = Table(box=box.SIMPLE_HEAD, title="Inside the engine (latency is the time per output token)")
    headings = "model", "ctx", "batch", "backend", "TPOT ms", "TTFT ms", "tok/s", "cache tokens", "KB a token", "vs stock cache"
    for heading in headings:
        table.add_column(heading, justify="left" if heading in ("model", "backend") else "right", no_wrap=True)
    for row in rows:
        kv = row["kv"] or {}
        capacity, size, stock = (kv.get(name) for name in ("capacity_tokens", "bytes_per_token", "stock_bytes_per_token"))
        milliseconds = [number(row[name] / 1e3) if row[name] else ABSENT for name in ("latency_us", "ttft_us")]
        memory = [f"{capacity:,}" if capacity else ABSENT, number(size / 1024) if size else ABSENT]
        more = f"{size / stock - 1:+.1%}" if size and stock else ABSENT
        cells = (
            row["model"],
            short_size(row["ctx"]),
            str(row["batch"]),
            _backend(row),
            *milliseconds,
            number(row["tokens_per_s"]),
            *memory,
            more,
        )
        table.add_row(*map(escape, cells))
    return table


def _stage_table(rows: list[Row]) -> Table:
    table = Table(box=box.SIMPLE_HEAD, title="What each stage adds to the step (floor: its bytes at the measured read roof)")
    for heading in ("model", "ctx", "batch", "backend", "stage", "us", "floor us", "x floor"):
        table.add_column(heading, justify="left" if heading in ("model", "backend", "stage") else "right", no_wrap=True)
    for row in rows:
        for stage, time in (row["stages_us"] or {}).items():
            floor = (row["stage_floors_us"] or {}).get(stage)
            ratio = number(time / floor) if floor else "-"
            cells = row["model"], short_size(row["ctx"]), str(row["batch"]), _backend(row), stage
            table.add_row(*map(escape, cells), number(time), number(floor), ratio)
    return table


def _notes(rows: list[Row]) -> list[str]:
    lines = [f"{_where(row)}: {row['outcome']}: {row['reason'] or 'no reason given'}" for row in rows if row["outcome"] != "OK"]
    lines += [f"! {_where(row)}: {flag}" for row in rows for flag in row["flags"]]
    lines += [f"fairness: {_where(row)}: {warning}" for row in rows for warning in row["warnings"]]
    bound = sorted((row for row in rows if row["launch_bound"]), key=lambda row: row["latency_us"] / row["eager_us"])
    if bound:
        told = ", ".join(f"{_where(row)} ({row['eager_us'] / row['latency_us']:.1f} x)" for row in bound[:MOST_BOUND])
        more = f" and {len(bound) - MOST_BOUND} more" if len(bound) > MOST_BOUND else ""
        lines.append(f"Launch-bound without a graph: {told}{more}")
    planned = [row for row in rows if row["cache_state"] in (*WARM, "pooled") and (row["kv"] or {}).get("note")]
    # The note says how much was free, which differs between the backends of a cell that were not measured together.
    lines += dict.fromkeys({(_cell(row), row["kv"]["plan"]): row["kv"]["note"] for row in planned}.values())
    if any(row["level"] == "attention" and row["tokens_per_s"] for row in rows):
        lines.append(ATTENTION_TOKENS)
    if any(row["device"] == "cpu" and row["latency_us"] for row in rows):
        lines.append(NO_CLAIM)
    return lines


def _cell(row: Row) -> tuple[object, ...]:
    return tuple(row[name] for name in ("model", "level", "ctx", "batch", "budget"))


def _where(row: Row) -> str:
    return f"{row['model']} {row['level']} {short_size(row['ctx'])} x {row['batch']} {row['backend']}"
