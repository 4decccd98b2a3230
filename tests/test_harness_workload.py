"""The data of a case: one set of bytes that every backend reads in its own way."""

from __future__ import annotations

import pytest
import torch
from harness_fakes import MEMORY, TINY, tiny_case, tiny_workload

from harness import contents
from harness.expected import full_attention
from harness.memory import GUARD_PAGES, plan_memory
from harness.verify import relative_error
from harness.workload import build
from locks_kernels import reference


@pytest.mark.parametrize("ctx", [320, 325, 16, 17, 33])
def test_contiguous_view_holds_the_same_tokens(ctx: int) -> None:
    workload = tiny_workload(tiny_case(ctx))
    views = workload.contiguous(1)
    assert views is not None
    cache, table = workload.caches[1], workload.sequences.block_table
    for view, pool in zip(views, (cache.keys, cache.values), strict=True):
        assert view.shape == (2, ctx, 2, 64) and view.stride(-1) == 1
        assert view.untyped_storage().data_ptr() == pool.untyped_storage().data_ptr()
        for b in range(2):
            paged = pool[table[b].long()].transpose(1, 2).flatten(0, 1)[:ctx].float()
            assert torch.equal(paged.flatten(1).sum(1).sort().values, view[b].float().flatten(1).sum(1).sort().values)


@pytest.mark.parametrize("ctx", [320, 325, 17])
def test_expected_is_attention_over_all_pages(ctx: int) -> None:
    workload = tiny_workload(tiny_case(ctx))
    tables = reference.all_pages(workload.sequences, workload.shape)
    query = workload.queries[1].float()
    want, _ = reference.attend(query, workload.caches[1], workload.sequences, tables)
    assert relative_error(full_attention(workload, 1), want) < 1e-5


def test_expected_in_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    workload = tiny_workload(tiny_case(325))
    whole = full_attention(workload, 0)
    monkeypatch.setattr("harness.expected.CHUNK_TOKENS", 64)
    assert relative_error(full_attention(workload, 0), whole) < 1e-5


@pytest.mark.parametrize("ctx", [320, 325])
def test_a_cycle_rewrites_what_was_there(ctx: int) -> None:
    workload = tiny_workload(tiny_case(ctx))
    before = [cache.keys.clone() for cache in workload.caches]
    workload.poison_new_tokens()
    assert not workload.new_tokens_intact()
    for phase in workload.phases:
        workload.set_phase(phase)
        assert workload.sequences.seq_lens.tolist() == [ctx - phase] * 2
        for copy, cache in enumerate(workload.caches):
            reference.append(cache, workload.sequences, workload.new_keys[copy], workload.new_values[copy])
    assert workload.new_tokens_intact()
    for cache, keys in zip(workload.caches, before, strict=True):
        assert torch.equal(cache.keys.nan_to_num(7), keys.nan_to_num(7))


def test_restore_undoes_poison() -> None:
    workload = tiny_workload(tiny_case(325))
    workload.poison_new_tokens()
    workload.restore_new_tokens()
    assert workload.new_tokens_intact()


def test_unused_slots_pages_and_summaries_are_poisoned() -> None:
    workload = tiny_workload(tiny_case(325))
    cache, last = workload.caches[0], workload.sequences.block_table[:, -1].long()
    for pool in (cache.keys, cache.values):
        assert pool[-GUARD_PAGES:].isnan().all()
        assert pool[last, :, 5:].isnan().all() and pool[last, :, :5].isfinite().all()
    assert (cache.summaries == 0xFF).all()
    assert not set(range(cache.num_pages - GUARD_PAGES, cache.num_pages)) & set(
        workload.sequences.block_table.flatten().tolist()
    )


def test_same_seed_same_bytes() -> None:
    first, again, other = (tiny_workload(tiny_case(seed=seed)) for seed in (0, 0, 1))
    assert torch.equal(first.caches[1].keys.nan_to_num(7), again.caches[1].keys.nan_to_num(7))
    assert torch.equal(first.sequences.block_table, again.sequences.block_table)
    assert not torch.equal(first.caches[1].keys.nan_to_num(7), other.caches[1].keys.nan_to_num(7))
    assert not torch.equal(first.caches[0].keys.nan_to_num(7), first.caches[1].keys.nan_to_num(7))
    assert not torch.equal(first.queries[0], first.queries[1])


def test_contents_are_uneven_and_never_zero() -> None:
    workload = tiny_workload(tiny_case(4096, batch=1))
    cache, table = workload.caches[0], workload.sequences.block_table[0].long()
    keys = cache.keys[table].transpose(0, 1).flatten(1, 2).float()  # [H, N, D]
    assert (keys != 0).float().mean() > 0.99
    grouped = workload.queries[0][0].float().view(2, 2, 64) / 8
    logits = grouped @ keys.mT
    assert contents.QUERY_SCALE / 2 < float(logits.std()) < contents.QUERY_SCALE * 2
    mass = logits.softmax(-1).unflatten(-1, (-1, 16)).sum(-1)  # per page
    share = mass.sort(-1, descending=True).values[..., :32].sum(-1).mean()
    assert share > 0.4, "an eighth of the pages holds much of the attention"


def test_pooled_sequences_share_pages_but_not_the_ones_they_write() -> None:
    case = tiny_case(325, batch=8, kv="pooled")
    plan = plan_memory(case, MEMORY)
    workload = build(case, plan, "cpu")
    table = workload.sequences.block_table
    assert workload.contiguous(0) is None
    assert int(table.max()) < plan.pool_pages - GUARD_PAGES
    assert all(len(set(row)) == len(row) for row in table.tolist())
    written = table[:, -2:].flatten().tolist()
    assert len(set(written)) == len(written) and not set(written) & set(table[:, :-2].flatten().tolist())


def test_large_cells_check_a_seeded_sample() -> None:
    workload = tiny_workload(tiny_case(TINY.head_dim * 2048, batch=9))
    assert len(workload.checked) == 8 and workload.checked == sorted(set(workload.checked))
