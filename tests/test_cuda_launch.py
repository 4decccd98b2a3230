"""Launch shapes of the CUDA stages on devices of every size, without one."""

from __future__ import annotations

import itertools

import pytest

from locks_kernels.cuda.launch import GROUP_PAGES, RESERVED_SHARED_BYTES, Launch
from locks_kernels.shapes import HEAD_DIMS, PAGE_SIZES, RANKS, DecodeShape
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
