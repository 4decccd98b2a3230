"""The CUDA stages behind `LocksDecoder`: workspace and launches (launch.py has their shapes, a .cu file what a kernel does)."""

from __future__ import annotations

import torch

from locks_kernels.cache import PagedCache, Sequences
from locks_kernels.cuda.inputs import check_cache, check_tensor, check_token
from locks_kernels.cuda.launch import (
    ATTEND_WARPS,
    FINALISE_WARPS,
    GROUP_PAGES,
    LARGEST_CLUSTER,
    PORTABLE_CLUSTER,
    SELECT_THREADS,
    STEP_CLUSTER,
    STEP_WARPS,
    Launch,
)
from locks_kernels.cuda.program import Kernel, unavailable
from locks_kernels.decode import AppendScore, Stages, WholeStep
from locks_kernels.shapes import DecodeShape, SelectOptions


def plan_on(device: torch.device, shape: DecodeShape, batch: int, max_pages: int, table_pages: int) -> Launch:
    properties = torch.cuda.get_device_properties(device)
    shared_bytes = properties.shared_memory_per_block_optin  # type: ignore[attr-defined]
    return Launch(shape, batch, max_pages, table_pages, properties.multi_processor_count, shared_bytes)


# `Ready` of score.cu: what no kernel that may still run writes when the scorer starts.
NOTHING, ALL_BUT_TOKEN, ALL = range(3)
NULL = (0,)  # for a tensor that a kernel does without


