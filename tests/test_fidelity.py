"""Fidelity on synthetic traces: the controls that must hold, the theory's promises, records, resume and the table."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from fake_records import case, measured
from typer.testing import CliRunner

from bench.cli import app
from harness import fidelity_run, theory, traces_synthetic
from harness.case import Case
from harness.errors import UserError
from harness.fidelity import Kept, energy, measure
from harness.fidelity_record import FidelityRecord
from harness.record import Outcome, Record
from harness.store import Store, load, read
from harness.traces import Trace, TraceCache
from harness.traces_synthetic import generate, source_of
from locks_kernels.selectors import SELECTORS
from locks_kernels.shapes import SelectOptions
from reports import selector_times
from reports.fidelity import report, rows

TOKENS = 2048
BUDGET = SelectOptions(budget_tokens=256)


@pytest.fixture(scope="module")
def trace() -> Trace:
    return generate(source_of(TOKENS, seed=3))


def kept(trace: Trace, *names: str, options: SelectOptions = BUDGET) -> dict[str, Kept]:
    found = measure(trace, [SELECTORS[name] for name in names], [options])
    return {name: value for (name, _), value in found.items()}


def share(value: Kept, denominator: str, how: str = "strict") -> float:
    good, cases = value.retention()[denominator][how]
    assert cases > 0
    return good / cases


def test_everything_in_the_table_keeps_every_carrier_and_changes_nothing(trace: Trace) -> None:
    full = kept(trace, "oracle", "locks-r8", "random-pages", options=SelectOptions(budget_tokens=TOKENS))
    for value in full.values():
        assert share(value, "all") == share(value, "retrieval") == 1.0
        assert value.mass / value.heads == pytest.approx(1.0, abs=1e-5)
        assert value.error / value.heads < 1e-5 and not value.active


def test_window_loses_every_carrier_and_random_pages_keep_their_share(trace: Trace) -> None:
    found = kept(trace, "sliding-window", "random-pages")
    assert share(found["sliding-window"], "all", "loose") == 0.0
    many = [kept(generate(source_of(TOKENS, seed)), "random-pages")["random-pages"] for seed in range(12)]
    hits = sum(value.retention()["all"]["loose"][0] for value in many)
    cases = sum(value.retention()["all"]["loose"][1] for value in many)
    assert hits / cases == pytest.approx(1.5 * 14 / 126, abs=0.07)  # a carrier of 7 tokens lies in 1.4 pages on average


def test_oracle_keeps_all_that_it_keeps_and_is_the_best(trace: Trace) -> None:
    found = kept(trace, "oracle", "locks-r8", "locks-r2", "quest-group", "shared-svd-r8", "random-pages")
    assert share(found["oracle"], "oracle") == 1.0 and found["oracle"].recall == found["oracle"].units
    order = [found[name].mass for name in ("oracle", "locks-r8", "locks-r2", "quest-group", "shared-svd-r8", "random-pages")]
    assert order == sorted(order, reverse=True)
    assert all(value.active for value in found.values())


def test_published_quest_is_dense_in_two_layers_and_pays_for_it(trace: Trace) -> None:
    found = kept(trace, "quest", "quest-all-layers", "quest-group")
    assert found["quest"].attend_bytes > found["quest-all-layers"].attend_bytes > found["quest-group"].attend_bytes
    assert found["quest"].score_bytes == pytest.approx(found["quest-group"].score_bytes / 3, rel=0.02)


def test_forced_carriers_are_no_cases(trace: Trace) -> None:
    at_the_start = replace(trace, carriers=[[2, 3]])
    assert kept(at_the_start, "oracle")["oracle"].retention()["all"]["strict"] == [0, 0]


def test_energy_grows_with_rank_and_is_what_the_recipe_says(trace: Trace) -> None:
    found = energy(trace)
    values = [found[rank] for rank in ("1", "2", "4", "8")]
    assert values == sorted(values) and values[-1] < 1
    assert values[0] == pytest.approx(0.28, abs=0.03)


def test_shared_structure_is_what_was_fitted_and_what_a_shared_basis_needs() -> None:
    """Half of the directions carry 0.76 of what is inside pages, as in SmolLM2 (a few more in a sample of them)."""
    found = {}
    for name in traces_synthetic.NAMES:
        made = generate(source_of(TOKENS, 0, name))
        layer = made.layer(0)
        pages = layer.pages(16)
        inside, whole = (pages - pages.mean(2, keepdim=True)).flatten(1, 2), layer.keys
        parts = [torch.linalg.eigvalsh(part.mT @ part).flip(-1) for part in (inside, whole)]
        halves = [
            float((values[:, :count].sum(-1) / values.sum(-1)).mean()) for values, count in zip(parts, (64, 16), strict=True)
        ]
        masses = measure(made, [SELECTORS["oracle"], SELECTORS["locks-r8"]], [BUDGET])
        found[name] = (*halves, masses["locks-r8", 256].mass / masses["oracle", 256].mass, energy(made)["8"])
    even, shared = found["synthetic"], found["synthetic-shared"]
    assert shared[0] == pytest.approx(0.78, abs=0.03) and even[0] < 0.7
    assert shared[1] == pytest.approx(0.75, abs=0.05) and even[1] < shared[1] - 0.05, "an eighth of all axes"
    assert even[2] > 0.9 and shared[2] > 0.9 and shared[3] == pytest.approx(0.90, abs=0.02)


def test_the_promises_of_the_theory_hold_on_a_trace(trace: Trace) -> None:
    for rank in (2, 8):
        found = theory.check_bounds(trace, rank, BUDGET)
        assert found.broken == {"tail": 0, "retention": 0, "error": 0} and found.cases == 8 * 3 * 4
        means = found.record()
        assert means["promised"] < means["retained"] <= 1.001  # type: ignore[operator]
        assert means["error"] < means["error_bound"]  # type: ignore[operator]
    pair = theory.blind_pair(trace.layer(0), trace.steps(0).queries[0, 0, 0], 8)
    assert abs(pair["shared"]) < 1e-4 and pair["exact"] > 20 and pair["page"] > 20


def test_a_broken_promise_is_seen(trace: Trace, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(theory, "spectral_keys", lambda pages, rank: pages.flip(1))
    monkeypatch.setattr(theory, "SLACK", -0.5)
    assert theory.check_bounds(trace, 8, BUDGET).broken["retention"] > 0


def test_trace_cache_gives_back_what_it_was_given_and_mends_itself(tmp_path: Path, trace: Trace) -> None:
    cache, made = TraceCache(tmp_path), []

    def make() -> Trace:
        made.append(1)
        return trace

    for _ in range(2):
        found = cache.get(trace.source, make)
    assert made == [1] and torch.equal(found.keys, trace.keys) and found.carriers == trace.carriers
    next(tmp_path.glob("*.pt")).write_bytes(b"torn")
    cache.get(trace.source, make)
    assert made == [1, 1] and torch.equal(cache.get(trace.source, make).queries, trace.queries)
    with pytest.raises(UserError, match="--traces"):
        TraceCache(next(tmp_path.glob("*.pt")) / "below")


def invoke(tmp_path: Path, *arguments: str) -> tuple[dict, str]:
    target = tmp_path / "rows.json"
    common = ["fidelity", "--model", "synthetic", "--ctx", "2K", "--samples", "2", "--store", str(tmp_path / "store")]
    result = CliRunner().invoke(app, [*common, "--json", str(target), *arguments], catch_exceptions=False)
    assert result.exit_code == 0
    return json.loads(target.read_text()), result.output


def test_command_measures_once_and_shows_one_table(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    chosen = "oracle,locks-r8,quest-group,shadowkv"
    data, shown = invoke(tmp_path, "--selectors", chosen, "--budget", "256")
    assert [row["selector"] for row in data["rows"]] == chosen.split(",")
    first = data["rows"][1]
    assert first["samples"] == 2 and first["bytes_per_step"] > 0 and 0.9 < first["mass_of_oracle"]["value"] <= 1
    assert data["rows"][3]["outcome"] == "SKIPPED" and "rotation" in data["rows"][3]["reason"]
    assert data["theory"]["bounds"][0]["broken"] == {"tail": 0, "retention": 0, "error": 0}
    for text in ("locks-r8", "Synthetic keys", "bootstrap over samples", "blind pair", "SKIPPED"):
        assert text in shown
    monkeypatch.setattr(fidelity_run, "measure", lambda *arguments: pytest.fail("measured again"))
    again, _ = invoke(tmp_path, "--selectors", chosen, "--budget", "256", "--no-theory")
    assert again["rows"] == data["rows"] and again["theory"] is None
    stored = read(tmp_path / "store" / "fidelity.ndjson", kind=FidelityRecord)
    assert len(stored) == 8 and {record.outcome for record in stored} == {Outcome.OK, Outcome.SKIPPED}
    (tmp_path / "store" / "records.jsonl").touch()
    assert load([tmp_path / "store"]) == [], "readers of measurements leave fidelity alone"


def test_a_table_of_everything_is_no_selection_and_the_report_says_so(tmp_path: Path) -> None:
    data, shown = invoke(tmp_path, "--selectors", "oracle,locks-r4", "--budget", "2K", "--no-theory")
    assert [row["active"] for row in data["rows"]] == [False, False]
    assert "so not a selection: oracle, locks-r4" in " ".join(shown.split())


def test_sinks_that_are_not_forced_are_another_experiment(tmp_path: Path) -> None:
    forced, _ = invoke(tmp_path, "--selectors", "sliding-window", "--budget", "64", "--no-theory")
    free, shown = invoke(tmp_path, "--selectors", "sliding-window", "--budget", "64", "--no-theory", "--sink-pages", "0")
    assert (forced["rows"][0]["sink_pages"], free["rows"][0]["sink_pages"]) == (1, 0)
    assert forced["rows"][0]["mass"] != free["rows"][0]["mass"] and "no sink page forced" in shown
    assert len(read(tmp_path / "store" / "fidelity.ndjson", kind=FidelityRecord)) == 4


def test_budgets_as_shares_and_what_cannot_be(tmp_path: Path) -> None:
    data, _ = invoke(tmp_path, "--selectors", "oracle", "--budget", "6.25%,64", "--no-theory")
    assert [row["budget"] for row in data["rows"]] == [64, 128]
    for arguments, message in (
        (["--budget", "1%"], "at least 48"),
        (["--budget", "200%"], "above the context of 2048"),
        (["--selectors", "quets"], "did you mean 'quest'"),
        (["--model", "llama"], "unknown model 'llama'"),
        (["--tasks", "niah"], "unknown task"),
        (["--model-path", str(tmp_path)], "no config.json"),
    ):
        common = ["fidelity", "--ctx", "2K", "--store", str(tmp_path)]
        with pytest.raises(UserError, match=message):
            CliRunner().invoke(app, common + arguments, catch_exceptions=False)


def test_rows_are_ratios_over_samples_and_absent_is_none() -> None:
    def record(sample: int, counts: list[int]) -> FidelityRecord:
        facts = {"model": "m", "ctx": 4096, "agrees": None, "energy": {"8": 0.9}, "seed": sample}
        retention = {name: {"strict": counts, "loose": counts} for name in ("all", "oracle", "retrieval")}
        declared = {
            "label": "LOCKS",
            "granularity": "KV head",
            "forced_in_budget": True,
            "dense_layers": [],
            "question_visible": None,
        }
        parts = {"score": 1.0, "attend": 1.0, "full": 20.0}
        return FidelityRecord(
            str(sample),
            "t",
            "c",
            facts,
            "locks-r8",
            declared,
            256,
            Outcome.OK,
            None,
            0.5,
            1.0,
            0.1,
            0.9,
            retention,
            99.0,
            parts,
            True,
        )

    row = rows([record(0, [1, 1]), record(1, [0, 3])])[0]
    assert row["retention_all_strict"]["value"] == 0.25 and row["retention_all_strict"]["cases"] == 4
    assert row["mass_of_oracle"]["value"] == 0.5 and row["fewer_bytes"] == 10.0
    none = rows([record(0, [0, 0])])[0]
    assert none["retention_all_strict"] == {"value": None, "interval": None, "cases": 0}
    assert report([none]) is not None


def timed(directory: Path, *records: Record) -> None:
    store = Store(directory)
    for record in records:
        store.append(record)


def sparse(of: Case, backend: str, microseconds: float, **changes: object) -> Record:
    return measured(of, backend, microseconds, resolved={"dense": False}, **changes)


def test_times_of_a_store_stand_beside_what_is_kept(tmp_path: Path) -> None:
    long, short = case(), case(ctx=8192, batch=16)
    timed(
        tmp_path / "store",
        measured(long, "fa3", 990.0),
        sparse(long, "locks-triton", 230.0),
        sparse(long, "locks", 144.0),
        sparse(long, "quest-group", 120.0),
        sparse(long, "centroid", 66.0),
        sparse(long, "random-pages", 9.0, cache_state="warm"),
        sparse(short, "quest-group", 20.0),
    )
    chosen = "locks-r8,locks-r4,quest-group,shadowkv-landmarks,random-pages"
    data, shown = invoke(tmp_path, "--selectors", chosen, "--budget", "256", "--no-theory")
    times = {row["selector"]: row["latency_us"] for row in data["rows"]}
    assert times.pop("locks-r8") == pytest.approx(144, rel=1e-2), "by the best kernels"
    assert times.pop("quest-group") == pytest.approx(120, rel=1e-2)
    assert times.pop("shadowkv-landmarks") == pytest.approx(66, rel=1e-2), "the same launches as centroid"
    assert times == {"locks-r4": None, "random-pages": None}, "not measured; warm"
    assert data["times"]["ctx"] == 1 << 20 and data["times"]["batch"] == 1
    text = " ".join(shown.split())
    assert "us/layer" in shown and "llama-3.1-8b at 1M x 1, budget 2048, NVIDIA H200" in text


def test_a_store_without_times_has_no_column_and_says_so(tmp_path: Path) -> None:
    data, shown = invoke(tmp_path, "--selectors", "oracle", "--budget", "256", "--no-theory")
    assert data["times"] is None and data["rows"][0]["latency_us"] is None
    assert "us/layer" not in shown and "latency --backends all" in " ".join(shown.split())
    peak = sparse(case(select=SelectOptions(combine="peak"), rank=4), "locks-cuda", 100.0)
    assert selector_times.find([peak, measured(case(), "fa3", 990.0)], 256).us == {
        "locks-r4-peak": pytest.approx(100, rel=1e-2)
    }  # type: ignore[union-attr]
