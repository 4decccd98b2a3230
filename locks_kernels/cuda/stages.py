"""The CUDA stages behind `LocksDecoder`: workspace, launch shapes, launches.  What a kernel does is told in its .cu file."""

from __future__ import annotations

import importlib.util
from dataclasses import dataclass
from functools import cached_property

import torch

from locks_kernels.cache import PagedCache, Sequences
from locks_kernels.cuda.program import Kernel
from locks_kernels.decode import Stages
from locks_kernels.shapes import DecodeShape, SelectOptions
from locks_kernels.summary import RecordLayout

PORTABLE_CLUSTER, LARGEST_CLUSTER = 8, 16
GROUP_PAGES = 8  # pages that a warp of the scorer takes at a time
SCORE_WARPS = 8  # that compute, and KV heads per block at most
RESERVED_SHARED_BYTES = 4096  # static shared memory and what the driver keeps for itself
SCORE_LEAVES_BYTES = 65536  # of an SM's shared memory, for the selection's block to be there when the last score is written
SELECT_THREADS, SELECT_STATIC_BYTES, SELECT_HISTOGRAM_BYTES = 512, 20480, 16384
SLICE_PAGES = 2048  # pages below which another block of the selection's cluster does not pay
APPEND_WARPS = 2
ATTEND_WARPS, ATTEND_RING, ATTEND_STATIC_BYTES = 8, 3, 16384


