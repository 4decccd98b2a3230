"""Launch shapes of the CUDA stages, from shapes and the limits of a device alone."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from locks_kernels.shapes import MAX_SEQUENCES, DecodeShape
from locks_kernels.summary import RecordLayout

PORTABLE_CLUSTER, LARGEST_CLUSTER = 8, 16
GROUP_PAGES = 8  # pages that a warp of the scorer takes at a time
SCORE_WARPS = 8  # that compute, and KV heads per block at most
RESERVED_SHARED_BYTES = 8192  # static shared memory and what the driver keeps for itself
SCORE_LEAVES_BYTES = 65536  # of an SM's shared memory, for the selection's block to be there when the last score is written
SELECT_THREADS, SELECT_STATIC_BYTES, SELECT_HISTOGRAM_BYTES = 512, 20480, 16384
SLICE_PAGES = 2048  # pages below which another block of the selection's cluster does not pay
APPEND_WARPS = 2  # of a scorer's block
FINALISE_WARPS = 2  # of a block that only appends and finalises
ATTEND_WARPS, ATTEND_RING = 8, 3
STEP_CLUSTER, STEP_WARPS = 8, 8  # of a step in one launch
STEP_TILES = 2  # of a warp
STEP_PAGES = 1024  # of a block table; with more, all multiprocessors are worth three launches
STEP_SEARCH_BYTES = 6144  # static, of select_keys.cuh for one block


@dataclass(frozen=True)
class Launch:
    """Launch shapes of one cache, from its shape, the batch and the device alone."""

    shape: DecodeShape
    batch: int
    max_pages: int
    table_pages: int
    sm_count: int
    shared_bytes: int  # a block may ask for

    @cached_property
    def macros(self) -> dict[str, object]:
        """Compile-time parameters that all kernels share (common.cuh)."""
        shape = self.shape
        return {
            "D": shape.head_dim,
            "PAGE": shape.page_size,
            "R": shape.rank,
            "G": shape.group,
            "FP16": int(shape.dtype == "float16"),
            "SOFTMAX_SCALE": f"{shape.softmax_scale!r}f",
        }

    @cached_property
    def score_macros(self) -> dict[str, object]:
        few = self.shape.head_dim <= 128 and self.shape.group <= 4
        return {
            **self.macros,
            "HEADS": self.score_heads,
            "WARPS": self.score_heads * self.score_subs,
            "UNROLL": 4 if few else 2,  # pairs of pages, or pages, in flight a warp
            "APPEND_WARPS": self.append_warps,
            "SHARED_BYTES": self.score_ring_bytes,
        }

    @cached_property
    def score_heads(self) -> int:
        """KV heads that one block of the scorer takes: the largest divisor of H up to 8 that leaves room for two stages."""
        fitting = (self.shared_bytes - RESERVED_SHARED_BYTES) // (2 * self._score_stage_bytes(1))
        return max(n for n in range(1, min(SCORE_WARPS, fitting) + 1) if self.shape.kv_heads % n == 0)

    @cached_property
    def score_subs(self) -> int:
        """Warps per head, at most one for each stage of the ring (score.cu).

        Groups over 4 heads and ranks below 8 need more arithmetic a byte; over 8 heads, or wide ones, the registers of 8 warps.
        """
        much = self.shape.group > 4 or self.shape.rank < 8
        twice = much and self.shape.group <= 8 and self.shape.head_dim <= 128
        return min(SCORE_WARPS * (2 if twice else 1) // self.score_heads, self.score_stages)

    @cached_property
    def append_warps(self) -> int:
        """Warps of a scorer's block that append: none for larger pages, which would take more registers than it has, nor for
        more tokens than warps, as a launch of its own then finishes pages sooner."""
        fits = self.shape.page_size == 16 and self.shape.head_dim <= 128
        blocks = self.score_blocks * (self.shape.kv_heads // self.score_heads)
        return APPEND_WARPS if fits and self.batch * self.shape.kv_heads <= APPEND_WARPS * blocks else 0

    @property
    def score_threads(self) -> int:
        return 32 * (self.score_heads * self.score_subs + 1 + self.append_warps)

    @cached_property
    def score_stages(self) -> int:
        """Groups of pages in the scorer's ring: what leaves SCORE_LEAVES_BYTES free, but two in any case."""
        return max((self.shared_bytes - SCORE_LEAVES_BYTES) // self._score_stage_bytes(self.score_heads), 2)

    @cached_property
    def score_ring_bytes(self) -> int:
        return self.score_stages * self._score_stage_bytes(self.score_heads)

    def _score_stage_bytes(self, heads: int) -> int:
        return GROUP_PAGES * heads * RecordLayout.of(self.shape).record_bytes

    @cached_property
    def score_blocks(self) -> int:
        groups = self.batch * -(-self.max_pages // GROUP_PAGES)
        return max(1, min(self.sm_count // (self.shape.kv_heads // self.score_heads), groups))

    def unsupported(self, largest: int) -> str | None:
        """Why a device with clusters of `largest` blocks cannot run these launches; None if it can."""
        if self.batch > MAX_SEQUENCES:
            return f"{self.batch} sequences in a batch; at most {MAX_SEQUENCES}"
        attend_bytes = self.attend_shared_bytes(1) + self._attend_static_bytes
        if attend_bytes > self.shared_bytes:
            return (
                f"attention with head_dim {self.shape.head_dim} and {self.shape.group} query heads a KV head needs "
                f"{attend_bytes} bytes of shared memory a block, the device has {self.shared_bytes}"
            )
        if not self._slice_fits(largest):
            return (
                f"block tables of {self.max_pages} pages are too wide for the selection's shared memory, "
                f"{self.shared_bytes} bytes in each of {largest} blocks; use larger pages"
            )
        return None

    @cached_property
    def step_macros(self) -> dict[str, object]:
        return {
            **self.macros,
            "HEADS": 1,
            "UNROLL": 4,
            "CLUSTER": STEP_CLUSTER,
            "SELECT_THREADS": 32 * STEP_WARPS,
        }

    @property
    def step_capacity(self) -> int:
        """Pages of a sequence that a step in one launch has room for."""
        return -(-self.max_pages // 128) * 128

    @property
    def step_shared_bytes(self) -> int:
        group, width = self.shape.group, self.shape.head_dim
        tile, records = 4 * 16 * width, GROUP_PAGES * RecordLayout.of(self.shape).record_bytes
        warp = max(tile, records, 4 * group * width)
        return STEP_WARPS * warp + 4 * (group + 1) * self.step_capacity

    @property
    def step_static_bytes(self) -> int:
        """At most: the search; what the cluster's warps and the block's leave; outputs, maxima and sums received; lists."""
        group = self.shape.group
        sums = 8 * group * (STEP_WARPS * (STEP_CLUSTER + 1) + STEP_CLUSTER + 2)
        return STEP_SEARCH_BYTES + sums + 4 * group * self.shape.head_dim + 2048

    @property
    def whole_step(self) -> bool:
        """Whether a step can be one launch (step.cu), where the `step_clusters` of two steps run at once."""
        return (
            self.shape.page_size == 16
            and self.shape.head_dim <= 128
            and self.shape.group <= 4  # with more, scoring takes so much arithmetic that it wants all multiprocessors
            and self.max_pages <= STEP_PAGES
            and self.table_pages <= STEP_TILES * STEP_CLUSTER * STEP_WARPS
            and self.step_shared_bytes + self.step_static_bytes <= self.shared_bytes
        )

    @property
    def step_clusters(self) -> int:
        """One for each KV head of a sequence, and one that appends."""
        return self.batch * (self.shape.kv_heads + 1)

    def slice_capacity(self, blocks: int) -> int:
        """Pages that a block of the selection has room for: whole warps of four keys a lane."""
        return -(-(-(-self.max_pages // blocks) + 4) // 128) * 128

    def select_macros(self, blocks: int) -> dict[str, object]:
        return {**self.macros, "CLUSTER": blocks, "SELECT_THREADS": SELECT_THREADS}

    def select_shared_bytes(self, blocks: int) -> int:
        return SELECT_HISTOGRAM_BYTES + 4 * self.slice_capacity(blocks)

    def _slice_fits(self, blocks: int) -> bool:
        return self.select_shared_bytes(blocks) + SELECT_STATIC_BYTES <= self.shared_bytes

    def select_cluster(self, largest: int) -> int:
        """Blocks per (sequence, KV head): up to two per SM while slices are long, more while a slice does not fit.

        More than 8 only where half of the SMs are enough: at 1M tokens 8 blocks for each of 8 heads are 1 us faster than 16,
        16 for each of 4 heads 1 us faster than 8.
        """
        units, blocks = self.batch * self.shape.kv_heads, 1
        if 2 * largest * units > self.sm_count and self._slice_fits(PORTABLE_CLUSTER):
            largest = min(largest, PORTABLE_CLUSTER)
        while blocks < largest and (
            not self._slice_fits(blocks) or (blocks * units <= self.sm_count and self.max_pages >= 2 * blocks * SLICE_PAGES)
        ):
            blocks *= 2
        return blocks

    def attend_cluster(self, largest: int) -> int:
        """Blocks per (sequence, KV head): more while SMs are free and every warp still has a tile of 16 tokens."""
        units, blocks = self.batch * self.shape.kv_heads * self.attend_parts, 1
        tiles = self.table_pages * self.shape.page_size // 16
        while blocks < largest and 2 * blocks * units <= self.sm_count and tiles >= 2 * blocks * ATTEND_WARPS:
            blocks *= 2
        return blocks

    def attend_stages(self, blocks: int) -> int:
        """Tiles in a warp's ring: no more than it has, and what fits beside the merge buffers."""
        tiles = -(-self.table_pages * self.shape.page_size // (16 * blocks * ATTEND_WARPS))
        fits = (self.shared_bytes - self._attend_static_bytes) // (ATTEND_WARPS * self._attend_tile_bytes)
        return max(1, min(ATTEND_RING, tiles, fits))

    @property
    def _attend_tile_bytes(self) -> int:
        return 16 * 2 * (self.shape.head_dim + min(self.shape.head_dim, 128))

    @property
    def _attend_static_bytes(self) -> int:
        """At most: weights of the warps; outputs, maxima and sums received from a cluster."""
        return self.shape.group * (8 * ATTEND_WARPS + 4 * min(self.shape.head_dim, 128) + 8 * LARGEST_CLUSTER)

    def attend_shared_bytes(self, stages: int) -> int:
        partial_outputs = 4 * self.shape.group * min(self.shape.head_dim, 128)
        return ATTEND_WARPS * max(stages * self._attend_tile_bytes, partial_outputs)

    @property
    def build_warps(self) -> int:
        """Warps per block of the builder; two pages of 64 tokens fill its shared memory."""
        return 2 if self.shape.page_size == 64 else 4

    @property
    def attend_parts(self) -> int:
        """Blocks that share an output row, 128 channels each."""
        return max(1, self.shape.head_dim // 128)
