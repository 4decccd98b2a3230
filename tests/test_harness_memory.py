"""The memory plan: what is chosen, and that every copy it promises is really rotated through."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
from harness_fakes import TINY, tiny_case, tiny_workload

from harness import backends
from harness.backends.sdpa import Sdpa
from harness.case import Case, Model
from harness.errors import UserError
from harness.measure import blank_record
from harness.memory import (
    COLD_FACTOR,
    MAX_COPIES,
    DeviceMemory,
    SideMemory,
    local_shape,
    page_bytes,
    plan_memory,
    read_bytes,
    tensor_parallel,
)
from harness.presets import find_model
from harness.run import CaseStarted, RunOptions, run_sweep
from harness.store import Store
from locks_kernels.shapes import SelectOptions

H200 = DeviceMemory(free_bytes=140_000_000_000, l2_bytes=60 << 20)
L2 = 50 << 20
L2_50 = DeviceMemory(free_bytes=80 << 30, l2_bytes=L2)


def llama(ctx: int, batch: int, **changes: object) -> Case:
    return Case("attention", find_model("llama-3.1-8b"), ctx, batch, SelectOptions(), **changes)  # type: ignore[arg-type]


def one_megabyte(megabytes: int, layers: int = 4) -> Case:
    """A case whose sparsest step reads about that much: all of a short context."""
    model = dataclasses.replace(TINY, layers=layers, query_heads=8, kv_heads=8, head_dim=128)
    ctx = megabytes * 256
    return Case("attention", model, ctx, 1, SelectOptions(ctx))


@pytest.mark.parametrize("megabytes", [1, 4])
def test_enough_copies_to_be_cold(megabytes: int) -> None:
    case = one_megabyte(megabytes)
    assert read_bytes(case) == pytest.approx(megabytes << 20, rel=0.01)
    plan = plan_memory(case, L2_50)
    assert plan.copies * read_bytes(case) > COLD_FACTOR * L2 >= (plan.copies - 1) * read_bytes(case)
    assert plan.cache_state == "layers"
    assert plan.launches % plan.copies == 0


def test_every_copy_is_in_the_graph() -> None:
    workload = tiny_workload(copies=3)
    pools = {id(cache) for cache in workload.caches}
    assert len(pools) == 3
    assert len(workload.caches) == len(workload.queries) == workload.plan.launches


def test_says_warm_where_copies_cannot_help() -> None:
    tiny = dataclasses.replace(one_megabyte(1), ctx=64, select=SelectOptions(64))
    plan = plan_memory(tiny, L2_50)
    assert plan.copies == MAX_COPIES and plan.cache_state == "warm"
    assert "NOT more" in plan.note
    forced = plan_memory(dataclasses.replace(one_megabyte(4), kv="layers=2"), L2_50)
    assert forced.copies == 2 and forced.cache_state == "warm"


def test_unknown_cache_size_is_never_cold() -> None:
    plan = plan_memory(tiny_case(), DeviceMemory(8 << 30, None))
    assert plan.cache_state == "warm" and "unknown" in plan.note


def test_all_layers_where_they_are_cheap() -> None:
    plan = plan_memory(llama(8 << 10, 1), H200)
    assert (plan.plan, plan.copies, plan.launches) == ("resident", 32, 32)


def test_fewest_cold_copies_where_they_are_not() -> None:
    plan = plan_memory(llama(128 << 10, 1), H200)
    assert plan.plan == f"layers={plan.copies}" and 2 <= plan.copies < 32
    assert plan.bytes == plan.copies * (8192 + 4) * page_bytes(local_shape(llama(128 << 10, 1)))


def test_one_huge_copy_is_cold_with_several_queries() -> None:
    plan = plan_memory(llama(1 << 20, 16), H200)
    assert (plan.plan, plan.copies, plan.cache_state) == ("layers=1", 1, "layers")
    assert plan.launches >= 2


def test_a_million_tokens_times_64_is_pooled_and_says_so() -> None:
    plan = plan_memory(llama(1 << 20, 64), H200)
    assert plan.plan == plan.cache_state == "pooled"
    assert plan.bytes < H200.free_bytes and plan.pool_pages >= 65536
    assert "0.0" in plan.note and "L2" in plan.note


def test_level_token_keeps_room_for_weights() -> None:
    case = dataclasses.replace(llama(128 << 10, 4), level="token")
    assert plan_memory(case, H200, 16 << 30).plan == "resident"
    squeezed = plan_memory(case, H200, 100 << 30)
    assert squeezed.plan.startswith("layers=") and squeezed.launches == 32


def test_what_was_asked_for() -> None:
    assert plan_memory(llama(8 << 10, 1, kv="layers=3"), H200).copies == 3
    assert plan_memory(llama(8 << 10, 1, kv="resident"), H200).copies == 32
    assert plan_memory(llama(8 << 10, 2, kv="pooled"), H200).pooled
    ranks = plan_memory(llama(1 << 20, 1, kv="tp=4"), H200)
    assert ranks.plan == "tp=4" and ranks.tensor_parallel == 4
    assert local_shape(llama(1 << 20, 1, kv="tp=4")).kv_heads == 2
    assert tensor_parallel(llama(1 << 10, 1)) == 1


@pytest.mark.parametrize(
    ("case", "message"),
    [
        (llama(1 << 20, 1, kv="resident"), "at most layers=2"),
        (llama(1 << 20, 64, kv="layers=1"), "use --kv pooled"),
        (llama(8 << 10, 1, kv="layers=0"), "not known"),
        (llama(1 << 10, 1, kv="layers=4000"), "one CUDA graph"),
        (llama(8 << 10, 1, kv="everything"), "use auto, resident"),
        (llama(64 << 20, 1), "shorter --ctx"),
        (llama(1 << 20, 64, kv="tp=2"), "more ranks"),
    ],
)
def test_what_cannot_be(case: Case, message: str) -> None:
    with pytest.raises(UserError, match=message):
        plan_memory(case, H200)


def test_bandwidth_counts_the_cache() -> None:
    model = Model("m", 1, 8, 8, 128, 1024, 1, 1)
    case = Case("attention", model, 1024, 1, SelectOptions(1024))
    assert Sdpa().bytes(case)["kv"] == 4_194_304


def test_small_copies_have_a_size_too() -> None:
    smol = find_model("smollm2-135m")
    note = plan_memory(Case("token", smol, 512, 1, SelectOptions(256), device="cpu"), DeviceMemory(16 << 30, None)).note
    assert note.startswith("resident: 30 distinct copies of 498 kB (14.9 MB of 17.2 GB free)"), note


def test_a_batch_that_cannot_fit_is_told_to_be_smaller() -> None:
    with pytest.raises(UserError, match=r"of 999999999 need .* a smaller --batch"):
        plan_memory(llama(2048, 999_999_999), H200)


def test_summaries_that_backends_keep_are_counted_before_copies_are_promised() -> None:
    case, side = llama(1 << 20, 16), SideMemory(page_bytes=8 * 4096, scores=12)
    alone, crowded = plan_memory(case, H200), plan_memory(case, H200, side=side)
    assert (alone.plan, crowded.plan) == ("layers=1", "layers=1")
    needed = crowded.pool_pages * (page_bytes(local_shape(case)) + side.page_bytes)
    assert needed < H200.free_bytes and "34.4 GB more" in crowded.note
    full = plan_memory(case, H200, side=SideMemory(page_bytes=8 * 12288))
    assert full.pooled, "one pool and what is kept beside it do not fit"
    assert full.pool_pages * (page_bytes(local_shape(case)) + 8 * 12288) <= H200.free_bytes
    small = llama(8 << 10, 1)
    assert plan_memory(small, H200, side=side).copies == plan_memory(small, H200).copies


def test_side_memory_is_that_of_all_backends_which_can_run() -> None:
    case = llama(128 << 10, 1)
    names = ["quest-group", "oracle", "shared-svd-r8", "locks-r4", "locks", "sdpa", "quest", "nobody"]
    side = SideMemory.of(case, [backends.make(name) for name in names])
    assert side.page_bytes == 8 * (512 + 256 + 512)
    assert side.scores == 5


def test_a_sweep_plans_for_its_backends(tmp_path: Path) -> None:
    events: list[object] = []
    case = tiny_case(kv="pooled")
    run_sweep([case], ["centroid"], Store(tmp_path), RunOptions(command="test"), events.append)
    (note,) = [event.plan_text for event in events if isinstance(event, CaseStarted)]
    assert "more for summaries of the backends' own" in note


def test_a_backend_that_reads_less_than_locks_may_be_warm_where_locks_is_cold() -> None:
    case = llama(1 << 20, 1)
    plan = plan_memory(case, H200)
    states, run = {}, {"command": "test", "environment": {}, "timer": "graph"}
    for name in ("locks", "quest-group", "sliding-window", "random-pages", "quest"):
        states[name] = blank_record(case, plan, name, backends.make(name), "key", **run).cache_state
    assert states == {
        "locks": "layers",
        "quest-group": "layers",
        "sliding-window": "warm",  # 8 MB of two copies
        "random-pages": "warm",  # 8 MB of each launch
        "quest": "layers",
    }
    many = dataclasses.replace(plan, launches=100)
    assert blank_record(case, many, "random-pages", backends.make("random-pages"), "key", **run).cache_state == "layers"
    kv = blank_record(case, plan, "random-pages", backends.make("random-pages"), "key", **run).kv
    assert kv is not None and kv["note"].endswith("random-pages reads only 67.1 MB, which may stay there")
