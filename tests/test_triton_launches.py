"""Launch shapes that small cases do not reach on their own: several chunks and reads of the selection, splits and merge."""

from __future__ import annotations

import pytest
import torch
from kernel_cases import DEVICE, ON_GPU, make, make_query, randn

from locks_kernels import reference
from locks_kernels.cache import Sequences
from locks_kernels.shapes import DecodeShape, SelectOptions

pytest.importorskip("triton")
if ON_GPU:
    pytestmark = pytest.mark.gpu

from locks_kernels import attend, select


@pytest.mark.parametrize("combine", ("share", "peak"))
@pytest.mark.parametrize("levels", (1, 3, 40), ids=("equal", "ties", "distinct"))
@pytest.mark.parametrize("kept, chunk", ((8, 16), (8, 64), (100, 64), (250, 64)))
def test_select_over_chunks(combine: str, levels: int, kept: int, chunk: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(select, "MERGE_BLOCK", 64)  # the merge has to read its candidates in turns
    shape = DecodeShape(6, 2, 64, 16, 2)
    options = SelectOptions(kept * 16, sink_pages=3, combine=combine)
    pages = 300
    lens = torch.tensor([0, kept * 16, kept * 16 + 1, pages * 16 - 5], dtype=torch.int32, device=DEVICE)
    sequences = Sequences(torch.zeros(4, pages, dtype=torch.int32, device=DEVICE), lens)
    # the same order in every head, so that equal levels tie exactly in the combined score
    level = (randn(4, 2, 1, pages).abs() * 1e6).long() % levels
    scores = (level * 0.5 + randn(1, 1, 3, 1)).view(4, 6, pages).float().contiguous()
    counts = reference.scored_pages(lens, shape, 1)
    unscored = (torch.arange(pages, device=DEVICE) >= counts[:, None])[:, None]
    combined = reference.combine(scores.masked_fill(unscored, float("-inf")), 2, combine)
    work = select.SelectWorkspace.allocate(shape, options, sequences, chunk)
    work.partial.fill_(float("nan"))
    work.shortlist.fill_(12345)
    found = select.select(scores.masked_fill(unscored, float("nan")), sequences, shape, options, workspace=work)
    assert work.partial.shape[2] == -(-pages // chunk)
    assert torch.equal(found, reference.select(combined, sequences, shape, options))


@pytest.mark.parametrize("splits", (1, 2, 5, 40))
def test_merge_equals_one_pass(splits: int) -> None:
    shape = DecodeShape(6, 2, 64, 16, 2, "float16")
    cache, sequences = make(shape, (0, 5, 30 * 16 + 1))
    query = make_query(shape, 3)
    tables = reference.all_pages(sequences, shape)
    size = (3, 6, splits)
    work = attend.AttendWorkspace(
        torch.full((*size, 64), float("nan"), device=DEVICE), torch.full(size, float("nan"), device=DEVICE)
    )
    out, lse = attend.attend(query, cache, sequences, tables, workspace=work)
    expected, expected_lse = reference.attend(query, cache, sequences, tables)
    assert (out - expected).abs().max() < 2e-3
    assert torch.equal(lse.isinf(), expected_lse.isinf()) and lse[0].isinf().all()
    assert (lse[1:] - expected_lse[1:]).abs().max() < 1e-3
    assert not work.lse.isnan().any()
