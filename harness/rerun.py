"""From stored records back to measurements: the same cases once more, each time in a fresh process."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from harness.case import Case, Model
from harness.compare import cell_key
from harness.errors import UserError
from harness.record import Record
from harness.run import Event, RunOptions, run_sweep
from harness.store import Store
from harness.verdict import Cell
from harness.worker import Settings, Worker, serve
from locks_kernels.shapes import SelectOptions

Sweep = Callable[..., list[Record]]


def case_of(data: dict[str, Any]) -> Case:
    """The case that a record's `case` field describes.  UserError if this version knows no such case."""
    if data["level"] == "engine":
        raise UserError("rows of level engine are measured again by their own command only; it stands in each of them")
    known = {name: value for name, value in data.items() if name in Case.__dataclass_fields__}
    model = dict(data["model"])
    model["unsupported"] = tuple((level, reason) for level, reason in model.get("unsupported", ()))
    try:
        return Case(**(known | {"model": Model(**model), "select": SelectOptions(**data["select"])}))
    except TypeError as error:
        raise UserError(f"a record's case cannot be measured by this version: {error}") from error


def in_fresh_processes(
    new: Sequence[Record], store: Path, options: RunOptions, on_event: Callable[[Event], None], sweep: Sweep = run_sweep
) -> Callable[[Iterable[Cell], int], list[Record]]:
    """What gate.gate measures its suspects with: their cases with every backend that NEW measured beside them, so that the
    conditions are the same.  Records are kept in `store`/1, 2, ...; a re-run that was interrupted goes on.
    """
    beside: dict[str, list[str]] = {}
    for record in new:
        beside.setdefault(_case_text(record), []).append(record.backend)

    def rerun(suspects: Iterable[Cell], number: int) -> list[Record]:
        wanted = {suspect.key for suspect in suspects}
        first = {_case_text(record): record for record in new if cell_key(record) in wanted}
        kept = Store(store / str(number + 1))
        records: list[Record] = []
        for text, record in first.items():
            backends = list(dict.fromkeys(beside[text]))
            records += sweep([case_of(record.case)], backends, kept, options, on_event, _worker(options))
        return records

    return rerun


def _worker(options: RunOptions) -> Callable[[Settings], Worker]:
    return lambda settings: Worker(settings, options.case_timeout_s, serve)


def _case_text(record: Record) -> str:
    return cell_key(Record(**(vars(record) | {"backend": ""})))
