"""The data of one case on the device: the same bytes for every backend."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from harness import contents
from harness.case import Case
from harness.memory import GUARD_PAGES, PRIVATE_PAGES, MemoryPlan
from locks_kernels.cache import PagedCache, Sequences
from locks_kernels.shapes import DecodeShape

# A backend's output is compared with plain torch for at most this many tokens, so that a check costs less than a second.
CHECKED_TOKENS = {"cuda": 4 << 20, "cpu": 1 << 20}


@dataclass
class Workload:
    """Caches, tables and inputs.  A "copy" is one launch of the graph, which stands for one layer of a model.

    caches               per copy; copy i shares the pool of copy i % plan.copies
    sequences            block table and current lengths, shared by all copies as in an engine
    queries              per copy, [B, HQ, D], all different
    new_keys, new_values per copy, [B, H, D], the token at position seq_lens - 1; copies of one pool share them
    checked              sequences that a gate looks at: all, or a seeded sample where that would be slow

    All of these are static buffers whose addresses may be captured.
    """

    case: Case
    plan: MemoryPlan
    shape: DecodeShape
    device: torch.device
    caches: list[PagedCache]
    sequences: Sequences
    queries: list[torch.Tensor]
    new_keys: list[torch.Tensor]
    new_values: list[torch.Tensor]
    checked: list[int]
    _new: torch.Tensor  # [2, copies, B, H, D]: keys and values, what `new_keys` and `new_values` view
    _tails: torch.Tensor  # [PAGE, 2, copies, B, H, D]: their contents by phase
    _lengths: torch.Tensor  # int32 [PAGE, B]

    @property
    def phases(self) -> range:
        """Phases in the order in which a sequence grows: one of them fills a page."""
        return range(self.shape.page_size - 1, -1, -1)

    def set_phase(self, phase: int) -> None:
        """Make the length `ctx - phase` and the newest token that of this length.  Only enqueues copies on the device."""
        self.sequences.seq_lens.copy_(self._lengths[phase])
        self._new.copy_(self._tails[phase])

    def contiguous(self, copy: int) -> tuple[torch.Tensor, torch.Tensor] | None:
        """The same bytes as plain [B, N, H, D] keys and values with N = ctx, last axis contiguous; None in a shared pool.

        Tokens come in another order than the block table gives them, which attention does not notice.
        """
        if self.plan.pooled:
            return None
        batch, pages = self.sequences.block_table.shape

        def view(pool: torch.Tensor) -> torch.Tensor:
            own = pool.transpose(0, 1)[:, : batch * pages]
            tokens = own.unflatten(1, (batch, pages)).flatten(2, 3)
            return tokens[:, :, : self.case.ctx].permute(1, 2, 0, 3)

        return view(self.caches[copy].keys), view(self.caches[copy].values)

    def new_token_slots(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Physical page and slot, int64 [PAGE, B], of the token that each phase writes."""
        positions = (self._lengths - 1).long()
        pages = self.sequences.block_table.gather(1, (positions // self.shape.page_size).T).T.long()
        return pages, positions % self.shape.page_size

    def poison_new_tokens(self) -> None:
        """Overwrite what a cycle of phases writes with NaN, in all pools: new tokens and summaries of their pages.  A backend
        that reads one of them before it has written it shows.
        """
        pages, slots = self.new_token_slots()
        for cache in self.caches[: self.plan.copies]:
            cache.keys[pages, :, slots] = float("nan")
            cache.values[pages, :, slots] = float("nan")
            cache.summaries[pages] = 0xFF

    def restore_new_tokens(self) -> None:
        """Put the generated tokens back where a cycle writes, for backends that write none."""
        pages, slots = self.new_token_slots()
        for copy, cache in enumerate(self.caches[: self.plan.copies]):
            cache.keys[pages, :, slots] = self._tails[:, 0, copy]
            cache.values[pages, :, slots] = self._tails[:, 1, copy]

    def new_tokens_intact(self) -> bool:
        """Whether the tokens of a cycle stand in all pools as generated.  Looks from the host."""
        pages, slots = self.new_token_slots()
        return all(
            torch.equal(pool[pages, :, slots], self._tails[:, part, copy])
            for copy, cache in enumerate(self.caches[: self.plan.copies])
            for part, pool in enumerate((cache.keys, cache.values))
        )


def build(case: Case, plan: MemoryPlan, device: torch.device | str) -> Workload:
    """Allocate and fill everything; phase 0.  Seeded by the case: the same case gives the same bytes on the same device."""
    device = torch.device(device)
    shape = case.shape(plan.tensor_parallel)
    generator = torch.Generator(device).manual_seed(case.seed)
    block_table = _block_table(case, plan, shape, generator)
    pools = [PagedCache.allocate(shape, plan.pool_pages, device) for _ in range(plan.copies)]
    for pool in pools:
        contents.fill(pool, generator)
        _poison_unused(pool, block_table, case.ctx)
    launches = range(plan.launches)
    lengths = case.ctx - torch.arange(shape.page_size, dtype=torch.int32, device=device)
    new = torch.empty(2, plan.copies, case.batch, shape.kv_heads, shape.head_dim, dtype=pools[0].keys.dtype, device=device)
    workload = Workload(
        case=case,
        plan=plan,
        shape=shape,
        device=device,
        caches=[pools[i % plan.copies] for i in launches],
        sequences=Sequences(block_table, torch.empty(case.batch, dtype=torch.int32, device=device)),
        queries=[contents.queries(pools[0], case.batch, generator) for _ in launches],
        new_keys=[new[0, i % plan.copies] for i in launches],
        new_values=[new[1, i % plan.copies] for i in launches],
        checked=_checked(case, device.type),
        _new=new,
        _tails=new.new_empty(shape.page_size, *new.shape),
        _lengths=lengths[:, None].repeat(1, case.batch),
    )
    pages, slots = workload.new_token_slots()
    for copy, pool in enumerate(pools):
        workload._tails[:, 0, copy] = pool.keys[pages, :, slots]
        workload._tails[:, 1, copy] = pool.values[pages, :, slots]
    workload.set_phase(0)
    return workload


def _block_table(case: Case, plan: MemoryPlan, shape: DecodeShape, generator: torch.Generator) -> torch.Tensor:
    """int32 [B, P].  A pool of its own: random order inside each sequence's range, its last page physically last, so that the
    range is also a contiguous cache.  A shared pool: random pages, except the ones that a cycle writes.
    """
    pages, device = shape.pages(case.ctx), generator.device

    def shuffled(count: int) -> torch.Tensor:
        return torch.randperm(count, generator=generator, device=device)

    if not plan.pooled:
        last = torch.tensor([pages - 1], device=device)
        rows = [b * pages + torch.cat((shuffled(pages - 1), last)) for b in range(case.batch)]
        return torch.stack(rows).int()
    private = min(PRIVATE_PAGES, pages)
    first = plan.pool_pages - GUARD_PAGES - case.batch * private
    own = first + torch.arange(case.batch * private, device=device).view(case.batch, private)
    shared = torch.stack([shuffled(first)[: pages - private] for _ in range(case.batch)])
    return torch.cat((shared, own), dim=1).int()


def _poison_unused(pool: PagedCache, block_table: torch.Tensor, ctx: int) -> None:
    """NaN in the guard pages, in the slots behind the end of each sequence, and in summaries that nobody has built yet."""
    used = ctx - (block_table.shape[1] - 1) * pool.shape.page_size  # slots of the last page
    last = block_table[:, -1].long()
    for part in (pool.keys, pool.values):
        part[-GUARD_PAGES:] = float("nan")
        part[last, :, used:] = float("nan")
    pool.summaries.fill_(0xFF)


def _checked(case: Case, device: str) -> list[int]:
    count = max(1, CHECKED_TOKENS[device] // case.ctx)
    if count >= case.batch:
        return list(range(case.batch))
    chosen = torch.randperm(case.batch, generator=torch.Generator().manual_seed(case.seed))[:count]
    return sorted(chosen.tolist())
