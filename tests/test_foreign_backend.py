"""Backends of other packages on a CPU: what kills or changes them must not pass for a result."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
from plug_in import ROOT, environment

SOURCE = """
import os

from harness.backends.sdpa import Sdpa

# {note}
class Mine(Sdpa):
    name = "mine"

    def prepare(self, workload, copy):
        if {dies}:
            os.abort()
        return super().prepare(workload, copy)
"""


@pytest.mark.timeout(280)
def test_one_that_aborts_costs_its_row_and_an_edited_one_is_measured_again(tmp_path: Path) -> None:
    variables = environment(tmp_path / "plug-in", "", {"mine": "plug_in_of_a_test:Mine", "sdpa": "harness.backends.sdpa:Sdpa"})

    def measure(note: str, dies: bool) -> dict[str, dict[str, object]]:
        (tmp_path / "plug-in" / "plug_in_of_a_test.py").write_text(SOURCE.format(note=note, dies=dies))
        command = [sys.executable, "-m", "bench.cli", "latency", "--device", "cpu", "--ctx", "1K", "--budget", "512"]
        command += ["--batch", "1", "--backends", "mine,sdpa", "--model", "smollm2-135m", "--store", str(tmp_path / "store")]
        done = subprocess.run([*command, "--json", "-"], cwd=ROOT, env=variables, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        told.append(done.stderr)
        return {row["backend"]: row for row in json.loads(done.stdout)}

    told: list[str] = []
    rows = measure("first", dies=True)
    assert {name: row["outcome"] for name, row in rows.items()} == {"mine": "CRASHED", "sdpa": "OK"}
    assert measure("second", dies=False)["mine"]["outcome"] == "OK"
    measure("second", dies=False)
    measure("third", dies=False)
    counts = [re.search(r"(\d+) rows? measured, (\d+) found", text) for text in told[2:]]
    assert [found and found.groups() for found in counts] == [("0", "2"), ("1", "1")]
