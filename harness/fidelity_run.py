"""Samples, selectors and budgets -> records, stored as soon as a sample is measured."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, ClassVar

import torch

from harness import prompts, trace_capture, trace_model, traces_synthetic
from harness.errors import UserError
from harness.fidelity import Kept, energy, measure
from harness.fidelity_record import FILE, FidelityRecord, record_key, source_hash
from harness.haystack import Haystack
from harness.presets import nearest
from harness.record import Outcome
from harness.store import Store
from harness.theory import blind_pair, check_bounds
from harness.traces import Trace, TraceCache, key_of
from locks_kernels.selectors import SELECTORS
from locks_kernels.shapes import SelectOptions

DEFAULT = (
    *("oracle", "locks-r8", "locks-r4", "locks-r2", "locks-r2x4-r8", "quest", "quest-all-layers", "quest-group"),
    *(
        "second-order",
        "mean-std-vector",
        "mean-std-scalar",
        "cuboid-mean",
        "centroid",
        "loki-page-r8",
        "loki-page-int8",
        "shared-svd-r8",
        "shared-svd-r8-centred",
    ),
    *("shared-svd-int4", "shadowkv", "shadowkv-landmarks", "rocketkv", "rocketkv-second-stage"),
    *("sliding-window", "random-pages"),
)
THEORY_RANKS = (8, 4)
DEFAULT_TASKS = ("niah_single_2", "niah_multikey_1", "vt", "qa_synth", "niah_multivalue", "niah_multiquery")

Say = Callable[[str], None]


class FidelityStore(Store):
    file: ClassVar[str] = FILE
    kind: ClassVar[Any] = FidelityRecord


@dataclass(frozen=True)
class Plan:
    """What is asked for.  budgets: tokens.  model: a packaged one, one of traces_synthetic, or None with `path`."""

    model: str | None
    path: Path | None
    ctx: int
    samples: int
    seed: int
    tasks: tuple[str, ...]
    selectors: tuple[str, ...]
    budgets: tuple[int, ...]
    haystack: Path | None
    kvzip: bool
    traces: Path | None
    command: str
    sink_pages: int = 1

    def options(self, budget: int) -> SelectOptions:
        return SelectOptions(budget_tokens=budget, sink_pages=self.sink_pages)


def selectors(wanted: Sequence[str], default: Sequence[str] = DEFAULT) -> tuple[str, ...]:
    """Names of "default", "all" or given ones; UserError with the nearest name for an unknown one."""
    chosen: list[str] = []
    for name in wanted:
        if name not in ("default", "all") and name not in SELECTORS:
            raise UserError(f"unknown selector {name!r}; {nearest(name, SELECTORS)}")
        chosen += {"default": list(default), "all": list(SELECTORS)}.get(name, [name])
    return tuple(dict.fromkeys(chosen))


def run(plan: Plan, store: Store, say: Say) -> list[FidelityRecord]:
    """The records of the plan, those that the store has already among them, in the order of samples and selectors."""
    code, records = source_hash(), []
    for number, (source, make) in enumerate(_samples(plan), start=1):
        trace_key = key_of(source)
        cells = [(name, budget) for name in plan.selectors for budget in plan.budgets]
        keys = {cell: record_key(trace_key, *cell, plan.sink_pages, code) for cell in cells}
        known = {cell: store.find(key) for cell, key in keys.items()}
        if any(record is None for record in known.values()):
            say(f"sample {number} of {plan.samples}: {source['task']}, {source['ctx']} tokens")
            trace = make()
            names = [name for name in plan.selectors if any(known[name, budget] is None for budget in plan.budgets)]
            with one_thread():
                for record in _measured(plan, trace, {**source, **_facts(trace)}, names, keys):
                    store.append(record)
                    known[record.selector, record.budget] = record
        records += [record for record in known.values() if record is not None]
    return records


def promises(plan: Plan) -> dict[str, Any]:
    """The theory's promises on the first sample, at the first budget."""
    source, make = next(_samples(plan))
    trace = make()
    options = plan.options(plan.budgets[0])
    middle = trace.layers // 2
    with one_thread():
        return {
            "task": source["task"],
            "rank": THEORY_RANKS[0],
            "blind_pair": blind_pair(trace.layer(middle), trace.steps(middle).queries[0, 0, 0], THEORY_RANKS[0]),
            "bounds": [check_bounds(trace, rank, options).record() for rank in THEORY_RANKS],
        }


