"""Verdicts: few false alarms however the noise is, real changes found, and nothing compared that is not comparable."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from comparison_fakes import MACHINE, one, record, rounds
from fake_records import case, failed

from harness.compare import Rules, compare
from harness.effect import paired_effect
from harness.machine import MachineKey
from harness.record import Outcome, Record
from harness.stats import outlier_labels
from harness.thresholds import Threshold
from harness.verdict import Cell, Comparison, Coverage, ExitCode, Verdict

QUIET = 0.001


def verdict(base: Any, new: Any) -> Verdict:
    (cell,) = compare([record(base)], [record(new, when=1)]).cells
    return cell.verdict


def generator(seed: int = 0) -> np.random.Generator:
    return np.random.default_rng(seed)


@pytest.mark.parametrize(("share", "count"), [(0.005, 30), (0.01, 10), (0.03, 10), (0.03, 30)])
def test_five_hundred_equal_things_give_few_false_alarms(share: float, count: int) -> None:
    random = generator(1)
    verdicts = Counter(verdict(*(rounds(random, share, 0.8, rounds=count) for _ in "ab")) for _ in range(500))
    assert verdicts[Verdict.SLOWER] + verdicts[Verdict.FASTER] <= 10


@pytest.mark.parametrize("seed", range(3))
def test_a_grid_of_equal_things_has_no_false_alarm(seed: int) -> None:
    """200 cells with correlated noise: 2 alpha of them is less than one."""
    random = generator(seed)
    sides: list[list[Record]] = [[], []]
    for cell in range(200):
        for when, side in enumerate(sides):
            side.append(record(rounds(random, 0.005, 0.8), ctx=1024 * (cell + 1), when=when))
    result = compare(*sides)
    assert len(result.cells) == 200 and not result.having(Verdict.SLOWER, Verdict.FASTER)


def test_the_naive_test_would_have_cried_wolf() -> None:
    """What the correction is for: without it, the same data give false alarms by the dozen."""
    from scipy.stats import ttest_rel

    random, alarms = generator(1), 0
    for _ in range(500):
        base, new = (np.log([sample for (sample,) in rounds(random, 0.01, 0.8)]) for _ in "ab")
        alarms += ttest_rel(base, new).pvalue < 0.001 and abs(np.mean(new - base)) > 0.01
    assert alarms > 10


@pytest.mark.parametrize(("slower", "expected"), [(0.03, Verdict.SLOWER), (-0.03, Verdict.FASTER)])
@pytest.mark.parametrize("correlation", [0.0, 0.5])
def test_three_percent_at_half_a_percent_of_noise_is_found(slower: float, expected: Verdict, correlation: float) -> None:
    random, found = generator(2), 0
    for _ in range(200):
        found += verdict(rounds(random, 0.005, correlation), rounds(random, 0.005, correlation, slower)) is expected
    assert found >= 190


def test_a_third_of_a_percent_is_the_same() -> None:
    random = generator(3)
    verdicts = Counter(verdict(rounds(random, 0.005), rounds(random, 0.005, slower=0.003)) for _ in range(200))
    assert verdicts[Verdict.SAME] >= 190 and set(verdicts) <= {Verdict.SAME, Verdict.UNCLEAR}
    assert verdict(rounds(random, QUIET), rounds(random, QUIET, slower=0.003)) is Verdict.SAME


def test_noise_is_unclear_and_says_what_is_possible() -> None:
    cell = one([record(rounds(generator(), 0.05))], [record(rounds(generator(1), 0.05), when=1)])
    assert cell.verdict is Verdict.UNCLEAR and "is possible" in (cell.reason or "")
    assert cell.effect and cell.effect.low < 0 < cell.effect.high


def test_a_grid_needs_more_than_each_of_its_cells() -> None:
    """p = 0.0005 is significant alone and not as one of 200 [Benjamini and Hochberg]."""
    random = generator(5)
    noisy = next(
        (base, new)
        for base, new in ((rounds(random, 0.02), rounds(random, 0.02, slower=0.02)) for _ in range(500))
        if (effect := paired_effect(base, new)) and 2e-4 < effect.p < 9e-4
    )
    base, new = record(noisy[0]), record(noisy[1], when=1)
    assert one([base], [new]).verdict is Verdict.SLOWER
    others = [[record(rounds(random, QUIET), ctx=1024 * cell, when=when) for cell in range(1, 200)] for when in (0, 1)]
    cells = {cell.key: cell for cell in compare([base, *others[0]], [new, *others[1]]).cells}
    assert cells[one([base], [new]).key].verdict is Verdict.UNCLEAR


def test_equal_samples_are_the_same_and_few_are_refused() -> None:
    constant = [[100.0]] * 10
    assert verdict(constant, constant) is Verdict.SAME
    assert verdict(constant, [[103.0]] * 10) is Verdict.SLOWER
    cell = one([record(constant)], [record(constant[:4], when=1)])
    assert cell.verdict is Verdict.INVALID and "too few rounds" in (cell.reason or "")
    assert one([record(constant)], [record([[0.0]] * 10, when=1)]).verdict is Verdict.INVALID


def test_outliers_are_labelled_and_counted_and_stay() -> None:
    values = [100.0, 101, 99, 100, 102, 98, 100, 101, 99, 105, 150]
    assert outlier_labels(values) == [None] * 9 + ["mild", "severe"]
    assert outlier_labels([1.0, 100.0]) == [None, None]
    plain = rounds(generator(), QUIET)
    cell = one([record(plain)], [record([*plain[:-1], [200e3]], when=1)])
    assert cell.outliers and cell.outliers[1] > cell.outliers[0]


def test_rounds_in_which_something_else_ran_hide_nothing() -> None:
    """Two rounds of thirty take 30 % longer: the same is still the same, and 3 % are still found."""
    random, found = generator(8), Counter[Verdict]()
    for _ in range(100):
        base, same, slow = (rounds(random, 0.002, slower=slower) for slower in (0.0, 0.0, 0.03))
        for series in (base, same, slow):
            for at in random.choice(len(series), 2, replace=False):
                series[at] = [series[at][0] * 1.3]
        found[verdict(base, same)] += 1
        found[verdict(base, slow)] += 1
    assert found[Verdict.SLOWER] >= 95 and found[Verdict.FASTER] == 0
    assert found[Verdict.SAME] >= 80


# --- noise floors and the A/A comparison


def test_the_noise_of_the_run_raises_the_floor() -> None:
    random = generator(4)
    new = [record(rounds(random, QUIET, slower=0.02), when=1)]
    assert one([record(rounds(random, QUIET))], new).verdict is Verdict.SLOWER
    control = [record(rounds(random, 0.05, rounds=20), "sdpa", 1), record(rounds(random, 0.05, rounds=20), "sdpa#2", 1)]
    result = compare([record(rounds(random, QUIET))], [*new, *control])
    assert result.noise_floor is not None and result.noise_floor > 0.02 and result.void is None
    (cell,) = (cell for cell in result.cells if cell.backend == "locks")
    assert cell.verdict is Verdict.UNCLEAR and "effect floor" in (cell.reason or "")
    assert not [cell for cell in result.cells if cell.backend == "sdpa#2"], "the control is no cell"


@pytest.mark.parametrize("side", [0, 1])
def test_a_significant_control_voids_the_run(side: int) -> None:
    random = generator(6)
    sides = [[record(rounds(random, QUIET), when=when)] for when in (0, 1)]
    sides[1] = [record(rounds(random, QUIET, slower=0.1), when=1)]
    sides[side] += [record(rounds(random, QUIET), "sdpa", side), record(rounds(random, QUIET, slower=0.02), "sdpa#2", side)]
    result = compare(*sides)
    assert result.void and "A/A" in result.void and "sdpa found" in result.void
    assert result.exit_code is ExitCode.UNCLEAR, "not a regression, though a cell looks like one"


@pytest.mark.parametrize(("limits", "void"), [((), True), ((Threshold("*", 0.02, "cards differ"),), False)])
def test_a_control_under_the_threshold_is_noise(limits: tuple[Threshold, ...], void: bool) -> None:
    """Two copies of one buffer can differ by a percent: significant, and under what anybody calls a change."""
    random = generator(6)
    control = [record(rounds(random, QUIET, slower=shift), f"sdpa{name}", 1) for name, shift in (("", 0.0), ("#2", 0.012))]
    new = [record(rounds(random, QUIET, slower=0.03), when=1), *control]
    result = compare([record(rounds(random, QUIET))], new, Rules(thresholds=limits))
    assert bool(result.void) is void and (result.noise_floor or 0) > 0.011
    assert result.exit_code is (ExitCode.UNCLEAR if void else ExitCode.REGRESSION)


def test_the_noise_of_a_short_step_is_not_that_of_a_long_one() -> None:
    random = generator(6)
    new = [record(rounds(random, QUIET, slower=0.033), when=1)]
    for scale, shift in ((0.1, 0.035), (1.0, 0.001)):
        ctx = int(131072 * scale)
        for name, slower in (("", 0.0), ("#2", shift)):
            samples = [[sample * scale for sample in one] for one in rounds(random, QUIET, slower=slower)]
            new.append(record(samples, f"sdpa{name}", 1, ctx))
    limits = [Threshold("*", 0.02, "cards differ"), Threshold("* 13107 x 1 * sdpa", 0.04, "short")]
    result = compare([record(rounds(random, QUIET))], new, Rules(thresholds=limits))
    (cell,) = (cell for cell in result.cells if cell.backend == "locks")
    assert result.void is None and (result.noise_floor or 0) > 0.03
    assert cell.floor == 0.02 and cell.verdict is Verdict.SLOWER


def test_the_spread_of_good_runs_raises_the_floor_and_the_middle_one_is_compared() -> None:
    random = generator(7)
    window = [record(rounds(random, QUIET, slower=shift), when=when) for when, shift in enumerate((0.0, 0.04, 0.02))]
    cell = one(window, [record(rounds(random, QUIET, slower=0.035), when=4)])
    assert cell.window == 3 and cell.base_ns == pytest.approx(102e3, rel=0.002)
    assert cell.floor == pytest.approx(0.02, abs=0.002) and cell.verdict is Verdict.UNCLEAR
    assert one(window, [record(rounds(random, QUIET, slower=0.06), when=4)]).verdict is Verdict.SLOWER
    assert one(window, [record(rounds(random, QUIET), when=4)], window=1).window == 1


# --- what must not be compared


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        (
            {"environment": MACHINE | {"gpu": {"name": "NVIDIA H100", "sm_count": 132, "power_limit_w": 700.0}}},
            "another machine",
        ),
        ({"environment": MACHINE | {"gpu": {"name": "NVIDIA H200", "sm_count": 66, "power_limit_w": 700.0}}}, "units 132"),
        ({"environment": MACHINE | {"driver": "570"}}, "driver"),
        ({"environment": MACHINE | {"gpu": {"name": "NVIDIA H200", "sm_count": 132, "power_limit_w": 500.0}}}, "power_limit_w"),
        ({"environment": {}}, "does not say which machine"),
        ({"timer": "cuda_events"}, "another timer"),
        ({"cache_state": "warm"}, "another cache state"),
        ({"kv": {"plan": "pooled"}}, "another memory plan"),
    ],
)
def test_other_conditions_are_not_comparable(changes: dict[str, Any], reason: str) -> None:
    result = compare([record([[100.0]] * 10)], [record([[150.0]] * 10, when=1, **changes)])
    (cell,) = result.cells
    assert cell.verdict is Verdict.NOT_COMPARABLE and reason in (cell.reason or "")
    assert cell.effect is None and result.exit_code is ExitCode.NOT_COMPARABLE


def test_a_build_is_not_compared_with_itself() -> None:
    same = record([[100.0]] * 10)
    result = compare([same], [same])
    assert "with itself" in (result.cells[0].reason or "") and result.exit_code is ExitCode.NOT_COMPARABLE


def test_a_failed_row_is_lost_coverage_and_never_fast() -> None:
    good = record([[100.0]] * 10)
    bad = failed(case(), "locks", Outcome.OOM, "out of memory", environment=MACHINE, time="2026-01-02T00:00:00Z", key="2")
    other = [record([[100.0]] * 10, "fa3", when) for when in (0, 1)]
    lost = compare([good, other[0]], [bad, other[1]])
    cell = lost.lost[0]
    assert (cell.verdict, cell.coverage, cell.new_ns) == (Verdict.NOT_COMPARABLE, Coverage.LOST, None)
    assert "OOM: out of memory" in (cell.reason or "") and lost.exit_code is ExitCode.UNCLEAR
    assert compare([good, other[0]], [other[1]]).lost[0].backend == "locks", "a missing row too"
    gained = compare([bad, other[0]], [good, other[1]])
    assert not gained.lost and gained.cells[0].coverage is Coverage.GAINED and gained.exit_code is ExitCode.OK
    both = compare([bad, other[0]], [bad, other[1]])
    assert both.cells[0].coverage is Coverage.NONE and both.exit_code is ExitCode.OK
    assert compare([bad], [good]).exit_code is ExitCode.NOT_COMPARABLE, "nothing at all was compared"


@pytest.mark.parametrize("side", [0, 1])
def test_throttled_and_invalid_rows_give_no_verdict(side: int) -> None:
    sides = [record([[100.0]] * 10), record([[150.0]] * 10, when=1)]
    sides[side] = replace(sides[side], outcome=Outcome.THROTTLED, reason="clocks moved")
    cell = one([sides[0]], [sides[1]])
    assert cell.verdict is Verdict.INVALID and "clocks moved" in (cell.reason or "")
    invalid = replace(record([[1.0]] * 10, when=1), outcome=Outcome.INVALID, reason="above the roof")
    result = compare([record([[100.0]] * 10)], [invalid])
    assert result.having(Verdict.INVALID) and result.exit_code is ExitCode.UNCLEAR


def test_exit_codes_by_what_weighs_most() -> None:
    def code(*verdicts: Verdict) -> ExitCode:
        return Comparison([Cell(str(at), str(at), "b", {}, each) for at, each in enumerate(verdicts)]).exit_code

    assert code(Verdict.SAME, Verdict.FASTER) == 0
    assert code(Verdict.SAME, Verdict.SLOWER, Verdict.UNCLEAR) == 1
    assert code(Verdict.SAME, Verdict.UNCLEAR) == code(Verdict.INVALID) == 2
    assert code(Verdict.SAME, Verdict.NOT_COMPARABLE) == code() == 3


def test_machine_keys_are_stable_and_name_a_folder() -> None:
    key = MachineKey.of(MACHINE)
    assert key.slug() == "nvidia-h200-132-580.95.05-700w"
    other = MACHINE | {"commit": "other", "argv": ["x"], "gpu": MACHINE["gpu"] | {"uuid": "GPU-2"}}  # type: ignore[operator]
    assert MachineKey.of(other) == key
    cpu = MachineKey.of({"gpu": None, "cpu": {"name": "Some CPU @ 2 GHz", "cores": 4}})
    assert cpu.slug() == "some-cpu-2-ghz-4-unknown-unknown"