@dataclass(frozen=True)
class Launch:
    """Launch shapes of one cache, from its shape, the batch and the device alone."""

    shape: DecodeShape
    batch: int
    max_pages: int
    kept: int
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
            "SHARED_BYTES": self.score_ring_bytes,
        }

    @cached_property
    def score_heads(self) -> int:
        """KV heads that one block of the scorer takes: the largest divisor of H up to 8."""
        return max(n for n in range(1, SCORE_WARPS + 1) if self.shape.kv_heads % n == 0)

    @cached_property
    def score_subs(self) -> int:
        """Warps per head.  Groups over 4 heads need more arithmetic a page; over 8, or wide heads, the registers of 8 warps."""
        twice = 4 < self.shape.group <= 8 and self.shape.head_dim <= 128
        return SCORE_WARPS * (2 if twice else 1) // self.score_heads

    @cached_property
    def score_ring_bytes(self) -> int:
        stage = GROUP_PAGES * self.score_heads * RecordLayout.of(self.shape).record_bytes
        fits, spares = (
            bytes // stage for bytes in (self.shared_bytes - RESERVED_SHARED_BYTES, self.shared_bytes - SCORE_LEAVES_BYTES)
        )
        return max(spares, min(fits, 2)) * stage

    @cached_property
    def score_blocks(self) -> int:
        groups = self.batch * -(-self.max_pages // GROUP_PAGES)
        return max(1, min(self.sm_count // (self.shape.kv_heads // self.score_heads), groups))

    def select_cluster(self, largest: int) -> int:
        """Blocks per (sequence, KV head): up to two per SM while slices are long, more while a slice does not fit."""
        units, blocks = self.batch * self.shape.kv_heads, 1
        capacity = (self.shared_bytes - SELECT_STATIC_BYTES - SELECT_HISTOGRAM_BYTES) // 4 - 256
        while blocks < largest and (
            -(-self.max_pages // blocks) > capacity
            or (blocks * units <= self.sm_count and self.max_pages >= 2 * blocks * SLICE_PAGES)
        ):
            blocks *= 2
        return blocks

    def attend_cluster(self, largest: int) -> int:
        """Blocks per (sequence, KV head): more while SMs are free and every warp still has a tile of 16 tokens."""
        units, blocks = self.batch * self.shape.kv_heads * self.attend_parts, 1
        tiles = self.kept * self.shape.page_size // 16
        while blocks < largest and 2 * blocks * units <= self.sm_count and tiles >= 2 * blocks * ATTEND_WARPS:
            blocks *= 2
        return blocks

    def attend_stages(self, blocks: int) -> int:
        """Tiles in a warp's ring: no more than it has, and what fits beside the merge buffers."""
        tiles = -(-self.kept * self.shape.page_size // (16 * blocks * ATTEND_WARPS))
        fits = (self.shared_bytes - ATTEND_STATIC_BYTES) // (ATTEND_WARPS * self._attend_tile_bytes)
        return max(1, min(ATTEND_RING, tiles, fits))

    @property
    def _attend_tile_bytes(self) -> int:
        return 16 * 2 * (self.shape.head_dim + min(self.shape.head_dim, 128))

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


class CudaStages:
    """Stages (decode.py) in CUDA C++.  All launches are asynchronous and capturable.

    `score` and what follows may start while `append_finalise` still runs: in a stream they belong behind one another.
    """

    tables: torch.Tensor

    def __init__(self, cache: PagedCache, sequences: Sequences, options: SelectOptions, share: Stages | None = None) -> None:
        self.cache, self.sequences, self.options = cache, sequences, options
        shape, device = cache.shape, cache.keys.device
        kept = options.kept_pages(shape.page_size)
        if isinstance(share, CudaStages) and share._fits(cache, sequences, options):
            own = {"cache": cache, "sequences": sequences, "tables": torch.full_like(share.tables, -1)}
            self.__dict__.update({**share.__dict__, **own})
            return
        properties = torch.cuda.get_device_properties(device)
        plan = Launch(
            shape,
            sequences.batch,
            sequences.max_pages,
            kept,
            properties.multi_processor_count,
            properties.shared_memory_per_block_optin,  # type: ignore[attr-defined]
        )
        self.plan = plan
        heads = (sequences.batch, shape.query_heads)
        stride = -(-sequences.max_pages // GROUP_PAGES) * GROUP_PAGES
        self.scores = torch.empty(*heads, stride, dtype=torch.float32, device=device)
        self.partials = torch.empty(*heads, plan.score_blocks * plan.score_subs, 2, dtype=torch.float32, device=device)
        self.tables = torch.full((sequences.batch, shape.kv_heads, kept), -1, dtype=torch.int32, device=device)
        self.lse = torch.empty(*heads, dtype=torch.float32, device=device)
        self._make_kernels(device)

    def _fits(self, cache: PagedCache, sequences: Sequences, options: SelectOptions) -> bool:
        return (self.cache.shape, self.sequences.block_table.shape, self.options, self.cache.keys.device) == (
            cache.shape,
            sequences.block_table.shape,
            options,
            cache.keys.device,
        )

    def _make_kernels(self, device: torch.device) -> None:
        plan, shape = self.plan, self.cache.shape
        heads = plan.batch * shape.kv_heads
        threads = 32 * (plan.score_heads * plan.score_subs + 1)
        self.score_kernel = Kernel("score", "score", plan.score_macros, device, threads, plan.score_ring_bytes)
        for largest in (LARGEST_CLUSTER, PORTABLE_CLUSTER) if self.score_kernel.overlaps else (1,):
            self.select_blocks = blocks = plan.select_cluster(largest)
            self.slice_capacity = -(-(-(-plan.max_pages // blocks) + 4) // 128) * 128  # whole warps of four keys a lane
            macros = {**plan.macros, "CLUSTER": blocks}
            shared_bytes = SELECT_HISTOGRAM_BYTES + 4 * self.slice_capacity
            self.select_kernel = Kernel("select", "select_pages", macros, device, SELECT_THREADS, shared_bytes)
            if blocks <= PORTABLE_CLUSTER or self.select_kernel.runs_at_once(blocks, heads):
                break
        for largest in (LARGEST_CLUSTER, PORTABLE_CLUSTER) if self.score_kernel.overlaps else (1,):
            self.attend_blocks = blocks = plan.attend_cluster(largest)
            stages = plan.attend_stages(blocks)
            macros = {**plan.macros, "CLUSTER": blocks, "STAGES": stages}
            shared_bytes = plan.attend_shared_bytes(stages)
            self.attend_kernel = Kernel("attend", "attend", macros, device, 32 * ATTEND_WARPS, shared_bytes)
            if blocks <= PORTABLE_CLUSTER or self.attend_kernel.runs_at_once(blocks, heads * plan.attend_parts):
                break
        build_threads = 32 * plan.build_warps
        self.build_kernel = Kernel("build", "build", plan.macros, device, build_threads, in_step=False)
        self.append_kernel = Kernel("build", "append_finalise", plan.macros, device, 32 * APPEND_WARPS)

    @staticmethod
    def unsupported(cache: PagedCache) -> str | None:
        if cache.keys.device.type != "cuda":
            return "needs a CUDA device"
        if torch.cuda.get_device_capability(cache.keys.device) < (8, 0):
            return "needs compute capability 8.0 or newer (int8 tensor cores, asynchronous copies)"
        if importlib.util.find_spec("cuda") is None or importlib.util.find_spec("cuda.core") is None:
            return "needs cuda-core: pip install 'locks-bench[cuda]'"
        return None

    @property
    def _strides(self) -> tuple[tuple[int], tuple[int], tuple[int]]:
        page, head, token, _ = self.cache.keys.stride()
        return (page,), (head,), (token,)

    def build(self, page_ids: torch.Tensor) -> None:
        if len(page_ids) == 0:
            return
        cache = self.cache
        units_per_block = self.plan.build_warps * 64 // cache.shape.page_size  # a page of one KV head is a unit
        blocks = min(-(-len(page_ids) * cache.shape.kv_heads // units_per_block), 1 << 20)
        count = (len(page_ids),)
        arguments = (cache.keys, page_ids.long().contiguous(), cache.summaries, count, cache.shape.kv_heads, *self._strides)
        self.build_kernel.launch((blocks, 1, 1), arguments)

    def append_finalise(self, keys: torch.Tensor, values: torch.Tensor) -> None:
        cache, sequences = self.cache, self.sequences
        batch, kv_heads = sequences.batch, cache.shape.kv_heads
        self.append_kernel.launch(
            (-(-batch * kv_heads // APPEND_WARPS), 1, 1),
            (
                cache.keys,
                cache.values,
                keys,
                values,
                sequences.block_table,
                sequences.seq_lens,
                cache.summaries,
                batch,
                kv_heads,
                sequences.max_pages,
                *self._strides,
            ),
        )

    def score(self, query: torch.Tensor) -> None:
        cache, sequences, plan = self.cache, self.sequences, self.plan
        kv_heads = cache.shape.kv_heads
        self.score_kernel.launch(
            (plan.score_blocks, kv_heads // plan.score_heads, 1),
            (
                cache.summaries,
                query,
                sequences.block_table,
                sequences.seq_lens,
                self.scores,
                self.partials,
                sequences.batch,
                kv_heads,
                sequences.max_pages,
                self.scores.shape[-1],
                self.options.recent_pages,
            ),
        )

    def select(self) -> None:
        cache, options, plan = self.cache, self.options, self.plan
        self.select_kernel.launch(
            (self.select_blocks, cache.shape.kv_heads, self.sequences.batch),
            (
                self.scores,
                self.partials,
                self.sequences.seq_lens,
                self.tables,
                cache.shape.kv_heads,
                self.scores.shape[-1],
                plan.score_blocks,
                plan.score_subs,
                plan.kept,
                options.sink_pages,
                options.recent_pages,
                int(options.combine == "share"),
                self.slice_capacity,
            ),
            cluster=self.select_blocks,
        )

    def attend(self, query: torch.Tensor, out: torch.Tensor) -> None:
        cache, sequences, plan = self.cache, self.sequences, self.plan
        self.attend_kernel.launch(
            (self.attend_blocks, cache.shape.kv_heads * plan.attend_parts, sequences.batch),
            (
                query,
                cache.keys,
                cache.values,
                sequences.block_table,
                sequences.seq_lens,
                self.tables,
                out,
                self.lse,
                cache.shape.kv_heads,
                sequences.max_pages,
                plan.kept,
                *self._strides,
            ),
            cluster=self.attend_blocks,
        )
