"""Controls: what must hold of any comparison of selectors before its numbers mean anything.

More of them stand beside what they test: bounds, combinations and open pages in test_selectors, carriers and full tables in
test_fidelity, ties in test_stages_select, recycled pages of LOCKS in test_decoder.
"""

from __future__ import annotations

import pytest
import torch
from kernel_cases import make, randn, smallest_budget
from selector_cases import OPTIONS, SHAPE, kept, layer, steps

from harness.fidelity import measure
from harness.traces_synthetic import generate, source_of
from locks_kernels import page_tokens, page_vectors
from locks_kernels.selector_stages import SelectorStages, TokenStages
from locks_kernels.selectors import SELECTORS
from locks_kernels.selectors.base import Layer, Steps
from locks_kernels.selectors.locks import Locks
from locks_kernels.selectors.pages import PageSelector
from locks_kernels.shapes import DecodeShape, SelectOptions

PAGED = [name for name, selector in SELECTORS.items() if isinstance(selector, PageSelector)]


class Shuffled(Locks):
    """Scores by the summaries of other pages."""

    name = "shuffled"

    def __init__(self, seed: int) -> None:
        super().__init__(8)
        self.name, self.seed = f"shuffled-{seed}", seed

    def summary(self, pages: torch.Tensor, layer: Layer) -> torch.Tensor:
        order = torch.randperm(pages.shape[1], generator=torch.Generator().manual_seed(self.seed))
        return super().summary(pages, layer)[:, order]


def test_summaries_of_other_pages_choose_at_the_level_of_chance() -> None:
    options = SelectOptions(budget_tokens=256)
    ranked, pages = 14, 126  # without sink and recent page
    recalls = []
    for seed in range(4):
        found = measure(generate(source_of(2048, seed)), [Shuffled(seed), SELECTORS["random-pages"]], [options])
        recalls.append([value.recall / value.units for value in found.values()])
    shuffled, blind = torch.tensor(recalls).mean(0)
    assert shuffled == pytest.approx(ranked / pages, abs=0.05)
    assert blind == pytest.approx(ranked / pages, abs=0.05)


RANKED = [name for name in PAGED if not name.startswith(("quest", "unique", "locks-r1x", "locks-r2x", "locks-r4x"))] + [
    "quest-group"
]


@pytest.mark.parametrize("name", RANKED)
def test_a_page_is_ranked_from_the_step_after_the_one_that_fills_it(name: str) -> None:
    """At length 16 n page n - 1 is complete but recent: kept, and its score decides nothing.  One token later it is ranked."""
    selector, of, at = SELECTORS[name], layer(tokens=960, prompt=900), steps(1)
    state = selector.build(of, OPTIONS, SHAPE)
    scores = selector.score(Steps(at.queries, torch.tensor([960])), state)

    def page_59(length: int, score: float) -> torch.Tensor:
        changed = scores.clone()
        changed[..., 59] = score
        seen = Steps(at.queries, torch.tensor([length]))
        return selector.select(changed, seen, layer(tokens=length, prompt=900), state, OPTIONS)[..., 59 * 16 : 960]

    assert page_59(960, float("-inf")).all(), "kept whatever its score"
    assert not page_59(961, float("-inf")).any() and page_59(961, 1e4).all(), "one token later its score decides"


def test_a_cuboid_is_no_bound_and_a_box_is() -> None:
    of, at = layer(), steps()
    logits = torch.einsum("shgd,hptd->shgpt", at.queries, of.pages(16)) * at.scale
    scores = {
        name: SELECTORS[name].score(at, SELECTORS[name].build(of, OPTIONS, SHAPE)) for name in ("cuboid-mean", "quest-group")
    }
    assert (scores["quest-group"] >= logits.amax(-1) - 1e-4).all()
    assert (scores["cuboid-mean"] < logits.amax(-1) - 0.1).any()


@pytest.mark.parametrize("name", PAGED)
def test_scores_are_single_precision_and_tables_the_same_in_every_run(name: str) -> None:
    selector, of, at = SELECTORS[name], layer(), steps()
    assert selector.score(at, selector.build(of, OPTIONS, SHAPE)).dtype is torch.float32
    assert all(torch.equal(kept(selector, of, at), kept(selector, layer(), steps())) for _ in range(2))


def test_products_of_scores_keep_all_their_bits() -> None:
    """TF32 has ten: near ties would flip."""
    assert torch.get_float32_matmul_precision() == "highest"
    assert not torch.backends.cuda.matmul.allow_tf32


@pytest.mark.parametrize("kernels", ["reference", "triton"])
@pytest.mark.parametrize("form", ["min-max", "mean-spread", "axes-8"])
def test_a_recycled_block_gets_a_new_summary(form: str, kernels: str) -> None:
    """Of the rivals, too: a page that another sequence gave up is summarised when it has filled again."""
    shape = DecodeShape(4, 2, 64)
    cache, sequences = make(shape, [4 * 16], room=1)
    of_tokens = form.startswith("axes")
    stages = (TokenStages if of_tokens else SelectorStages)(form, cache, sequences, smallest_budget(shape), kernels)
    stages.prefill()
    old = int(sequences.block_table[0, 0])
    rows = "rows" if of_tokens else "vectors"
    stale = getattr(stages.summaries, rows)[old].clone()
    sequences.block_table[0] = sequences.block_table[0].roll(-1)
    sequences.seq_lens -= 16
    for step in range(32):
        sequences.seq_lens += 1
        keys, values = (randn(1, 2, 64, seed=9 * step + part).to(cache.keys.dtype) for part in (1, 2))
        stages.append_finalise(keys, values)
    assert int(sequences.block_table[0, 4]) == old and int(sequences.seq_lens[0]) == 80
    found = getattr(stages.summaries, rows)[old].float()
    again = cache.keys[old]
    wanted = page_tokens.project(stages.summaries, again) if of_tokens else page_vectors.summarise(form, again)[0]
    assert not torch.equal(found, stale.float())
    assert torch.allclose(found, wanted.float(), atol=3e-2, rtol=2e-2)
