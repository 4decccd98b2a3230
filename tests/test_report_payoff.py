"""Crossovers, intervals of speed-ups and verdicts, against worked examples."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from fake_records import case, failed, measured
from report_fakes import noisy

from harness.record import Outcome, Record
from harness.stats import RESAMPLES, SEED
from reports.panels import Panel, panels
from reports.payoff import crossover, sparse_backends, speedup_interval, verdict


def panel(speedups: dict[int, float | None], **changes: Any) -> Panel:
    """One batch: dense takes 100 us, locks 100 / speed-up; None is a failure."""
    records: list[Record] = []
    for ctx, speedup in speedups.items():
        of = case(ctx=ctx)
        records.append(noisy(of, "fa3", 100.0, **changes))
        failure = failed(of, "locks", Outcome.OOM, "out of memory", timer="cuda_graph")
        records.append(failure if speedup is None else noisy(of, "locks", 100.0 / speedup, bytes=None, **changes))
    found = panels(records)
    assert len(found) == 1
    return found[0]


def test_crossover_is_where_the_logarithm_passes_zero() -> None:
    flat = {"rounds_ns": None}
    records = []
    for ctx, speedup in ((8192, 0.5), (32768, 2.0)):
        records += [
            measured(case(ctx=ctx), backend, 1.0, bytes=None, **flat | {"rounds_ns": [[1e3 * time]] * 10})
            for backend, time in (("fa3", 100.0), ("locks", 100.0 / speedup))
        ]
    found = crossover(panels(records)[0], "locks", 1)
    assert found is not None and found.kind == "at"
    # Both axes logarithmic and both sides a factor of two away: the middle of 8K and 32K is 16K.
    assert found.at == pytest.approx(16384) == found.low == found.high
    assert (found.below, found.above) == (8192, 32768)


def test_interval_of_a_crossover_holds_it_and_is_narrow() -> None:
    found = crossover(panel({8192: 0.5, 32768: 1.4, 131072: 3.0}), "locks", 1)
    assert found is not None and found.low is not None and found.high is not None and found.at is not None
    assert found.low < found.at < found.high < 1.1 * found.low


def test_only_the_last_crossing_counts() -> None:
    found = crossover(panel({8192: 1.5, 32768: 0.5, 131072: 2.0}), "locks", 1)
    assert found is not None and (found.below, found.above) == (32768, 131072)


@pytest.mark.parametrize(
    ("speedups", "kind"),
    [
        ({8192: 1.2, 32768: 2.0}, "always"),
        ({8192: 0.5, 32768: 0.9}, "never"),
        ({8192: 0.5, 32768: None, 131072: 2.0}, "between"),
        ({8192: 1.2}, "always"),
        ({8192: 0.8}, "never"),
    ],
)
def test_kinds_without_a_number(speedups: dict[int, float | None], kind: str) -> None:
    found = crossover(panel(speedups), "locks", 1)
    assert found is not None and found.kind == kind and found.at is None


def test_a_bound_outside_the_measured_range_is_open() -> None:
    found = crossover(panel({8192: 0.5, 32768: 1.002}), "locks", 1)
    assert found is not None and found.kind == "at" and found.high is None and found.low is not None


def test_no_crossover_without_a_claim() -> None:
    assert crossover(panel({8192: None}), "locks", 1) is None
    assert crossover(panel({8192: 2.0}, cache_state="warm"), "locks", 1) is None
    assert sparse_backends(panel({8192: 2.0}, cache_state="hot")) == []


def test_speedup_interval_resamples_rounds_in_pairs() -> None:
    of = case(ctx=8192)
    drift = [1.0 + 0.1 * math.sin(place) for place in range(12)]  # shared by both backends of a round
    records = [
        noisy(of, "fa3", 1.0, rounds_ns=[[100.0 * x] for x in drift]),
        noisy(of, "locks", 1.0, rounds_ns=[[50.0 * x] for x in drift]),
    ]
    found = panels(records)[0]
    assert speedup_interval(found, found.entries[1]) == pytest.approx((2.0, 2.0))


def test_speedup_interval_of_unequal_rounds_by_hand() -> None:
    of = case(ctx=8192)
    dense, sparse = [[100.0 + place] for place in range(11)], [[50.0 + place / 3] for place in range(14)]
    found = panels([noisy(of, "fa3", 1.0, rounds_ns=dense), noisy(of, "locks", 1.0, rounds_ns=sparse)])[0]

    def resampled(rounds: list[list[float]]) -> np.ndarray:
        values = np.array(rounds)[:, 0]
        return np.median(values[np.random.default_rng(SEED).integers(0, len(values), (RESAMPLES, len(values)))], axis=1)

    wanted = np.quantile(resampled(dense) / resampled(sparse), (0.025, 0.975))
    assert speedup_interval(found, found.entries[1]) == pytest.approx(tuple(wanted))


@pytest.mark.parametrize(
    ("interval", "word"),
    [
        ((1.02, 1.1), "faster"),
        ((0.8, 0.98), "slower"),
        ((0.995, 1.005), "the same"),
        ((0.98, 1.02), "unclear"),
        ((1.0, 1.5), "unclear"),
    ],
)
def test_verdicts(interval: tuple[float, float], word: str) -> None:
    assert verdict(interval) == word


def test_a_second_instance_of_a_backend_is_in_no_figure() -> None:
    of = case(ctx=8192)
    records = [
        noisy(of, "fa3", 100.0),
        noisy(of, "locks", 50.0, bytes=None),
        noisy(of, "locks#2", 49.0, bytes=None, resolved={"dense": False}),
    ]
    found = panels(records)[0]
    assert found.backends == ["fa3", "locks"] and len(found.entries) == 3
