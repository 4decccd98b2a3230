"""Launch shapes of the CUDA stages on devices of every size, and what they refuse, without a device."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import replace
from unittest.mock import Mock

import pytest
import torch

from locks_kernels.cache import PagedCache, Sequences
from locks_kernels.cuda.inputs import check_cache, check_tensor, check_token
from locks_kernels.cuda.launch import ATTEND_WARPS, GROUP_PAGES, RESERVED_SHARED_BYTES, SELECT_STATIC_BYTES, Launch
from locks_kernels.decode import step_launches
from locks_kernels.shapes import HEAD_DIMS, PAGE_SIZES, RANKS, DecodeShape, ShapeError
from locks_kernels.summary import RecordLayout

DEVICES = {"H200": (132, 227 << 10), "A100": (108, 163 << 10), "L40S": (142, 99 << 10)}  # multiprocessors, bytes a block
KV_HEADS = (1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 32, 160)
GROUPS = (1, 4, 5, 8, 9, 16)


def plan_of(device: str, shape: DecodeShape, batch: int = 1, max_pages: int = 8192) -> Launch:
    return Launch(shape, batch, max_pages, 2048 // shape.page_size, *DEVICES[device])


@pytest.mark.parametrize("device", DEVICES)
def test_the_scorers_ring_fits_and_has_a_stage_for_every_warp_of_a_head(device: str) -> None:
    for kv_heads, group, head_dim, page, rank in itertools.product(KV_HEADS, GROUPS, HEAD_DIMS, PAGE_SIZES, RANKS):
        shape = DecodeShape(kv_heads * group, kv_heads, head_dim, page, rank)
        plan = plan_of(device, shape)
        assert kv_heads % plan.score_heads == 0
        stage = GROUP_PAGES * plan.score_heads * RecordLayout.of(shape).record_bytes
        stages = plan.score_ring_bytes // stage
        # fewer, and a warp would take a slot's parity of several rounds ago for its own
        assert 2 <= stages >= plan.score_subs >= 1, shape
        assert stages * stage + RESERVED_SHARED_BYTES <= plan.shared_bytes, shape
        assert plan.score_blocks * (kv_heads // plan.score_heads) <= max(plan.sm_count, kv_heads)


@pytest.mark.parametrize("device", DEVICES)
def test_what_is_supported_fits_and_the_rest_says_why(device: str) -> None:
    largest = 8 if device == "H200" else 1
    refused = set()
    for kv_heads, group, head_dim, max_pages, batch in itertools.product(
        (1, 8), GROUPS, HEAD_DIMS, (1, 127, 128, 129, 8192, 15_000, 65_536, 1 << 20), (1, 64, 65_535, 65_536)
    ):
        plan = plan_of(device, DecodeShape(kv_heads * group, kv_heads, head_dim), batch, max_pages)
        reason = plan.unsupported(largest)
        if reason:
            refused.add(next(word for word in ("sequences", "attention", "block tables") if word in reason))
            continue
        blocks = plan.select_cluster(largest)
        slice_pages = -(-max_pages // (4 * blocks)) * 4  # as select.cu has it, then whole warps
        assert -(-slice_pages // 128) * 128 <= plan.slice_capacity(blocks)
        assert plan.select_shared_bytes(blocks) + SELECT_STATIC_BYTES <= plan.shared_bytes
        blocks = plan.attend_cluster(largest)
        outputs = group * min(head_dim, 128)
        static = 8 * ATTEND_WARPS * group + 4 * outputs + 8 * blocks * group  # the arrays of attend.cu
        assert plan.attend_shared_bytes(plan.attend_stages(blocks)) + static <= plan.shared_bytes
    assert refused == {"sequences", "block tables"} | ({"attention"} if device == "L40S" else set())


def refused_by(check: Callable[[], None]) -> str:
    with pytest.raises(ShapeError) as error:
        check()
    return str(error.value)


def test_tensors_that_the_kernels_would_misread_are_refused() -> None:
    """Views of a fused projection, other types, addresses between two loads."""
    fused = torch.zeros(2, 48, 64, dtype=torch.bfloat16)

    def check(tensor: torch.Tensor) -> None:
        check_tensor("query", tensor, (2, 32, 64), torch.bfloat16, torch.device("cpu"))

    check(fused[:, :32].contiguous())
    assert "strides (3072, 64, 1)" in refused_by(lambda: check(fused[:, :32]))
    assert "torch.float32" in refused_by(lambda: check(torch.zeros(2, 32, 64)))
    assert "(1, 32, 64)" in refused_by(lambda: check(fused[:1, :32]))
    refused_by(lambda: check(torch.zeros(2 * 32 * 64 + 1, dtype=torch.bfloat16)[1:].view(2, 32, 64)))


def test_tokens_may_be_rows_of_a_fused_projection() -> None:
    cache = PagedCache.allocate(DecodeShape(4, 2, 64), 1, "cpu")
    query, keys, values = torch.zeros(3, 8, 64, dtype=torch.bfloat16).split((4, 2, 2), 1)
    check_token(cache, 3, query=query, keys=keys, values=values, out=query.contiguous())
    assert "out must be contiguous" in refused_by(lambda: check_token(cache, 3, out=query))
    check_token(cache, 3, keys=keys.contiguous(), values=values)  # as vLLM has them: rotated keys are a tensor of their own


def test_caches_that_the_kernels_would_misread_are_refused() -> None:
    cache = PagedCache.allocate(DecodeShape(4, 2), 6, "cpu")
    table, lens = torch.zeros(2, 4, dtype=torch.int32), torch.zeros(2, dtype=torch.int32)
    check_cache(cache, Sequences(table, lens))
    page_major = replace(cache, keys=cache.keys.contiguous(), values=cache.values.contiguous())
    check_cache(page_major, Sequences(table, lens))
    cases = [
        ("block_table", cache, Sequences(table[:, :3], lens)),
        ("block_table", cache, Sequences(table.long(), lens)),
        ("seq_lens", cache, Sequences(table, lens.long())),
        ("values", replace(cache, values=cache.values.contiguous()), Sequences(table, lens)),
        ("keys", replace(cache, keys=cache.keys.half(), values=cache.values.half()), Sequences(table, lens)),
        ("summaries", replace(cache, summaries=cache.summaries[..., :-1]), Sequences(table, lens)),
    ]
    for name, broken, sequences in cases:
        assert name in refused_by(lambda broken=broken, sequences=sequences: check_cache(broken, sequences))


def test_who_appends() -> None:
    """The scorer, while each of its warps has one page at most to finish."""
    tokens = {batch: plan_of("H200", DecodeShape(32, 8), batch).append_warps for batch in (1, 33, 34)}
    assert tokens == {1: 2, 33: 2, 34: 0}
    assert plan_of("H200", DecodeShape(32, 8), 16, max_pages=1).append_warps == 0, "16 blocks for 128 tokens"
    for shape in (DecodeShape(32, 8, page_size=32), DecodeShape(8, 2, head_dim=256)):
        assert plan_of("H200", shape).append_warps == 0


def test_when_a_step_can_be_one_launch() -> None:
    """Short tables, two tiles for each warp at most, the scores of all heads in shared memory."""
    fits = [n for n in range(128, 4096, 128) if plan_of("H200", DecodeShape(4, 1), max_pages=n).whole_step]
    assert max(fits) == 1024
    assert not replace(plan_of("H200", DecodeShape(4, 1), max_pages=1024), shared_bytes=48 << 10).whole_step
    for shape in (DecodeShape(5, 1), DecodeShape(4, 1, page_size=32), DecodeShape(4, 1, head_dim=256)):
        assert not plan_of("H200", shape, max_pages=64).whole_step
    assert not replace(plan_of("H200", DecodeShape(4, 1), max_pages=512), table_pages=129).whole_step
    assert plan_of("H200", DecodeShape(32, 8), batch=2, max_pages=512).step_clusters == 18


@pytest.mark.parametrize("starts_early", (False, True))
def test_a_step_in_one_launch(starts_early: bool) -> None:
    stages, token = Mock(), [torch.zeros(1)] * 4
    launches = step_launches(stages, *token, starts_early)
    assert list(launches) == ["step"]
    launches["step"]()
    assert [call[0] for call in stages.method_calls] == ["whole_step"]
    assert stages.whole_step.call_args.args == (*token, starts_early)


@pytest.mark.parametrize("starts_early", (False, True))
def test_stages_that_append_beside_the_scoring_are_three_launches(starts_early: bool) -> None:
    stages, token = Mock(whole_step=None), [torch.zeros(1)] * 4
    launches = step_launches(stages, *token, starts_early)
    assert list(launches) == ["score", "select", "attend"]
    for launch in launches.values():
        launch()
    assert [call[0] for call in stages.method_calls] == ["append_score", "select", "attend"]
    assert stages.append_score.call_args.args == (*token[:3], starts_early)


@pytest.mark.parametrize(
    ("kv_heads", "batch", "pages", "blocks"),
    [(8, 1, 8192, 4), (8, 1, 65_536, 8), (4, 1, 65_536, 16), (8, 16, 65_536, 2), (8, 1, 1 << 19, 16)],
)
def test_blocks_of_the_selection(kv_heads: int, batch: int, pages: int, blocks: int) -> None:
    """As measured at 128K and 1M; tables that do not fit 8 blocks take more in any case."""
    assert plan_of("H200", DecodeShape(4 * kv_heads, kv_heads), batch, pages).select_cluster(16) == blocks
