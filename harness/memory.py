"""Memory before time: what fits, how many distinct copies of a layer's cache rotate, and why.  Imports torch only to ask
a GPU for its numbers.
"""

from __future__ import annotations

import math
import os
import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from harness.backend import Backend
from harness.case import Case
from harness.errors import UserError
from locks_kernels.cost import dense_bytes, locks_bytes
from locks_kernels.shapes import DecodeShape
from locks_kernels.summary import RecordLayout

GUARD_PAGES = 4  # at the end of a pool, poisoned with NaN: no kernel may read them
PRIVATE_PAGES = 2  # of each sequence of a shared pool: the ones that the cycle of new tokens writes
COLD_FACTOR = 5  # bytes read between two uses of a copy, in units of the L2 cache
ALL_LAYERS_SHARE = 0.1  # of the free memory that is spent on all layers where fewer copies would be as cold
MAX_COPIES = 256  # all copies are in one graph, whose nodes must stay few
MAX_LAUNCHES = 8  # of few large copies in one graph, so that its start-up is spread over several steps ...
MAX_REPLAY_BYTES = 40 << 30  # ... while one replay of a dense rival stays under about 10 ms
RESERVE_BYTES = {"cuda": 4 << 30, "cpu": 1 << 30}  # context, chunks of contents, expected results, rivals' workspace
HEAD_STRIDE_LIMIT = 1 << 32  # elements; paged rivals keep strides in 32 bits
POOL_SHARE = 0.95


@dataclass(frozen=True)
class DeviceMemory:
    free_bytes: int
    l2_bytes: int | None

    @classmethod
    def now(cls, device: str) -> DeviceMemory:
        """What is free at this moment; the size of a CPU's last cache level is not known."""
        if device == "cuda":
            import torch

            properties = torch.cuda.get_device_properties(torch.cuda.current_device())
            return cls(torch.cuda.mem_get_info()[0], properties.L2_cache_size)
        free = _sysconf("SC_AVPHYS_PAGES") or _sysconf("SC_PHYS_PAGES") // 2
        return cls(free * _sysconf("SC_PAGE_SIZE"), None)


@dataclass(frozen=True)
class MemoryPlan:
    """How a case's caches lie in memory.

    plan         "resident", "layers=k", "pooled" or "tp=n"
    copies       distinct pools
    launches     attention launches of one graph; launch i uses pool i % copies, with a query of its own
    pool_pages   physical pages of one pool, guard pages included
    bytes        of all pools with their summaries
    cache_state  "layers": every use of a copy is cold, also for LOCKS; "pooled"; "warm": it may find itself in L2
    swept        bytes that have to be read between two uses of the same data, or L2 may still hold it
    """

    plan: str
    copies: int
    launches: int
    tensor_parallel: int
    pool_pages: int
    bytes: int
    cache_state: str
    note: str
    swept: int = 0

    def state_of(self, distinct_bytes: int) -> str:
        """The cache state of a backend that reads so many bytes before it reads one of them again: fewer than LOCKS may be
        too few.
        """
        return "warm" if self.cache_state == "layers" and distinct_bytes <= self.swept else self.cache_state

    @property
    def pooled(self) -> bool:
        return self.plan == "pooled"

    def record(self) -> dict[str, Any]:
        """The `kv` field of a record."""
        return {name: getattr(self, name) for name in ("plan", "copies", "launches", "bytes", "note")}


@dataclass(frozen=True)
class SideMemory:
    """What the backends of a case keep beside the workload; all of them are prepared at the same time.

    page_bytes  of every physical page of a layer, all KV heads: their own summaries
    scores      fp32 scores of every page and query head, one set for each backend that scores
    """

    page_bytes: int = 0
    scores: int = 0

    @classmethod
    def of(cls, case: Case, backends: Iterable[Backend]) -> SideMemory:
        """A backend that cannot run here, or cannot be asked, counts nothing."""
        page_bytes = scores = 0
        for backend in backends:
            try:
                if backend.unavailable() is None:
                    page_bytes += backend.side_bytes(case)
                    scores += backend.writes_cache
            except Exception:  # a plug-in's own trouble; its row will tell
                continue
        return cls(page_bytes, scores)


