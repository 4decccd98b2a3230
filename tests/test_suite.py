"""Suites are data: what they ask for, what they leave out, and a sweep that is killed in the middle."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
import tomllib
from collections import Counter
from pathlib import Path

import pytest
from plug_in import environment

from bench import suite
from bench.suite import load_suite
from harness import backends
from harness.errors import UserError
from harness.store import FILE, load
from locks_kernels.shapes import ShapeError


@pytest.fixture(autouse=True)
def known(monkeypatch: pytest.MonkeyPatch) -> None:
    class Point:
        def __init__(self, name: str) -> None:
            self.name = name

    project = tomllib.loads((Path(__file__).parents[1] / "pyproject.toml").read_text())["project"]
    points = [Point(name) for name in project["entry-points"][backends.GROUP]]
    monkeypatch.setattr(backends, "entry_points", lambda group: points)


def write(tmp_path: Path, text: str) -> str:
    file = tmp_path / "mine.toml"
    file.write_text(text)
    return str(file)


def cells(tmp_path: Path, text: str) -> list[tuple[int, int, list[str]]]:
    found = load_suite(write(tmp_path, text)).cells("cuda")
    return [(case.ctx, case.batch, names) for case, names in found.items()]


def test_a_grid_of_level_engine_has_the_names_of_that_level(tmp_path: Path) -> None:
    text = """
        title = "t"
        backends = ["default"]
        [[grid]]
        ctx = "8K"
        [[grid]]
        level = "engine"
        ctx = "8K"
        batch = [2, "max"]
        backends = ["triton-attn", "locks"]
    """
    found = load_suite(write(tmp_path, text)).cells("cuda")
    assert [(case.level, case.batch, case.kv, names) for case, names in found.items()] == [
        ("attention", 1, "auto", ["fa3", "flashinfer", "locks"]),
        ("engine", 2, "auto", ["triton-attn", "locks"]),
        ("engine", 1, "max", ["triton-attn", "locks"]),
    ]
    with pytest.raises(UserError, match="level engine has no backend 'locks-cuda'"):
        load_suite(write(tmp_path, text.replace("triton-attn", "locks-cuda"))).cells("cuda")


def test_grids_are_products_and_share_their_cases(tmp_path: Path) -> None:
    text = """
        title = "t"
        backends = ["fa3", "locks"]
        [[grid]]
        ctx = ["8K", 16384]
        batch = [1, "2"]
        [[grid]]
        ctx = "8K"
        backends = ["locks", "flashinfer", "flashinfer#2"]
    """
    assert cells(tmp_path, text) == [
        (8192, 1, ["fa3", "locks", "flashinfer", "flashinfer#2"]),
        (8192, 2, ["fa3", "locks"]),
        (16384, 1, ["fa3", "locks"]),
        (16384, 2, ["fa3", "locks"]),
    ]


def test_every_axis_reaches_the_case(tmp_path: Path) -> None:
    axes = 'ctx="4K"\nbatch=3\nmodel="qwen3-8b"\nlevel="token"\nbudget="1K"\nkv="tp=2"\ncombine="peak"\nrank=4\nseed=7\n'
    text = f'title="t"\n[[grid]]\n{axes}page_size=32\ndtype="float16"\n'
    (case,) = load_suite(write(tmp_path, text)).cells("cuda")
    assert (case.ctx, case.batch, case.model.name, case.level, case.select.budget_tokens) == (
        4096,
        3,
        "qwen3-8b",
        "token",
        1024,
    )
    assert (case.kv, case.select.combine, case.rank, case.seed, case.page_size, case.dtype) == (
        *("tp=2", "peak", 4, 7, 32),
        "float16",
    )


def test_skip_rules_leave_out_cells_or_backends(tmp_path: Path) -> None:
    text = """
        title = "t"
        backends = ["fa3", "locks"]
        [[grid]]
        ctx = ["8K", "1M"]
        batch = [1, 16]
        [[skip]]
        where = { ctx = 1048576, batch = 16 }
        reason = "too long"
        [[skip]]
        where = { batch = [16, 32] }
        backends = ["fa3"]
        reason = "no"
    """
    assert cells(tmp_path, text) == [
        (8192, 1, ["fa3", "locks"]),
        (8192, 16, ["locks"]),
        (1 << 20, 1, ["fa3", "locks"]),
    ]


@pytest.mark.parametrize(
    ("text", "advice"),
    [
        ('title="t"\n[[grid]]\nctxs="8K"\n', "did you mean 'ctx'"),
        ('titel="t"\n[[grid]]\nctx="8K"\n', "did you mean 'title'"),
        ('title="t"\n', "'grid' is missing"),
        ('title="t"\n[[grid]]\nctx="8K"\n[[skip]]\nwhere={ctx="8K"}\n', "'reason' is missing"),
        ('title="t"\n[[grid]]\nctx="8K"\n[[skip]]\nwhere={context="8K"}\nreason="x"\n', "did you mean 'ctx'"),
        ('title="t"\n[[grid]]\nctx="8K"\n[[skip]]\nwhere={ctx="8K"}\nreason="x"\n', "leave no cell"),
        ('title="t"\n[[grid]]\nctx="8X"\n', "write for example"),
        ('title="t"\n[[grid]]\nctx="8K"\nbackends=["flashinfr"]\n', "did you mean 'flashinfer'"),
        ('title="t"\n[[grid]]\nctx="8K"\nrank=3\n', "use one of 2, 4, 8"),
        ("[[[", "mine.toml"),
        ('title="t"\n[grid]\nctx="8K"\n', r"write \[\[grid"),
        ('title="t"\ngrid=3\n', r"write \[\[grid"),
        ('title="t"\n[[grid]]\nctx="8K"\n[[skip]]\nwhere=3\nreason="x"\n', r"write \[\[skip"),
        ('title="t"\nbackends="sdpa"\n[[grid]]\nctx="8K"\n', "backends = 'sdpa' is not a list"),
        ('title="t"\n[[grid]]\nctx="8K"\nbackends="sdpa"\n', "backends = 'sdpa' is not a list"),
        ('title="t"\ndevice="tpu"\n[[grid]]\nctx="8K"\n', "use cuda or cpu"),
        ('title="t"\n[[grid]]\nctx="8K"\nseed="x"\n', "seed = 'x' is not a number"),
        ('title="t"\n[[grid]]\nctx="8K"\nmodel=[3]\n', "model = 3 is not text"),
        ('title="t"\n[[grid]]\nctx=8.5\n', "ctx = 8.5 is not a size"),
        ('title="t"\n[[grid]]\nctx=[]\n', "empty axes"),
    ],
)
def test_mistakes_are_named(tmp_path: Path, text: str, advice: str) -> None:
    with pytest.raises((UserError, ShapeError), match=advice):
        load_suite(write(tmp_path, text)).cells("cuda")


def test_unknown_suites_name_the_nearest() -> None:
    with pytest.raises(UserError, match="did you mean 'nightly'"):
        load_suite("nigtly")


@pytest.mark.parametrize("name", suite.names())
def test_suites_of_the_package_can_be(name: str) -> None:
    loaded = load_suite(name)
    for device in ("cuda", "cpu"):
        if loaded.device in (None, device):
            found = loaded.cells(device)  # type: ignore[arg-type]
            assert found and all(found.values())
            assert all(skip.reason for skip in loaded.skips)


def test_the_nightly_suite_compares_one_thing_with_itself() -> None:
    found = load_suite("nightly").cells("cuda")
    controls = [names for names in found.values() if any(name.endswith(backends.CONTROL) for name in names)]
    assert controls and all({"flashinfer", "flashinfer#2"} <= set(names) for names in controls)


SLOW = """
import os, time
from harness.backends.sdpa import Sdpa

