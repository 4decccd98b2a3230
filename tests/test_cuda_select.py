"""The selection at a million tokens: exact and equally fast whatever the scores look like."""

from __future__ import annotations

import pytest
import torch
from kernel_cases import ON_GPU, assert_good_table

from locks_kernels import reference
from locks_kernels.cache import PagedCache, Sequences
from locks_kernels.cuda.stages import CudaStages
from locks_kernels.shapes import DecodeShape, SelectOptions

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not ON_GPU, reason="needs a CUDA device")]

SHAPE, PAGES, OPTIONS = DecodeShape(32, 8), 65_536, SelectOptions(2048)
LIMIT_US, LAUNCHES = 12.0, 200  # on an H200


def uniform() -> torch.Tensor:
    return torch.rand(1, 32, PAGES, device="cuda")


def normal() -> torch.Tensor:
    return torch.randn(1, 32, PAGES, device="cuda")


def levels(values: torch.Tensor) -> torch.Tensor:
    return values.to("cuda").expand(1, 32, PAGES).contiguous()


SCORES = {  # nats
    "random": normal,
    "wide": lambda: 40 * normal(),
    "equal": lambda: levels(torch.zeros(PAGES)),
    "half of them equal": lambda: levels((torch.arange(PAGES) % 2).float()),
    "within 0.1": lambda: 0.1 * uniform(),
    "within 0.001": lambda: 1e-3 * uniform(),
    "within 0.0001, far up": lambda: 30 + 1e-4 * uniform(),
    "rising": lambda: levels(torch.linspace(0, 20, PAGES)),
    "falling": lambda: levels(torch.linspace(20, 0, PAGES)),
    "one heavy bin": lambda: torch.where(uniform() < 0.001, 5 + normal(), 1e-3 * uniform() - 3 * (uniform() < 0.5)),
}


@pytest.mark.parametrize("data", SCORES)
def test_selection_of_a_million_tokens(data: str) -> None:
    torch.manual_seed(0)
    cache = PagedCache.allocate(SHAPE, 1, "cuda")
    table = torch.zeros(1, PAGES, dtype=torch.int32, device="cuda")
    sequences = Sequences(table, torch.tensor([16 * PAGES], dtype=torch.int32, device="cuda"))
    stages = CudaStages(cache, sequences, OPTIONS)
    scores = SCORES[data]()
    stages.scores.copy_(scores)
    ranked = scores[..., :-1] * torch.log2(torch.tensor(torch.e))
    top = ranked.amax(-1, keepdim=True)
    stages.partials.copy_(torch.tensor([-1e30, 0.0, 1e30, 0.0]))  # nothing, but for one part with everything
    stages.partials[:, :, 0, 0] = top[..., 0]
    stages.partials[:, :, 0, 1] = torch.exp2(ranked - top).sum(-1)
    stages.partials[:, :, 0, 2] = ranked.amin(-1)
    stages.select()
    torch.cuda.synchronize()
    scores[..., -1] = float("-inf")
    combined = reference.combine(scores, SHAPE.kv_heads, OPTIONS.combine)
    assert_good_table(stages.tables, combined, sequences, SHAPE, OPTIONS)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(LAUNCHES):
            stages.select()
    times = []
    for _ in range(9):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end) * 1e3 / LAUNCHES)
    time = sorted(times)[len(times) // 2]
    print(f"{data}: {time:.2f} us")
    if "H200" in torch.cuda.get_device_name():
        assert time <= LIMIT_US
