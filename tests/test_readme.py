"""What the README shows works as written."""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
README = (ROOT / "README.md").read_text()


def test_a_backend_in_ten_lines(tmp_path: Path) -> None:
    (module,) = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
    (entry_point,) = re.findall(r"```toml\n(.*?)```", README, re.DOTALL)
    (command,) = re.findall(r"^\./locks (latency .*--backends my-kernel.*)$", README, re.MULTILINE)
    (tmp_path / "my_kernel.py").write_text(module)
    installed = tmp_path / "my_kernel-1.dist-info"
    installed.mkdir()
    (installed / "METADATA").write_text("Metadata-Version: 2.1\nName: my-kernel\nVersion: 1\n")
    points = entry_point.replace('[project.entry-points."locks_bench.backends"]', "[locks_bench.backends]").replace('"', "")
    (installed / "entry_points.txt").write_text(points)

    small = "--device cpu --ctx 1K --budget 256 --model 8x2x64 --json -"
    paths = os.pathsep.join([str(tmp_path), str(ROOT), os.environ.get("PYTHONPATH", "")])
    result = subprocess.run(
        [sys.executable, "-m", "bench.cli", *shlex.split(command), *small.split()],
        capture_output=True,
        text=True,
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": paths},
    )
    assert result.returncode == 0, result.stderr
    outcomes = {row["backend"]: (row["outcome"], row["reason"]) for row in json.loads(result.stdout)}
    assert outcomes == {"my-kernel": ("OK", None), "sdpa": ("OK", None), "locks": ("OK", None)}


def test_commands_and_links_of_the_readme_exist() -> None:
    for command in re.findall(r"^\./locks (\S+)", README, re.MULTILINE):
        if command != "test":
            help_text = [sys.executable, "-m", "bench.cli", command, "--help"]
            assert subprocess.run(help_text, capture_output=True, cwd=ROOT).returncode == 0, command
    links = [link for link in re.findall(r"\]\(([^)]+)\)", README) if "://" not in link]
    assert links and all((ROOT / link).exists() for link in links)
