"""Level token: sizes against hand counts, the step against a transformer written down plainly."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from harness import token_level, workload
from harness.backends.locks import Locks
from harness.backends.sdpa import Sdpa
from harness.case import Case, Model
from harness.errors import UserError
from harness.memory import MemoryPlan
from harness.model import TokenStep
from harness.presets import models
from harness.weights import RankGeometry, Weights, random_weights, resident_weight_bytes, weight_bytes
from locks_kernels.shapes import SelectOptions

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
TINY = Model("tiny", layers=3, query_heads=4, kv_heads=2, head_dim=64, hidden=128, mlp=192, vocabulary=320)
VARIANTS = {
    "plain": TINY,
    "norm": dataclasses.replace(TINY, qk_norm=True, tied_embeddings=True),
    "bias": dataclasses.replace(TINY, qkv_bias=True),
}

CLOSE = 0.005  # of logits after three layers in float16


def case_of(model: Model, ctx: int = 75, batch: int = 2, budget: int = 96, kv: str = "resident") -> Case:
    """In float16, whose eight times finer rounding lets the comparisons be sharp."""
    return Case("token", model, ctx, batch, SelectOptions(budget), kv=kv, dtype="float16", device=DEVICE)


def workload_of(case: Case, copies: int | None = None, tensor_parallel: int = 1) -> workload.Workload:
    layers = case.model.layers
    pages = case.batch * -(-case.ctx // case.page_size) + 4
    plan = MemoryPlan("resident", copies or layers, layers, tensor_parallel, pages, 0, "layers", "")
    return workload.build(case, plan, DEVICE)


def launched(case: Case, data: workload.Workload, backend) -> TokenStep:
    """The step of this case, launched once."""
    launches = [backend.prepare(data, copy) for copy in range(case.model.layers)]
    step = token_level.token_launch(case, data, backend, launches).launch
    assert isinstance(step, TokenStep)
    step()
    return step


def relative_error(found: torch.Tensor, expected: torch.Tensor) -> float:
    return float((found.float() - expected.float()).norm() / expected.float().norm())


# --- sizes


def test_weight_bytes_of_llama_8b_are_its_parameters_without_the_embedding_table():
    llama = models()["llama-3.1-8b"]
    layer = 4096 * 4096 * 2 + 2 * 4096 * 1024 + 3 * 4096 * 14336 + 2 * 4096
    parameters = 32 * layer + 4096 + 2 * 128256 * 4096
    assert parameters == 8_030_261_248  # as published
    assert weight_bytes(llama, batch=3) == 2 * (parameters - 128256 * 4096 + 3 * 4096)
    assert resident_weight_bytes(llama) == 2 * parameters


def test_tied_embeddings_are_held_once():
    model = models()["qwen3-4b"]
    untied = dataclasses.replace(model, tied_embeddings=False)
    assert resident_weight_bytes(untied) - resident_weight_bytes(model) == 2 * 151936 * 2560
    assert weight_bytes(untied) == weight_bytes(model)


@pytest.mark.parametrize("name", models())
def test_every_preset_fits_together(name):
    model = models()[name]
    geometry = RankGeometry(model)
    assert geometry.layer["qkv"] == ((model.query_heads + 2 * model.kv_heads) * model.head_dim, model.hidden)
    assert geometry.layer["output"] == (model.hidden, model.query_heads * model.head_dim)
    assert geometry.layer["gate_up"] == (2 * model.mlp, model.hidden)
    assert geometry.layer["down"] == (model.hidden, model.mlp)
    assert ("qkv_bias" in geometry.layer) == model.qkv_bias
    assert ("key_gain" in geometry.layer) == model.qk_norm
    assert model.hidden % 8 == 0 and model.mlp % 8 == 0, "the GEMV reads 16 bytes at a time"


def test_a_rank_holds_its_share():
    llama = models()["llama-3.1-70b"]
    rank = RankGeometry(llama, 8)
    assert (rank.query_heads, rank.kv_heads, rank.mlp, rank.vocabulary) == (8, 1, 3584, 16032)
    whole, share = weight_bytes(llama, 0), weight_bytes(llama, 0, 8)
    norms = 2 * 8192 * (2 * 80 + 1)
    assert whole - norms == 8 * (share - norms)


def test_a_share_that_does_not_divide_is_refused():
    with pytest.raises(UserError, match="kv_heads=8, which does not divide over 3 ranks"):
        RankGeometry(dataclasses.replace(models()["llama-3.1-8b"], query_heads=33), 3)


def test_resident_bytes_are_those_of_the_tensors():
    for model in VARIANTS.values():
        weights = random_weights(RankGeometry(model), torch.bfloat16, DEVICE, 0)
        layers = [t for layer in weights.layers for t in vars(layer).values() if t is not None]
        held = {t.data_ptr(): t.nbytes for t in (*layers, weights.embedding, weights.head, weights.final_gain)}
        assert sum(held.values()) == resident_weight_bytes(model)
        assert not torch.equal(weights.layers[0].qkv, weights.layers[1].qkv)


# --- the step


def plain_decode(weights: Weights, data: workload.Workload, tokens: torch.Tensor) -> torch.Tensor:
    """Logits of one decode step in fp32, one sequence and one head at a time; reads the caches, writes nothing."""
    model = weights.geometry.model
    dim, query_heads, kv_heads = model.head_dim, weights.geometry.query_heads, weights.geometry.kv_heads

    def norm(x, gain):
        return x / (x.pow(2).mean() + 1e-5).sqrt() * gain.float()

    def rotate(x, position):
        angle = position / 500_000.0 ** (torch.arange(0, dim, 2, dtype=torch.float64, device=x.device) / dim)
        pairs = torch.complex(x[: dim // 2].double(), x[dim // 2 :].double()) * torch.exp(1j * angle)
        return torch.cat((pairs.real, pairs.imag)).float()

    logits = []
    for b, token in enumerate(tokens.tolist()):
        length = int(data.sequences.seq_lens[b])
        table = data.sequences.block_table[b].long()
        hidden = weights.embedding[token].float()
        for layer, cache in zip(weights.layers, data.caches, strict=True):
            qkv = layer.qkv.float() @ norm(hidden, layer.attention_gain)
            if layer.qkv_bias is not None:
                qkv = qkv + layer.qkv_bias.float()
            heads = qkv.view(-1, dim)
            mixed = []
            for head in range(query_heads):
                kv = head // (query_heads // kv_heads)
                query, key = heads[head], heads[query_heads + kv]
                if layer.query_gain is not None:
                    query, key = norm(query, layer.query_gain), norm(key, layer.key_gain)
                past = cache.keys[table, kv].flatten(0, 1)[: length - 1].float()
                keys = torch.cat((past, rotate(key, length - 1)[None]))
                past = cache.values[table, kv].flatten(0, 1)[: length - 1].float()
                values = torch.cat((past, heads[query_heads + kv_heads + kv][None]))
                mixed.append((keys @ rotate(query, length - 1) / dim**0.5).softmax(0) @ values)
            hidden = hidden + layer.output.float() @ torch.cat(mixed)
            normed = norm(hidden, layer.mlp_gain)
            gate, up = (layer.gate_up.float() @ normed).chunk(2)
            hidden = hidden + layer.down.float() @ (gate * gate.sigmoid() * up)
        logits.append(weights.head.float() @ norm(hidden, weights.final_gain))
    return torch.stack(logits)


@pytest.mark.parametrize("name", VARIANTS)
@pytest.mark.parametrize("batch", [2, 5])
def test_step_is_a_transformer(name, batch):
    case = case_of(VARIANTS[name], batch=batch)
    data = workload_of(case)
    step = launched(case, data, Sdpa())
    expected = plain_decode(step.weights, data, step.tokens)
    assert relative_error(step.logits, expected) < CLOSE
    assert torch.equal(step.next_tokens, step.logits.argmax(-1))


def test_step_can_be_repeated_and_continued():
    case = case_of(TINY)
    data = workload_of(case)
    step = launched(case, data, Sdpa())
    first = step.logits.clone()
    assert torch.equal(step(), first), "a second launch from the same tokens"
    step.tokens.copy_(step.next_tokens)
    assert relative_error(step(), plain_decode(step.weights, data, step.tokens)) < CLOSE
    assert not torch.equal(step.logits, first)


def test_layers_share_copies_in_turn():
    case = case_of(TINY)
    data = workload_of(case, copies=2)
    step = launched(case, data, Sdpa())
    fresh = workload_of(case, copies=2)
    assert relative_error(step.logits, plain_decode(step.weights, fresh, step.tokens)) < CLOSE


@pytest.mark.parametrize("ctx", [75, 80])
def test_locks_that_keeps_everything_is_dense(ctx):
    case = case_of(TINY, ctx=ctx)
    dense = launched(case, workload_of(case), Sdpa())
    locks = launched(case, workload_of(case), Locks())
    assert relative_error(locks.logits, dense.logits) < CLOSE


def test_locks_with_a_small_budget_differs():
    case = case_of(TINY, ctx=320, budget=48)
    dense = launched(case, workload_of(case), Sdpa())
    locks = launched(case, workload_of(case), Locks())
    assert locks.logits.isfinite().all()
    assert relative_error(locks.logits, dense.logits) > 3 * CLOSE


def test_a_rank_of_two_runs():
    case = case_of(TINY, kv="tp=2")
    data = workload_of(case, tensor_parallel=2)
    step = launched(case, data, Sdpa())
    assert step.logits.shape == (2, 160)
    assert relative_error(step.logits, plain_decode(step.weights, data, step.tokens)) < CLOSE


def test_backends_of_a_case_share_weights_and_the_next_case_frees_them():
    case = case_of(TINY)
    data = workload_of(case)
    first, second = launched(case, data, Sdpa()), launched(case, data, Locks())
    assert first.weights is second.weights
    other = dataclasses.replace(case, seed=1)
    assert launched(other, workload_of(other), Sdpa()).weights is not first.weights
    assert launched(case, data, Sdpa()).weights is not first.weights


# --- the step on the kernels


@pytest.fixture(scope="module")
def fused():
    pytest.importorskip("triton")
    from locks_kernels import layer_triton

    return layer_triton


@pytest.mark.parametrize("name", VARIANTS)
def test_step_on_the_kernels_equals_the_step_in_torch(fused, name):
    case = case_of(dataclasses.replace(VARIANTS[name], layers=1, vocabulary=64), batch=1)
    data = workload_of(case)
    reference = launched(case, data, Sdpa())
    step = TokenStep(reference.weights, reference.sites, data.sequences, fused)
    assert relative_error(step(), reference.logits) < CLOSE


@pytest.mark.gpu
@pytest.mark.skipif(DEVICE == "cpu", reason="needs a CUDA device")
@pytest.mark.parametrize("batch", [1, 4, 16])
def test_graph_equals_eager(batch):
    case = case_of(TINY, batch=batch)
    step = launched(case, workload_of(case), Sdpa())
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        step()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    eager = step().clone()
    step.logits.fill_(float("nan"))
    graph.replay()
    assert torch.equal(step.logits, eager)
