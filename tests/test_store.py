"""The store loses nothing: torn lines, damage, other schemas, other writers, folders that cannot be written."""

from __future__ import annotations

import json
import multiprocessing
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest

from harness.case import Case
from harness.errors import UserError
from harness.presets import find_model
from harness.record import Outcome, Record
from harness.store import FILE, Store, load, read, resume_key
from locks_kernels.shapes import SelectOptions

CASE = Case("attention", find_model("llama-3.1-8b"), 8192, 1, SelectOptions())
ENVIRONMENT: dict[str, Any] = {
    "gpu": {"name": "GPU", "sm_count": 132, "uuid": "1"},
    "driver": "580.1",
    "versions": {"torch": "2.11", "triton": "3.6"},
    "commit": "abc",
    "dirty": False,
    "kernel_sources": "def",
}


def record(key: str = "k", time: str = "2026-01-01T00:00:00Z", **changes: Any) -> Record:
    made = Record(key=key, time=time, command="locks-bench latency", case=asdict(CASE), backend="fa3", outcome=Outcome.OK)
    return replace(made, **changes)


def test_round_trip(tmp_path: Path) -> None:
    store = Store(tmp_path / "new" / "folder")
    made = record(rounds_ns=[[1.5, 2.0]], bytes={"kv": 4})
    store.append(made)
    assert store.find("k") == made
    found = Store(tmp_path / "new" / "folder").find("k")
    assert found is not None and found.to_json() == made.to_json()
    assert store.find("other") is None


def test_latest_of_a_key_wins_across_files(tmp_path: Path) -> None:
    Store(tmp_path / "b").append(record(time="2026-01-02T00:00:00Z", reason="newer"))
    Store(tmp_path / "c").append(record(time="2026-01-01T00:00:00Z", reason="older"))
    assert [found.reason for found in load([tmp_path])] == ["newer"]
    assert [found.reason for found in load([tmp_path / "c" / FILE])] == ["older"]


@pytest.mark.parametrize("keep", [1, 40, -2])
def test_torn_last_line_is_said_kept_and_repaired(tmp_path: Path, keep: int) -> None:
    store = Store(tmp_path)
    store.append(record("a"))
    file = tmp_path / FILE
    torn = (record("b").to_json().encode() + b"\n")[:keep]
    file.write_bytes(file.read_bytes() + torn)
    notes: list[str] = []
    assert [found.key for found in read(file, notes.append)] == ["a"]
    assert len(notes) == 1 and "line 2" in notes[0]

    Store(tmp_path).append(record("c"))
    Store(tmp_path).append(record("d"))
    assert torn in file.read_bytes(), "nothing is lost"
    assert [found.key for found in read(file)] == ["a", "c", "d"]


def test_last_line_that_only_lacks_its_end_counts(tmp_path: Path) -> None:
    (tmp_path / FILE).write_text(record("a").to_json())
    Store(tmp_path).append(record("b"))
    assert [found.key for found in read(tmp_path / FILE)] == ["a", "b"]


UNTIMED = json.dumps(asdict(record()) | {"time": "yesterday"})


@pytest.mark.parametrize("damage", ["{", "[1]", '{"key": "x"}', "", '{"key":"k","outcome":"GREAT"}', "\x00\x00", UNTIMED])
def test_damage_names_file_and_line_and_changes_nothing(tmp_path: Path, damage: str) -> None:
    file = tmp_path / FILE
    file.write_text("\n".join([record("a").to_json(), damage, record("b").to_json(), ""]))
    before = file.read_bytes()
    with pytest.raises(UserError, match=rf"{FILE}, line 2 "):
        Store(tmp_path)
    with pytest.raises(UserError, match="line 2"):
        load([tmp_path])
    assert file.read_bytes() == before


def test_other_schemas_stay_readable(tmp_path: Path) -> None:
    data = asdict(record())
    newer = data | {"schema": 99, "added_later": [1], "key": "newer"}
    older = {name: data[name] for name in ("time", "command", "case", "backend", "outcome")} | {"key": "older", "schema": 0}
    (tmp_path / FILE).write_text("".join(json.dumps(line) + "\n" for line in (newer, older)))
    assert [found.key for found in load([tmp_path])] == ["newer", "older"]


def test_not_writable(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_text("mine")
    for path in (file, file / "below", Path("/proc/store")):
        with pytest.raises(UserError, match=r"cannot be written.*--store"):
            Store(path)
    assert file.read_text() == "mine"


def test_nothing_to_read(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="no store at"):
        load([tmp_path / "absent"])
    with pytest.raises(UserError, match=r"no records under [^`]*; `locks-bench latency"):
        load([tmp_path])
    (tmp_path / "fidelity.ndjson").touch()
    with pytest.raises(UserError, match="but those of `locks-bench fidelity`"):
        load([tmp_path])


def _append_many(folder: Path, name: str) -> None:
    store = Store(folder)
    for number in range(25):
        store.append(record(f"{name}{number}", reason="x" * 9000))


def test_two_writers_do_not_mix_lines(tmp_path: Path) -> None:
    context = multiprocessing.get_context("spawn")
    writers = [context.Process(target=_append_many, args=(tmp_path, name)) for name in "ab"]
    for writer in writers:
        writer.start()
    for writer in writers:
        writer.join()
    assert len(read(tmp_path / FILE)) == 50


def _key(**changes: Any) -> str:
    values: dict[str, Any] = {
        "case": CASE,
        "backend": "fa3",
        "version": "0.0.3",
        "environment": ENVIRONMENT,
        "timer": "graph",
        "cache_state": "layers",
    }
    return resume_key(**(values | changes))


@pytest.mark.parametrize(
    "changes",
    [
        {"case": replace(CASE, seed=1)},
        {"case": replace(CASE, ctx=16384)},
        {"case": replace(CASE, select=SelectOptions(combine="peak"))},
        {"backend": "flashinfer"},
        {"version": "0.0.4"},
        {"timer": "eager"},
        {"cache_state": "hot"},
        *({"environment": ENVIRONMENT | {name: "other"}} for name in ("driver", "commit", "dirty", "kernel_sources")),
        {"environment": ENVIRONMENT | {"gpu": {"name": "GPU", "sm_count": 66}}},
        {"environment": ENVIRONMENT | {"versions": {"torch": "2.12", "triton": "3.6"}}},
    ],
)
def test_key_changes_with_all_that_matters(changes: dict[str, Any]) -> None:
    assert _key(**changes) != _key()


def test_key_stays_otherwise() -> None:
    other = ENVIRONMENT | {"argv": ["x"], "gpu": {"name": "GPU", "sm_count": 132, "uuid": "2"}}
    assert _key(environment=other) == _key()
