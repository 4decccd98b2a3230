"""Bytes of every selector against numbers worked out by hand for Llama-3.1-8B (32 layers, 8 KV heads, G 4, D 128)."""

from __future__ import annotations

import pytest

from locks_kernels import selector_cost as cost
from locks_kernels.cost import locks_bytes
from locks_kernels.selectors import SELECTORS
from locks_kernels.shapes import DecodeShape, SelectOptions

LLAMA = DecodeShape(query_heads=32, kv_heads=8, head_dim=128)
UNITS, GIB = 32 * 8, 2**30
BUDGET = SelectOptions(budget_tokens=2048)
SHORT, LONG = 131_072, 1_048_576


def gib(name: str, tokens: int, options: SelectOptions = BUDGET) -> tuple[float, float]:
    """GiB per step of scoring and of attention at most, all layers."""
    selector = SELECTORS[name]
    per_query_head = selector.declaration.granularity == "query head"
    attended: float = cost.most_distinct_tokens(LLAMA, options, tokens, per_query_head)
    if name == "shadowkv":
        attended = cost.ShadowKV.attended(options)
    elif name.startswith("rocketkv"):
        attended = options.budget_tokens / 2
    score = selector.score_bytes(LLAMA, options, tokens)
    return UNITS * score / GIB, UNITS * selector.attend_bytes(LLAMA, attended) / GIB


@pytest.mark.parametrize(
    ("name", "short", "long"),
    [
        # name, (score, attend) at 128K and at 1M, GiB per step at a budget of 2048 tokens
        ("oracle", (8.00, 0.25), (64.0, 0.25)),
        ("locks-r8", (1.60, 0.25), (12.78, 0.25)),
        ("quest-group", (1.00, 0.25), (8.00, 0.25)),
        ("quest", (1.00, 1.00), (8.00, 1.00)),
        ("cuboid-mean", (1.00, 0.25), (8.00, 0.25)),
        ("mean-std-vector", (1.00, 0.25), (8.00, 0.25)),
        ("mean-std-scalar", (0.50, 0.25), (4.03, 0.25)),
        ("unique", (1.01, 0.25), (8.06, 0.25)),
        ("centroid", (0.50, 0.25), (4.00, 0.25)),
        ("shadowkv-landmarks", (0.50, 0.25), (4.00, 0.25)),
        ("shadowkv", (1.00, 0.324), (8.00, 0.324)),  # 2464 tokens .30, rows of the key factor .02
        ("rocketkv", (0.12, 0.125), (0.12, 0.125)),
        ("kvzip-pair-uniform", (0.0, 0.25), (0.0, 0.25)),
        ("sliding-window", (0.0, 0.25), (0.0, 0.25)),
        ("loki-page-r32", (2.0, 0.25), (16.0, 0.25)),
    ],
)
def test_bytes_of_a_step(name: str, short: tuple[float, float], long: tuple[float, float]) -> None:
    for tokens, (score, attend) in ((SHORT, short), (LONG, long)):
        found = gib(name, tokens)
        assert found[0] == pytest.approx(score, rel=0.01, abs=0.006)
        assert found[1] == pytest.approx(attend, rel=0.01, abs=0.006)


def test_full_attention_and_the_headline_ratio() -> None:
    full = UNITS * cost.attend_bytes(LLAMA, LONG) / GIB
    assert full == 128.0
    assert full / sum(gib("locks-r8", LONG)) == pytest.approx(9.82, abs=0.01)
    assert full / sum(gib("quest-group", LONG)) == pytest.approx(15.5, abs=0.05)
    assert full / sum(gib("oracle", LONG)) == pytest.approx(2.0, abs=0.01)


def test_bytes_per_page() -> None:
    assert [cost.locks_page_bytes(LLAMA, rank) for rank in (8, 4, 2)] == [818, 490, 326]
    assert {name: of(LLAMA) for name, of in cost.PAGE_BYTES.items()} == {
        "oracle": 4096,
        "min-max": 512,
        "cuboid-mean": 512,
        "mean-std-vector": 512,
        "mean-std-scalar": 258,
        "centroid": 256,
        "second-order": 394,
    }


def test_a_prefix_of_a_record_and_two_stages() -> None:
    assert [cost.locks_prefix_bytes(LLAMA, 8, first) for first in (1, 2, 4, 8)] == [370, 434, 562, 818]
    twice = cost.locks_two_stage_bytes(LLAMA, BUDGET, LONG, rank=8, first=2, times=4)
    assert twice == 65_535 * 434 + 512 * 818


def test_shared_bases_at_the_bytes_of_locks() -> None:
    assert cost.shared_rank(LLAMA, 818, 8) == 49 and cost.shared_page_bytes(LLAMA, 49, 8) == 816
    assert cost.shared_rank(LLAMA, 818, 4) == 98 and cost.shared_page_bytes(LLAMA, 98, 4) == 816
    assert cost.shared_page_bytes(LLAMA, 32) == 1024


@pytest.mark.parametrize(
    ("tokens", "budget", "capacity", "chunk", "channels", "attended"),
    [
        (16_384, 64, 377, 3, 65, 32),
        (16_384, 2048, 7_434, 2, 70, 1024),
        (131_072, 128, 511, 2, 64, 64),
        (131_072, 2048, 12_765, 3, 61, 1024),
        (1_048_576, 2048, 10_369, 3, 75, 1024),
    ],
)
def test_rocketkv_plans_as_published(tokens: int, budget: int, capacity: int, chunk: int, channels: int, attended: int) -> None:
    plan = cost.RocketPlan.of(tokens, budget, 128)
    assert (plan.capacity, plan.chunk, plan.channels, plan.attended) == (capacity, chunk, channels, attended)
    traffic = plan.score_bytes(LLAMA) + cost.attend_bytes(LLAMA, attended)
    assert traffic == pytest.approx(budget * 512, rel=0.015), "a budget is traffic"


def test_nothing_is_scored_where_everything_is_kept() -> None:
    assert cost.page_selector_bytes(LLAMA, BUDGET, 2000, 1, 512) == {"summary": 0, "selected_kv": 8 * 2000 * 512}
    parts = cost.page_selector_bytes(LLAMA, BUDGET, SHORT, 2, 512, per_query_head=True)
    assert parts == {"summary": 2 * 8 * 8191 * 512, "selected_kv": 2 * 8 * 4 * 2048 * 512}


def test_a_sequence_that_stays_dense_reads_all_of_its_pages_and_no_summary() -> None:
    shape, pages = DecodeShape(32, 8), 512
    dense, sparse = SelectOptions(2048, dense_tokens=8192), SelectOptions(2048)
    whole = locks_bytes(shape, dense, 8192, 1)
    assert whole["selected_kv"] == pages * shape.kv_heads * shape.page_kv_bytes and whole["summary"] == 0
    assert locks_bytes(shape, dense, 8193, 1) == locks_bytes(shape, sparse, 8193, 1)
