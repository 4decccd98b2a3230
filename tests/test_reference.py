"""The plain-torch reference against brute force, and the packed summary."""

from __future__ import annotations

import math

import pytest
import torch
from kernel_cases import DEVICE, assert_close_output, empty_cache, make, make_query, randn, relative_error
from torch.nn.functional import scaled_dot_product_attention

from locks_kernels import reference
from locks_kernels.cache import Sequences
from locks_kernels.shapes import DecodeShape, SelectOptions, ShapeError
from locks_kernels.summary import RecordLayout, pack, unpack

INF = float("inf")


@pytest.mark.parametrize("head_dim", (64, 128, 256))
@pytest.mark.parametrize("page, rank", ((16, 8), (32, 2), (64, 4)))
def test_records_round_trip(head_dim: int, page: int, rank: int) -> None:
    summary = reference.summarise(randn(3, 2, page, head_dim), rank)
    summary.basis[0, 0, 0, :16] = torch.arange(-8, 8)  # every nibble
    again = unpack(pack(summary), RecordLayout(head_dim, page, rank))
    for name, value in vars(summary).items():
        assert torch.equal(getattr(again, name), value), name


def test_a_record_is_818_bytes_in_832() -> None:
    layout = RecordLayout(128, 16, 8)
    assert (layout.payload_bytes, layout.record_bytes) == (818, 832)
    assert layout.payload_bytes == 5 * 128 + 10 * 16 + 18
    assert list(layout.offsets.values()) == [0, 512, 640, 768, 800, 816]
    records = pack(reference.summarise(randn(1, 16, 128), 8))
    assert records.shape == (1, 832) and (records[:, 818:] == 0).all()


def test_a_nibble_pair_is_one_byte_even_channel_low() -> None:
    summary = reference.summarise(randn(1, 16, 64), 2)
    summary.basis[0, 0, :2] = torch.tensor((-8, 7))
    assert int(pack(summary)[0, 0]) == 0x78


def test_full_rank_without_quantisation_is_exact() -> None:
    """A centred page of 16 tokens has rank 15: fifteen eigenpairs give back its keys and so its log-sum-exp."""
    keys = randn(5, 16, 128).double()
    centroid = keys.mean(-2, keepdim=True)
    deviations = keys - centroid
    eigenvalues, vectors = torch.linalg.eigh(deviations @ deviations.mT)
    singular, leading = eigenvalues[:, 1:].sqrt(), vectors[:, :, 1:]
    basis = (deviations.mT @ leading / singular[:, None]).mT
    query = randn(128, seed=1).double()
    logits = (leading * singular[:, None]) @ (basis @ query)[..., None] + (centroid @ query)[..., None]
    assert torch.allclose(logits[..., 0].logsumexp(-1), (keys @ query).logsumexp(-1), rtol=1e-10)

    # the same through `summarise`: quantisation alone is left at rank 15, and it costs less than ranks 9 to 15 bring
    errors = {rank: relative_error(reference.summarise(keys, rank).reconstruct(), keys.float()) for rank in (8, 15)}
    assert (errors[15] < 0.2).all() and (errors[15] < 0.7 * errors[8]).all()


def test_summary_has_the_least_error_of_its_rank() -> None:
    keys = randn(16, 128) @ torch.diag(0.9 ** torch.arange(128)).to(DEVICE)
    deviations = keys - keys.mean(0)
    best = torch.linalg.svdvals(deviations)[8:].norm()
    error = (reference.summarise(keys, 8).reconstruct() - keys).norm()
    assert best <= error < 1.5 * best


def test_summary_of_equal_tokens_is_their_value() -> None:
    keys = randn(1, 128).expand(16, 128)
    assert relative_error(reference.summarise(keys, 8).reconstruct(), keys) < 0.01


def test_score_reads_only_complete_pages() -> None:
    shape = DecodeShape(4, 2, 64, 16, 2)
    cache, sequences = make(shape, (0, 1, 16, 17, 40))
    scores = reference.score(make_query(shape, 5), cache, sequences)
    finite = torch.isfinite(scores).sum(-1)
    assert finite.tolist() == [[n] * 4 for n in (0, 0, 0, 1, 2)]


@pytest.mark.parametrize("how", ("share", "peak"))
def test_combine_against_loops(how: str) -> None:
    scores = 3 * randn(2, 6, 11).double()
    scores[0, :, 7:] = -INF
    scores[1] = -INF
    found = reference.combine(scores.float(), 2, how)
    for h in range(2):
        for p in range(11):
            expected = 0.0
            for g in range(3):
                head = scores[0, 3 * h + g].tolist()
                mass = math.exp(head[p])
                total = sum(math.exp(s) for s in head)
                expected += mass / total / 3 if how == "share" else mass / math.exp(max(head))
            assert float(found[0, h, p]) == pytest.approx(expected, rel=1e-4)
    assert (found[1] == 0).all()