def tensor_parallel(case: Case) -> int:
    """Ranks over which the case's heads divide; 1 unless `tp=n` was asked for."""
    kind, count = _request(case.kv)
    return count if kind == "tp" else 1


def local_shape(case: Case) -> DecodeShape:
    """Geometry of one layer on one rank."""
    return case.shape(tensor_parallel(case))


def page_bytes(shape: DecodeShape) -> int:
    """One physical page with all its heads: keys, values and summary records."""
    return shape.kv_heads * (shape.page_kv_bytes + RecordLayout.of(shape).record_bytes)


def workspace_bytes(case: Case, scores: int = 0) -> int:
    """Scores of every page and query head, fp32: of a check, and one set for each of `scores` backends or for one."""
    shape = local_shape(case)
    return (2 + max(1, scores)) * 4 * case.batch * shape.query_heads * shape.pages(case.ctx)


def read_bytes(case: Case) -> int:
    """Bytes that the sparsest method reads in one step of one layer."""
    shape = local_shape(case)
    dense = dense_bytes(shape, case.ctx, case.batch)
    sparse = locks_bytes(shape, case.select, case.ctx, case.batch)
    return min(sum(dense.values()), sum(sparse.values()))


def plan_memory(case: Case, memory: DeviceMemory, weight_bytes: int = 0, side: SideMemory | None = None) -> MemoryPlan:
    """Choose the plan, or take the one that `case.kv` asks for.

    weight_bytes: of the whole model, at level token.  UserError if what was asked for does not fit.
    """
    kind, count = _request(case.kv)
    side = side or SideMemory()
    shape, layers = local_shape(case), case.model.layers
    reserve = RESERVE_BYTES[case.device] + workspace_bytes(case, side.scores) + weight_bytes
    usable = memory.free_bytes - reserve
    pool_pages = case.batch * shape.pages(case.ctx) + GUARD_PAGES
    copy_bytes = pool_pages * page_bytes(shape)
    whole_bytes = copy_bytes + pool_pages * side.page_bytes
    fits = max(usable, 0) // whole_bytes
    reads = read_bytes(case) + weight_bytes // layers
    swept = COLD_FACTOR * (memory.l2_bytes or 0)  # bytes read between two uses of a copy that leave nothing of it in L2
    needed = swept // reads + 1

    if kind == "pooled" or (kind == "auto" and fits < 1):
        return _pooled(case, shape, usable, memory, side)
    if kind == "tp" and fits < 1:
        raise UserError(f"{case.kv}: one layer of one rank is {_gb(whole_bytes)} and {_gb(usable)} are usable; use more ranks")
    if kind == "layers" and count > MAX_COPIES:
        raise UserError(f"--kv {case.kv} is more than one CUDA graph should hold; use at most layers={MAX_COPIES}")
    copies = _copies(case, kind, count, needed, fits, int(ALL_LAYERS_SHARE * memory.free_bytes) // copy_bytes)
    if copies > fits:
        raise UserError(
            f"--kv {case.kv} needs {_gb(copies * whole_bytes)} and {_gb(usable)} are usable ({_gb(memory.free_bytes)} free); "
            f"at most layers={fits} fit" + ("" if fits else ", so use --kv pooled")
        )
    label = case.kv if kind == "tp" else "resident" if copies >= layers else f"layers={copies}"
    cold = memory.l2_bytes is not None and copies * reads > swept
    launches = layers if case.level == "token" else _launches(case, copies)
    note = (
        f"{label}: {copies} distinct {'copy' if copies == 1 else 'copies'} of {_gb(copy_bytes)} "
        f"({_gb(copies * copy_bytes)} of {_gb(memory.free_bytes)} free{_beside(copies * pool_pages, side)}) for {layers} "
        f"layers; at least {_gb(copies * reads)} are read between two uses of one, "
        + (f"{'more' if cold else 'NOT more'} than {COLD_FACTOR} x L2 ({_gb(swept)})" if swept else "size of the cache unknown")
    )
    return MemoryPlan(
        plan=label,
        copies=copies,
        launches=launches,
        tensor_parallel=tensor_parallel(case),
        pool_pages=pool_pages,
        bytes=copies * copy_bytes,
        cache_state="layers" if cold else "warm",
        note=note,
        swept=swept,
    )


def _copies(case: Case, kind: str, count: int, needed: int, fits: int, cheap: int) -> int:
    """Distinct pools.  `cheap` is how many fit in the share of memory that may go to more copies than coldness needs."""
    layers = case.model.layers
    if kind in ("resident", "layers"):
        return layers if kind == "resident" else count
    if case.level == "token":  # the layers are the copies; more than that is not a model
        return layers if fits >= layers else min(max(needed, 2), fits)
    if case.device == "cpu":
        return min(1, fits)
    wanted = max(needed, layers)
    if wanted > cheap:
        wanted = max(needed, 2)
    return min(wanted, fits, MAX_COPIES)


def _launches(case: Case, copies: int) -> int:
    """Launches of one graph: every copy, and if they are few and large, each several times."""
    if case.device == "cpu":
        return copies
    dense = sum(dense_bytes(local_shape(case), case.ctx, case.batch).values())
    most = max(2, min(MAX_LAUNCHES, MAX_REPLAY_BYTES // dense))
    return copies * max(1, most // copies)


def _beside(pages: int, side: SideMemory) -> str:
    return f", {_gb(pages * side.page_bytes)} more for summaries of the backends' own" if side.page_bytes else ""


def _pooled(case: Case, shape: DecodeShape, usable: int, memory: DeviceMemory, side: SideMemory) -> MemoryPlan:
    """One pool as large as fits, which all sequences share: each has its own random pages."""
    pages, page = shape.pages(case.ctx), page_bytes(shape) + side.page_bytes
    own = case.batch * PRIVATE_PAGES + GUARD_PAGES
    stride_limit = (HEAD_STRIDE_LIMIT - 1) // (shape.page_size * shape.head_dim)
    pool_pages = min(int(POOL_SHARE * max(usable, 0)) // page, case.batch * pages + own, stride_limit)
    if pool_pages < pages + own:
        raise UserError(
            f"one sequence of {case.ctx} tokens and the newest pages of {case.batch} need {_gb((pages + own) * page)} and "
            f"{_gb(max(usable, 0))} are usable; use a shorter --ctx, a smaller --batch, or --kv tp=n for one rank's share"
        )
    size = pool_pages * page_bytes(shape)
    asked = case.batch * pages * page_bytes(shape)
    note = (
        f"pooled: {case.batch} sequences would need {_gb(asked)}; they share one pool of {_gb(size)}"
        f"{_beside(pool_pages, side)}, each with its own random pages, "
        f"so about {min(1.0, (memory.l2_bytes or size) / size):.2%} of the reads may hit L2"
    )
    launches = case.model.layers if case.level == "token" else 2
    return MemoryPlan("pooled", 1, launches, 1, pool_pages, size, "pooled", note)


def _request(kv: str) -> tuple[str, int]:
    """("auto" | "resident" | "layers" | "pooled" | "tp", count) from `--kv`."""
    if kv in ("auto", "resident", "pooled"):
        return kv, 0
    if (match := re.fullmatch(r"(layers|tp)=(\d+)", kv)) and int(match[2]) > 0:
        return match[1], int(match[2])
    raise UserError(f"memory plan {kv!r} is not known; use auto, resident, layers=k, pooled or tp=n")


def _sysconf(name: str) -> int:
    try:
        return max(os.sysconf(name), 0)
    except (ValueError, OSError):  # not every system knows every name
        return 0


def _gb(count: int) -> str:
    """Decimal GB, MB or kB with three digits."""
    unit, size = next(((unit, size) for unit, size in (("GB", 1e9), ("MB", 1e6)) if count >= size), ("kB", 1e3))
    digits = 0 if count < size else max(0, 2 - math.floor(math.log10(count / size)))
    return f"{count / size:.{digits}f} {unit}"
