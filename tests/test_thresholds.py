"""Which change of which cell counts."""

from __future__ import annotations

from pathlib import Path

import pytest
from comparison_fakes import one, record

from harness.compare import Rules, compare
from harness.errors import UserError
from harness.thresholds import Threshold, load_thresholds
from harness.verdict import Verdict


@pytest.mark.parametrize("change", [5.0, 0.51, 0.001, -0.1])
def test_thresholds_that_hide_everything_or_mean_nothing_are_refused(change: float) -> None:
    with pytest.raises(UserError, match="refused"):
        Threshold("*", change, "noise")


def test_noise_above_the_largest_threshold_is_no_floor() -> None:
    window = [record([[100.0 * (1 + 0.6 * when)]] * 10, when=when) for when in range(3)]
    cell = one(window, [record([[100.0]] * 10, when=4)])
    assert cell.verdict is Verdict.INVALID and "quiet machine" in (cell.reason or "")


def test_thresholds_by_cell(tmp_path: Path) -> None:
    file = tmp_path / "thresholds.toml"
    file.write_text('[[threshold]]\ncells = "* locks"\nchange = 0.05\nreason = "short kernels"\n')
    limits = load_thresholds(file)
    sides = [[record([[100.0 * (1 + 0.03 * when)]] * 10, name, when) for name in ("locks", "fa3")] for when in (0, 1)]
    found = {cell.backend: cell.verdict for cell in compare(*sides, Rules(thresholds=limits)).cells}
    assert found == {"locks": Verdict.UNCLEAR, "fa3": Verdict.SLOWER}
    good = "[[threshold]]\ncells='*'\nchange=0.05\n"
    wrong = ("reason=' '", "reason='x'\nname='y'", "reason='x'\n[[threshold]]\ncells=['*']")
    for text in ("", good, "x", *(good + line for line in wrong)):
        file.write_text(text)
        with pytest.raises(UserError, match="reason"):
            load_thresholds(file)
    with pytest.raises(UserError, match=r"none.toml cannot be read \(No such file"):
        load_thresholds(tmp_path / "none.toml")