@contextmanager
def one_thread() -> Iterator[None]:
    """Torch on one thread: selectors are thousands of small operations, for which a second one costs thirty times its use."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _samples(plan: Plan) -> Iterator[tuple[dict[str, Any], Callable[[], Trace]]]:
    """Of each sample what identifies its trace, and how to get it."""
    cache = TraceCache(plan.traces)
    if plan.model in traces_synthetic.NAMES and plan.path is None:
        for sample in range(plan.samples):
            source = traces_synthetic.source_of(plan.ctx, plan.seed + sample, plan.model)
            yield source, lambda source=source: traces_synthetic.generate(source)  # type: ignore[misc]
        return
    model, haystack = loaded(plan)
    axes: list[Any] = []

    def basis() -> Any:
        if not axes:
            axes.append(trace_capture.calibrate(model, haystack))
        return axes[0]

    for prompt in prompts_of(plan, model, haystack):
        source = trace_capture.source_of(model, prompt, plan.ctx, haystack, plan.kvzip)

        def make(prompt: prompts.Prompt = prompt, source: dict[str, Any] = source) -> Trace:
            return cache.get(source, lambda: trace_capture.capture(model, prompt, source, basis()))

        yield source, make


def loaded(plan: Plan) -> tuple[trace_model.TraceModel, Haystack]:
    """The plan's model and haystack; UserError if the folder holds no model, or the context is more than it was made for."""
    try:
        model = trace_model.load(plan.model, plan.path)
    except UserError:
        raise
    except Exception as error:  # transformers raises anything over a config.json that it does not expect
        raise UserError(f"the model in {plan.path or plan.model} cannot be loaded: {type(error).__name__}: {error}") from error
    if model.window is not None and plan.ctx > model.window:
        raise UserError(f"{model.name} was made for {model.window} tokens; use a --ctx of at most that")
    return model, Haystack.builtin() if plan.haystack is None else Haystack.file(plan.haystack)


def prompts_of(plan: Plan, model: trace_model.TraceModel, haystack: Haystack) -> Iterator[prompts.Prompt]:
    """A prompt per sample, as long as the context allows; the tasks take turns."""
    for sample in range(plan.samples):
        task = plan.tasks[sample % len(plan.tasks)]
        yield prompts.fill(
            task, plan.seed + sample, haystack, lambda prompt: len(trace_capture.tokenise(model, prompt).ids) <= plan.ctx
        )


def _facts(trace: Trace) -> dict[str, Any]:
    """What a trace is like, beside what it is."""
    return {
        "tokens": trace.keys.shape[2],
        "steps": len(trace.positions),
        "layers": trace.layers,
        "shape": asdict(trace.shape),
        "agrees": trace.agrees,
        "energy": energy(trace),
    }


def _measured(
    plan: Plan, trace: Trace, facts: dict[str, Any], names: Sequence[str], keys: dict[tuple[str, int], str]
) -> Iterator[FidelityRecord]:
    reasons = {name: SELECTORS[name].missing(trace.layer(0)) for name in names}
    options = [plan.options(budget) for budget in plan.budgets]
    found = measure(trace, [SELECTORS[name] for name in names if reasons[name] is None], options)
    for name in names:
        for budget in plan.budgets:
            reason = reasons[name]
            record = FidelityRecord(
                key=keys[name, budget],
                time=time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
                command=plan.command,
                trace=facts,
                selector=name,
                declaration=asdict(SELECTORS[name].declaration),
                budget=budget,
                sink_pages=plan.sink_pages,
                outcome=Outcome.SKIPPED if reason else Outcome.OK,
                reason=reason,
            )
            if not reason:
                _fill(record, found[name, budget])
            yield record


def _fill(record: FidelityRecord, kept: Kept) -> None:
    record.mass, record.oracle_mass = kept.mass / kept.heads, kept.oracle_mass / kept.heads
    record.error, record.recall = kept.error / kept.heads, kept.recall / kept.units
    record.attended, record.active = kept.attended / kept.units, kept.active
    record.retention = kept.retention()
    record.bytes = {"score": kept.score_bytes, "attend": kept.attend_bytes, "full": kept.full_bytes}
