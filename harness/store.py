"""Records on disk: a directory with `records.jsonl`, one line per record, appended and fsynced as soon as a case ends.

The file is only ever appended to.  A line torn by a crash stays where it is; the next append starts a new line and marks
the torn one, so that readers can tell it from damage, which is an error with file and line number.  Imports no torch.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
from collections.abc import Callable, Iterable
from dataclasses import asdict
from pathlib import Path
from typing import Any, ClassVar

from harness.case import Case
from harness.environment import identity
from harness.errors import UserError
from harness.record import Record

FILE = "records.jsonl"
TORN_MARK = {"torn_line_above": True}

Note = Callable[[str], None]


def _silent(note: str) -> None:
    pass


def resume_key(
    case: Case, backend: str, version: str | None, environment: dict[str, Any], timer: str | None, cache_state: str | None
) -> str:
    """Hash of everything that makes a measurement the same one again: the case with its seed, the backend and its version,
    how it is timed, and the machine, driver and source of `environment` (environment.capture()).
    """
    parts = [asdict(case), backend, version, identity(environment), timer, cache_state]
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()[:24]


class Store:
    """One store opened for appending.  UserError if it cannot be written or holds damaged lines, before anything runs.

    A subclass with another `kind` of record keeps it in a `file` of its own beside the measurements.
    """

    file: ClassVar[str] = FILE
    kind: ClassVar[Any] = Record

    def __init__(self, directory: Path | str, on_note: Note = _silent) -> None:
        self.path = Path(directory) / self.file
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            os.close(self._open())
        except OSError as error:
            raise _unwritable(self.path, error) from error
        self._latest = {record.key: record for record in read(self.path, on_note, self.kind)}

    def find(self, key: str) -> Any:
        """The latest record of a key."""
        return self._latest.get(key)

    def append(self, record: Any) -> None:
        """Write one line and wait until it is on disk; safe with other writers of the same store."""
        line = record.to_json().encode() + b"\n"
        try:
            descriptor = self._open()
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX)
                _write(descriptor, _repair(descriptor) + line)
                os.fsync(descriptor)
            finally:
                os.close(descriptor)
        except OSError as error:
            raise _unwritable(self.path, error) from error
        self._latest[record.key] = record

    def _open(self) -> int:
        return os.open(self.path, os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o644)


def load(paths: Iterable[Path | str], on_note: Note = _silent) -> list[Record]:
    """Latest record of each key in stores, folders of stores (searched to any depth) and `.jsonl` files, oldest first."""
    latest: dict[str, Record] = {}
    for file in files_of(paths):
        for record in read(file, on_note):
            known = latest.get(record.key)
            if known is None or record.time >= known.time:
                latest[record.key] = record
    return sorted(latest.values(), key=lambda record: record.time)


def read(file: Path, on_note: Note = _silent, kind: Any = Record) -> list[Any]:
    """All records of one file in order.  UserError names the line that is damaged; a torn one is only noted."""
    try:
        lines = file.read_bytes().split(b"\n")
    except OSError as error:
        raise UserError(f"cannot read {file}: {error.strerror}") from error
    if not lines[-1]:
        lines.pop()
        torn_end = None
    else:
        torn_end = len(lines)
    records = []
    for number, line in enumerate(lines, start=1):
        try:
            data = json.loads(line)
            if data != TORN_MARK:
                records.append(kind.from_dict(data))
        except (ValueError, TypeError, AttributeError) as error:
            marked = number < len(lines) and lines[number] == json.dumps(TORN_MARK).encode()
            if number != torn_end and not marked:
                raise UserError(
                    f"{file}, line {number} is not a record ({_first_line(error)}); "
                    "move that line to another file or use another --store"
                ) from error
            on_note(f"{file}, line {number} was cut off while it was written; it is left out")
    return records


def files_of(paths: Iterable[Path | str]) -> list[Path]:
    """Every `.jsonl` file of stores and folders of stores, in order.  UserError if there is none."""
    files: list[Path] = []
    for path in map(Path, paths):
        if not path.exists():
            raise UserError(f"no store at {path}; give a folder of `locks-bench latency --store`, or a .jsonl file")
        found = sorted(path.rglob("*.jsonl")) if path.is_dir() else [path]
        if not found:
            kept = " but those of `locks-bench fidelity`, which shows them itself" if any(path.rglob("*.ndjson")) else ""
            raise UserError(f"no records under {path}{kept}; `locks-bench latency --store {path}` makes some")
        files += [file for file in found if file not in files]
    return files


def _repair(descriptor: int) -> bytes:
    """What must come before the next line: nothing, or the end of a torn one and its mark."""
    size = os.fstat(descriptor).st_size
    if size == 0 or os.pread(descriptor, 1, size - 1) == b"\n":
        return b""
    return b"\n" + json.dumps(TORN_MARK).encode() + b"\n"


def _write(descriptor: int, data: bytes) -> None:
    while data:
        data = data[os.write(descriptor, data) :]


def _unwritable(path: Path, error: OSError) -> UserError:
    return UserError(f"store {path.parent} cannot be written ({error.strerror}); choose another with --store DIR")


def _first_line(error: Exception) -> str:
    return str(error).splitlines()[0]