class Slow(Sdpa):
    name = "slow"

    def prepare(self, workload, copy):
        with open(os.environ["MEASURED"], "a") as log:
            log.write(f"{workload.case.ctx}\\n")
        time.sleep(0.2)
        return super().prepare(workload, copy)
"""


def test_killed_in_the_middle_and_again(tmp_path: Path) -> None:
    """Nothing is lost, and nothing that was stored is measured twice."""
    contexts = [1024 + 64 * at for at in range(6)]
    file = write(
        tmp_path, f'title="t"\nbackends=["slow"]\n[[grid]]\nctx={contexts}\nmodel="4x2x64"\nbudget=64\nkv="layers=1"\n'
    )
    log, kept = tmp_path / "measured", tmp_path / "kept"
    settings = environment(tmp_path / "plug-in", SLOW, {"slow": "plug_in_of_a_test:Slow"}) | {"MEASURED": str(log)}
    command = [sys.executable, "-m", "bench.cli", "sweep", file, "--device", "cpu", "--store", str(kept)]

    first = subprocess.Popen(command, env=settings, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline and len((kept / FILE).read_text().splitlines() if (kept / FILE).exists() else ()) < 2:
        time.sleep(0.02)
    os.kill(first.pid, signal.SIGKILL)
    assert first.wait() == -signal.SIGKILL, "it was killed before it ended"
    before = (kept / FILE).read_bytes()
    stored = [record.case["ctx"] for record in load([kept])]
    assert 2 <= len(stored) < len(contexts)

    again = subprocess.run([*command, "--strict", "--json", "-"], env=settings, capture_output=True, text=True, timeout=200)
    assert again.returncode == 0, again.stderr
    assert [row["ctx"] for row in json.loads(again.stdout)] == contexts
    assert (kept / FILE).read_bytes().startswith(before)
    records = load([kept])
    assert sorted(record.case["ctx"] for record in records) == contexts
    assert len((kept / FILE).read_text().splitlines()) == len(contexts) + ("torn_line_above" in (kept / FILE).read_text()) * 2
    times = Counter(int(line) for line in log.read_text().split())
    assert all(times[ctx] == 1 for ctx in stored), "what was stored is not measured again"
    assert sum(times.values()) <= len(contexts) + 1, "only the case that was killed begins anew"
    assert f"{len(contexts) - len(stored)} rows measured, {len(stored)} found in the store" in again.stderr