class CudaStages:
    """Stages (decode.py) in CUDA C++.  All launches are asynchronous and capturable.

    `score` and what follows may start while `append_finalise` still runs: in a stream they belong behind one another.
    """

    tables: torch.Tensor

    def __init__(self, cache: PagedCache, sequences: Sequences, options: SelectOptions, share: Stages | None = None) -> None:
        check_cache(cache, sequences)
        self.cache, self.sequences, self.options = cache, sequences, options
        shape, device = cache.shape, cache.keys.device
        table_pages = options.table_pages(shape.page_size)
        if isinstance(share, CudaStages) and share._fits(cache, sequences, options):
            own = {"cache": cache, "sequences": sequences, "tables": torch.full_like(share.tables, -1)}
            self.__dict__.update({**share.__dict__, **own})
            return
        self.plan = plan = plan_on(device, shape, sequences.batch, sequences.max_pages, table_pages)
        heads = (sequences.batch, shape.query_heads)
        stride = -(-sequences.max_pages // GROUP_PAGES) * GROUP_PAGES
        self.scores = torch.empty(*heads, stride, dtype=torch.float32, device=device)
        self.partials = torch.empty(*heads, plan.score_blocks * plan.score_subs, 4, dtype=torch.float32, device=device)
        self.grabs = torch.zeros(shape.kv_heads // plan.score_heads, dtype=torch.int32, device=device)
        self.tables = torch.full((sequences.batch, shape.kv_heads, table_pages), -1, dtype=torch.int32, device=device)
        self.lse = torch.empty(*heads, dtype=torch.float32, device=device)
        self._make_kernels(device)

    def _fits(self, cache: PagedCache, sequences: Sequences, options: SelectOptions) -> bool:
        own = self.cache.shape, self.sequences.block_table.shape, self.options, self.cache.keys.device
        return own == (cache.shape, sequences.block_table.shape, options, cache.keys.device)

    def _make_kernels(self, device: torch.device) -> None:
        plan, shape = self.plan, self.cache.shape
        heads = plan.batch * shape.kv_heads
        self.score_kernel = Kernel("score", "score", plan.score_macros, device, plan.score_threads, plan.score_ring_bytes)
        for largest in (LARGEST_CLUSTER, PORTABLE_CLUSTER) if self.score_kernel.overlaps else (1,):
            self.select_blocks = blocks = plan.select_cluster(largest)
            self.slice_capacity = plan.slice_capacity(blocks)
            shared_bytes = plan.select_shared_bytes(blocks)
            self.select_kernel = Kernel(
                "select", "select_pages", plan.select_macros(blocks), device, SELECT_THREADS, shared_bytes
            )
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
        self.append_kernel = Kernel("build", "append_finalise", plan.macros, device, 32 * FINALISE_WARPS)
        self.finalise_kernel = Kernel("build", "finalise_slots", plan.macros, device, 32 * FINALISE_WARPS)
        self.step_kernel: Kernel | None = None
        if self.score_kernel.overlaps and plan.whole_step:
            threads, shared_bytes = 32 * STEP_WARPS, plan.step_shared_bytes
            kernel = Kernel("step", "whole_step", plan.step_macros, device, threads, shared_bytes)
            self.step_kernel = kernel if kernel.runs_at_once(STEP_CLUSTER, 2 * plan.step_clusters) else None

    @staticmethod
    def unsupported(cache: PagedCache, sequences: Sequences | None = None) -> str | None:
        device = cache.keys.device
        if reason := unavailable(device, (8, 0), "int8 tensor cores, asynchronous copies"):
            return reason
        batch, max_pages = (sequences.batch, sequences.max_pages) if sequences else (1, 1)
        plan = plan_on(device, cache.shape, batch, max_pages, table_pages=1)
        return plan.unsupported(PORTABLE_CLUSTER if torch.cuda.get_device_capability(device) >= (9, 0) else 1)

    def _check_token(self, **tensors: torch.Tensor) -> None:
        check_token(self.cache, self.sequences.batch, **tensors)

    @property
    def _strides(self) -> tuple[tuple[int], tuple[int], tuple[int]]:
        page, head, token, _ = self.cache.keys.stride()
        return (page,), (head,), (token,)

    @property
    def _summary_stride(self) -> tuple[int]:
        return (self.cache.summaries.stride(0),)

    def build(self, page_ids: torch.Tensor) -> None:
        if len(page_ids) == 0:
            return
        cache = self.cache
        units_per_block = self.plan.build_warps * 64 // cache.shape.page_size  # a page of one KV head is a unit
        blocks = min(-(-len(page_ids) * cache.shape.kv_heads // units_per_block), 1 << 20)
        count = (len(page_ids),)
        strides = (self._summary_stride, *self._strides)
        arguments = (cache.keys, page_ids.long().contiguous(), cache.summaries, count, cache.shape.kv_heads, *strides)
        self.build_kernel.launch((blocks, 1, 1), arguments)

    def finalise_slots(self, slots: torch.Tensor) -> None:
        cache = self.cache
        check_tensor("slots", slots, (len(slots),), torch.int64, cache.keys.device)
        units = len(slots) * cache.shape.kv_heads
        if units == 0:
            return
        strides = (self._summary_stride, *self._strides)
        arguments = (cache.keys, slots, cache.summaries, (len(slots),), cache.shape.kv_heads, *strides)
        self.finalise_kernel.launch((-(-units // FINALISE_WARPS), 1, 1), arguments)

    def append_finalise(self, keys: torch.Tensor, values: torch.Tensor) -> None:
        self._check_token(keys=keys, values=values)
        cache, sequences = self.cache, self.sequences
        batch, kv_heads = sequences.batch, cache.shape.kv_heads
        self.append_kernel.launch(
            (-(-batch * kv_heads // FINALISE_WARPS), 1, 1),
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
                self._summary_stride,
                keys.stride(0),
                values.stride(0),
                *self._strides,
            ),
        )

    @property
    def whole_step(self) -> WholeStep | None:
        return self._whole_step if self.step_kernel else None

    def _whole_step(
        self, query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, out: torch.Tensor, starts_early: bool
    ) -> None:
        assert self.step_kernel is not None
        self._check_token(query=query, keys=keys, values=values, out=out)
        cache, sequences, options, plan = self.cache, self.sequences, self.options, self.plan
        self.step_kernel.launch(
            (STEP_CLUSTER, cache.shape.kv_heads + 1, sequences.batch),
            (
                cache.summaries,
                query,
                sequences.block_table,
                sequences.seq_lens,
                self.tables,
                out,
                self.lse,
                cache.shape.kv_heads,
                sequences.max_pages,
                plan.step_capacity,
                options.kept_pages(cache.shape.page_size),
                plan.table_pages,
                options.sink_pages,
                options.recent_pages,
                int(options.combine == "share"),
                int(starts_early),
                self._summary_stride,
                (query.stride(0),),
                cache.keys,
                cache.values,
                keys,
                values,
                keys.stride(0),
                values.stride(0),
                *self._strides,
            ),
            cluster=STEP_CLUSTER,
        )

    def score(self, query: torch.Tensor, summaries_ready: bool = True) -> None:
        self._check_token(query=query)
        self._score(query, ALL if summaries_ready else NOTHING, (NULL, NULL, NULL, 0, 0))

    @property
    def append_score(self) -> AppendScore | None:
        return self._append_score if self.plan.append_warps else None

    def _append_score(
        self,
        query: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
        starts_early: bool,
        slots: torch.Tensor | None = None,
    ) -> None:
        self._check_token(query=query, keys=keys, values=values)
        if slots is not None:
            check_tensor("slots", slots, (self.sequences.batch,), torch.int64, self.cache.keys.device)
        new_token = keys, values, NULL if slots is None else slots, keys.stride(0), values.stride(0)
        self._score(query, ALL_BUT_TOKEN if starts_early else NOTHING, new_token)

    def _score(self, query: torch.Tensor, ready: int, new_token: tuple[torch.Tensor | tuple[int] | int, ...]) -> None:
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
                self.grabs,
                sequences.batch,
                kv_heads,
                sequences.max_pages,
                self.scores.shape[-1],
                self.options.recent_pages,
                ready,
                self._summary_stride,
                (query.stride(0),),
                cache.keys,
                cache.values,
                *new_token,
                *self._strides,
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
                options.kept_pages(cache.shape.page_size),
                plan.table_pages,
                options.sink_pages,
                options.recent_pages,
                int(options.combine == "share"),
                self.slice_capacity,
            ),
            cluster=self.select_blocks,
        )

    def attend(self, query: torch.Tensor, out: torch.Tensor) -> None:
        self._check_token(query=query, out=out)
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
                plan.table_pages,
                (query.stride(0),),
                *self._strides,
            ),
            cluster=self.attend_blocks,
        )