def chosen(values: list[float], tokens: int, **options: int) -> list[int]:
    shape = DecodeShape(1, 1, 64, 16, 2)
    combined = torch.tensor(values, device=DEVICE)[None, None]
    table = torch.zeros(1, len(values), dtype=torch.int32, device=DEVICE)
    sequences = Sequences(table, torch.tensor([tokens], dtype=torch.int32, device=DEVICE))
    return reference.select(combined, sequences, shape, SelectOptions(**options))[0, 0].tolist()


def test_select_keeps_sink_recent_and_best() -> None:
    values = [0.0, 0.5, 0.1, 0.9, 0.0, 0.0]
    assert chosen(values, 96, budget_tokens=64) == [0, 1, 3, 5]
    assert chosen(values, 81, budget_tokens=64) == [0, 1, 3, 5], "the open page counts"
    assert chosen(values, 96, budget_tokens=64, sink_pages=0) == [1, 2, 3, 5]
    assert chosen(values, 96, budget_tokens=64, recent_pages=2) == [0, 3, 4, 5]
    assert chosen(values, 96, budget_tokens=79) == [0, 1, 3, 5], "a part of a page is no page"


def test_select_ties_and_short_sequences() -> None:
    assert chosen([0.0] * 8, 128, budget_tokens=64) == [0, 1, 2, 7]
    assert chosen([0.0] * 8, 64, budget_tokens=64) == [0, 1, 2, 3]
    assert chosen([0.0] * 8, 33, budget_tokens=64) == [0, 1, 2, -1]
    assert chosen([0.0] * 8, 1, budget_tokens=64) == [0, -1, -1, -1]
    assert chosen([0.0] * 8, 0, budget_tokens=64) == [-1] * 4


def test_budgets_without_a_ranked_page_are_refused() -> None:
    with pytest.raises(ShapeError, match="at least 3 pages"):
        SelectOptions(32).kept_pages(16)
    with pytest.raises(ShapeError, match="recent_pages"):
        SelectOptions(recent_pages=0)


@pytest.mark.parametrize("tokens", (1, 15, 16, 17, 200))
def test_attend_on_all_pages_is_full_attention(tokens: int) -> None:
    shape = DecodeShape(6, 2, 64, 16, 2, "float16")
    cache, sequences = make(shape, (tokens, 0))
    query = make_query(shape, 2)
    out, lse = reference.attend(query, cache, sequences, reference.all_pages(sequences, shape))
    where = sequences.block_table[0].long().repeat_interleave(16)[:tokens]
    slot = torch.arange(tokens, device=DEVICE) % 16
    keys, values = (pool[where, :, slot].float().transpose(0, 1) for pool in (cache.keys, cache.values))
    grouped = query[0].float().view(2, 3, 64)
    expected = scaled_dot_product_attention(grouped, keys, values).reshape(6, 64)
    assert_close_output(out[0], expected, shape.dtype)
    logits = grouped @ keys.mT * shape.softmax_scale
    assert torch.allclose(lse[0], logits.logsumexp(-1).flatten(), atol=1e-4)
    assert (out[1] == 0).all() and (lse[1] == -INF).all()


def test_append_writes_one_slot_and_finalise_one_page() -> None:
    shape = DecodeShape(2, 1, 64, 16, 2)
    cache, table = empty_cache(shape, 4), torch.tensor([[2, 1], [3, 0]], dtype=torch.int32, device=DEVICE)
    cache.keys[1] = 1.0
    sequences = Sequences(table, torch.tensor([32, 0], dtype=torch.int32, device=DEVICE))
    new = torch.full((2, 1, 64), 5.0, device=DEVICE, dtype=cache.keys.dtype)
    reference.append(cache, sequences, new, new)
    assert (cache.keys[1, 0, 15] == 5).all() and (cache.keys[1, 0, :15] == 1).all()
    assert cache.keys[[0, 2, 3]].isnan().all() and cache.values[[0, 2, 3]].isnan().all()
    reference.finalise(cache, sequences)
    assert (cache.summaries[[0, 2, 3]] == 0xFF).all() and not (cache.summaries[1] == 0xFF).all()
    sequences.seq_lens.copy_(torch.tensor([31, 17]))
    before = cache.summaries.clone()
    reference.finalise(cache, sequences)
    assert torch.equal(cache.summaries, before)
