"""The method author's own kernels (`locks-kv` on PyPI): score, select and attend as its vLLM plug-in launches them.

Favourable to it, and said in every row (`resolved`): its step neither appends the new token nor summarises a new page, which
the engine does outside of what it captures, and its per-step parameter launch, shared by all layers, is not timed.  Its
cache is ours, read through strides: no copy.  Its summaries are its own, built from our keys by its own code in `prepare`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, ClassVar

import torch

from harness.backend import Backend, Check, Launch, UnsupportedWorkload
from harness.backends import locks_kv_package
from harness.backends.locks_kv_package import Package, summary_fields
from harness.case import Case
from harness.libraries import LOCKS_KV
from harness.memory import local_shape
from harness.verify_selection import check_summaries, check_tables, checked_sequences
from harness.workload import Workload
from locks_kernels import reference
from locks_kernels.cache import PagedCache
from locks_kernels.cost import locks_bytes, locks_stage_bytes
from locks_kernels.shapes import DecodeShape
from locks_kernels.summary import RecordLayout, pack

MAX_GROUP = 8
MAX_SPLITS = 128  # of attention, as its plug-in allocates
BUILD_PAGES = 2048  # pages summarised at once: its temporaries stay under a gigabyte
RECORD_PAGES = 8192  # pages converted at once for a check
# Its scorer rounds each query to int8, the reference rounds none: with this suite's contents that lets a page up to 0.04 nats
# below the threshold in at 128K x 1 and 0.11 at 128K x 16 (an H200); more draws reach further into that tail.
SCORE_TOLERANCE = 0.20
SPLIT_CTAS = (4, 5, 6, 8, 10, 12, 16, 24, 32)  # CTAs per SM that the tuned scorer tries
SPLIT_SAMPLES = 5
INDEX_LIMIT = 1 << 31
TAG_BYTES = 16  # of a page and KV head, beside its summary: the start of its last key


class CacheView:
    """Keys and values as its attention takes a vLLM cache of shape [2, pages, PAGE, H, D]: two views, no copy."""

    def __init__(self, cache: PagedCache) -> None:
        self._halves = (cache.keys.transpose(1, 2), cache.values.transpose(1, 2))
        self.shape = (2, *self._halves[0].shape)

    def __getitem__(self, half: int) -> torch.Tensor:
        return self._halves[half]


class LocksKv(Backend):
    """What both flag sets share."""

    flag_set: ClassVar[str]
    flags: ClassVar[Mapping[str, str]] = {}
    tuned: ClassVar[bool] = False  # whether the scorer's split is chosen by measuring instead of by its own rule

    def __init__(self) -> None:
        self._package: Package | None = None
        self._state: Any = None
        self._steps: list[dict[str, Callable[[], object]]] = []

    def unavailable(self) -> str | None:
        return locks_kv_package.unavailable()

    def version(self) -> str | None:
        return LOCKS_KV.version()

    def supports(self, case: Case) -> str | None:
        if case.device != "cuda":
            return "runs on NVIDIA GPUs only; use --device cuda"
        if torch.cuda.get_device_capability()[0] != 9:
            return "locks-kv's kernels are written for compute capability 9.0 (H100, H200); this GPU is another one"
        return self.unsupported(local_shape(case))

    def unsupported(self, shape: DecodeShape) -> str | None:
        """Why its kernels refuse a geometry, or None."""
        if shape.group > MAX_GROUP:
            return f"locks-kv refuses more than {MAX_GROUP} query heads per KV head, this is {shape.group}"
        if shape.dtype != "bfloat16":
            return "locks-kv scores bfloat16 queries only; use --dtype bfloat16"
        if shape.page_size not in (16, 32):
            return "locks-kv's scorer takes pages of 16 or 32 tokens; use --page-size 16"
        if shape.rank != 8:
            return "this backend builds locks-kv for rank 8, its default; use --rank 8"
        return None

    def side_bytes(self, case: Case) -> int:
        shape = local_shape(case)
        return shape.kv_heads * (RecordLayout.of(shape).payload_bytes + TAG_BYTES)

    def prepare(self, workload: Workload, copy: int) -> Launch:
        if copy == 0:
            self._set_up(workload)
        cache = workload.caches[copy]
        stride = cache.keys.stride(1)
        if stride < INDEX_LIMIT <= stride * (workload.shape.kv_heads - 1):
            raise UnsupportedWorkload(
                "locks-kv's attention computes the offset of a head in 32 bits and this pool is larger; "
                "use a smaller --batch or --kv pooled"
            )
        out = torch.empty_like(workload.queries[copy])
        step = self._stages(workload, copy, out)
        self._steps.append(step)
        for part in step.values():  # allocates its lazy workspace
            part()
        if copy == workload.plan.launches - 1 and self.tuned:
            self._choose_split(workload)
        parts = tuple(step.values())

        def launch() -> torch.Tensor:
            for part in parts:
                part()
            return out

        return launch

    def _set_up(self, workload: Workload) -> None:
        """Compile, allocate its state for all layers, and let it summarise every complete page of them."""
        case, shape, plan = workload.case, workload.shape, workload.plan
        table, options = workload.sequences.block_table, case.select
        package = self._package = locks_kv_package.load(self.flag_set, self.flags)
        package.compile()
        lengths = torch.full((case.batch,), case.ctx, dtype=torch.int32, device=workload.device)
        with package.active():
            state = package.state.Rki4State(
                workload.device,
                num_layers=plan.copies,
                num_blocks=plan.pool_pages,
                n_kv=shape.kv_heads,
                G=shape.group,
                head_dim=shape.head_dim,
                page=shape.page_size,
                max_reqs=case.batch,
                max_pages=table.shape[1],
                # its budget counts neither the sinks nor the window
                budget_pages=options.kept_pages(shape.page_size) - options.sink_pages - options.recent_pages,
                sink_pages=options.sink_pages,
                window_pages=options.recent_pages,
            )
            state.D = state.d  # as its metadata builder does before it allocates for attention
            package.attend.ensure_stage_b_buffers(state, workload.device, MAX_SPLITS)
            keys = [CacheView(cache)[0] for cache in workload.caches[: plan.copies]]
            package.build.rki4_build_bulk(
                state, keys, table, lengths, case.batch, case.ctx // shape.page_size, chunk_pairs=BUILD_PAGES
            )
            package.parameters.derive_page_params(state, lengths, case.batch)
        self._state = state

    def _stages(self, workload: Workload, copy: int, out: torch.Tensor) -> dict[str, Callable[[], object]]:
        package, state, batch = self._package, self._state, workload.case.batch
        assert package
        layer, query, scale = copy % workload.plan.copies, workload.queries[copy], workload.shape.softmax_scale
        table, lengths = workload.sequences.block_table, workload.sequences.seq_lens
        cache = CacheView(workload.caches[copy])
        values = package.attend.ResidentVSource(cache)

        def score() -> None:
            with package.active():
                package.score.rki4_score_only(state, layer, query, table, lengths, batch, scale)

        def select() -> None:
            with package.active():
                package.score.rki4_select_only(state, batch)

        def attend() -> torch.Tensor:
            with package.active():
                package.attend.sparse_paged_decode_batched(query, cache, table, lengths, state, out, values, scale=scale)
            return out

        return {"score": score, "select": select, "attend": attend}

    def _choose_split(self, workload: Workload) -> None:
        """Keep the scorer's grid split that is fastest over all layers; the result does not depend on it."""
        state, units = self._state, workload.case.batch * workload.shape.kv_heads
        sm_count = torch.cuda.get_device_properties(workload.device).multi_processor_count
        most = max(1, state.max_pages // 8)
        splits = dict.fromkeys(min(-(-ctas * sm_count // units), most) for ctas in SPLIT_CTAS)

        def time_ms(split: int) -> float:
            state.zsplit = split
            times = []
            for _ in range(SPLIT_SAMPLES):
                start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
                start.record()
                for step in self._steps:
                    step["score"]()
                end.record()
                end.synchronize()
                times.append(start.elapsed_time(end))
            return min(times)

        state.zsplit = min(splits, key=time_ms)

    def _tables(self, workload: Workload) -> torch.Tensor:
        """int32 [B, H, K], -1 behind the last kept page: what `select` wrote last."""
        state, batch = self._state, workload.case.batch
        kept = min(workload.case.select.kept_pages(workload.shape.page_size), state.max_pages)
        columns = torch.arange(kept, device=workload.device)
        return state.page_table[:batch, :, :kept].masked_fill(columns >= state.page_cnt[:batch, :, None], -1)

    def expected(self, workload: Workload, copy: int) -> torch.Tensor:
        """Exact attention over the pages that it kept; whether they are the right ones is `check`."""
        rows = workload.checked
        query = workload.queries[copy][rows].float()
        return reference.attend(query, workload.caches[copy], checked_sequences(workload), self._tables(workload)[rows])[0]

    def check(self, workload: Workload, copy: int) -> list[Check]:
        """Its summaries against the keys, its ranking against the reference on these summaries and with its combine."""
        case, state = workload.case, self._state
        kept = min(case.select.kept_pages(case.page_size), workload.shape.pages(case.ctx))
        counts = state.page_cnt[: case.batch].unique().tolist()
        workload = replace(workload, caches=[self._converted(workload, copy)] * len(workload.caches))
        options = replace(case.select, combine="peak")
        return [
            Check("kept_pages", counts == [kept], counts),
            *check_tables(workload, copy, self._tables(workload), options, SCORE_TOLERANCE),
            check_summaries(workload, copy),
        ]

    def _converted(self, workload: Workload, copy: int) -> PagedCache:
        """The cache of `copy` with its summaries of the checked sequences in our layout."""
        cache, slabs = workload.caches[copy], self._state.layer_state(copy % workload.plan.copies)
        summaries = torch.zeros_like(cache.summaries)
        complete = workload.case.ctx // workload.shape.page_size
        pages = workload.sequences.block_table[workload.checked, :complete].unique().long()
        for ids in pages.split(RECORD_PAGES):
            summaries[ids] = pack(summary_fields(slabs, ids))
        return PagedCache(cache.shape, cache.keys, cache.values, summaries)

    def stages(self, workload: Workload, copy: int) -> dict[str, Callable[[], object]]:
        return self._steps[copy]

    def stage_bytes(self, case: Case) -> dict[str, int]:
        return locks_stage_bytes(local_shape(case), case.select, case.ctx, case.batch)

    def bytes(self, case: Case) -> dict[str, int]:
        return locks_bytes(local_shape(case), case.select, case.ctx, case.batch)

    def resolved(self) -> dict[str, Any]:
        state = self._state
        return {
            "kernels": f"locks-kv {self.flag_set}",
            "flags": dict(self.flags),
            "combine": "peak",
            "score_split": state.zsplit or "automatic",
            "attention_split": state.split,
            "summary_bytes": state.bytes_per_layer() * state.L,
            "not_in_step": "append, summary of a new page",
        }


class LocksKvDefault(LocksKv):
    """What a user of pip gets."""

    name = "locks-kv[default]"
    flag_set = "default"


class LocksKvBest(LocksKv):
    """The fastest of its undocumented flag sets that give right results: tensor cores in the scorer for all groups, one record
    per page instead of six arrays, and a tuned split of the scorer's grid."""

    name = "locks-kv[best]"
    flag_set = "best"
    flags: ClassVar[Mapping[str, str]] = {"RKI4_MMA": "1", "RKI4_MMA_AOS": "1", "RKI4_MMA_ALLG": "1"}
    tuned = True

    def unsupported(self, shape: DecodeShape) -> str | None:
        if shape.group not in (4, 8) or shape.head_dim != 128 or shape.page_size != 16:
            return "locks-kv's fastest kernels take groups of 4 or 8, head_dim 128 and pages of 16 only; use locks-kv[default]"
        return super().unsupported(shape)
