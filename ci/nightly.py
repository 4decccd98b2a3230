"""The nightly job of a machine with a GPU: doctor, sweep with its A/A comparison, profile, gate, report.

    python -m ci.nightly [--suite nightly] [--budget 15m]

Exit codes of `locks-bench gate`: 0 ok, 1 regression, 2 invalid or unclear, 3 nothing to compare with.  A good night joins the
baselines of its machine; --accept makes the first one, or starts anew after a change that is meant.
"""

from __future__ import annotations

import argparse
import shutil
import subprocess
import sys
import time
from pathlib import Path

from harness.compare import Rules, control
from harness.errors import UserError
from harness.machine import MachineKey
from harness.record import Record
from harness.store import FILE, load
from harness.thresholds import load_thresholds

HERE = Path(__file__).parent
THRESHOLDS = HERE / "thresholds.toml"
PROFILED = ("attention 128K x 16 flashinfer", "attention 128K x 16 locks")
WINDOW = 10  # good nights kept


def locks_bench(*arguments: str | Path) -> int:
    """Run one subcommand; its exit code."""
    print(f"== locks-bench {' '.join(map(str, arguments))}", flush=True)
    return subprocess.run([sys.executable, "-m", "bench.cli", *map(str, arguments)]).returncode


def nightly(options: argparse.Namespace) -> int:
    night = options.out or Path("nightly") / time.strftime("%Y-%m-%dT%H-%M-%SZ", time.gmtime())
    summary = ["--markdown", options.summary] if options.summary else []
    locks_bench("doctor")
    if code := locks_bench("sweep", options.suite, "--store", night, "--time-budget", options.budget):
        return code
    for case in options.profile:
        locks_bench("profile", case, "--store", night, "--timeout", "2m")  # a status at worst: the times stand
    records = load([night])
    baselines = options.baselines / MachineKey.of(records[0].environment).slug()
    good = sorted(baselines.glob("*.jsonl"))
    if options.accept:
        code = accepted(records)
    elif good:
        code = locks_bench("gate", baselines, night, "--thresholds", THRESHOLDS, *summary)
    else:
        print(f"no baseline in {baselines}; --accept makes this night the first one")
        code = 3
    if code == 0:
        keep(night, baselines, [] if options.accept else good)
    locks_bench("report", night, "-o", night / "report.html")
    return code


def accepted(records: list[Record]) -> int:
    """0 if the night may be a baseline: its A/A comparison is there and finds nothing."""
    found = control(records, Rules(thresholds=load_thresholds(THRESHOLDS)))
    said = "is missing" if found.noise is None else f"changes up to {found.noise:.2%} are noise"
    print(f"A/A comparison: {found.void or said}")
    return 2 if found.void or found.noise is None else 0


def keep(night: Path, baselines: Path, good: list[Path]) -> None:
    """Add the night to the window of its machine; the oldest falls out.  With no `good` one, all others do."""
    baselines.mkdir(parents=True, exist_ok=True)
    for old in set(baselines.glob("*.jsonl")) - set(good[1 - WINDOW :]):
        old.unlink()
    begun = min(record.time for record in load([night])).replace(":", "-")
    shutil.copy(night / FILE, baselines / f"{begun}.jsonl")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--suite", default="nightly")
    parser.add_argument("--budget", default="15m", help="of the sweep")
    parser.add_argument("--profile", nargs="*", default=PROFILED, metavar="CASE", help="cases for Nsight Compute")
    parser.add_argument("--baselines", type=Path, default=HERE / "baselines")
    parser.add_argument("--out", type=Path, help="folder of this night; one that was killed goes on")
    parser.add_argument("--summary", type=Path, help="file for a GitHub-flavoured summary")
    parser.add_argument("--accept", action="store_true", help="make this night the only baseline of its machine")
    try:
        sys.exit(nightly(parser.parse_args()))
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)


if __name__ == "__main__":
    main()
