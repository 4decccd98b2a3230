"""Closed loop: prompts, selectors and budgets -> records, stored as soon as a selector has answered a prompt."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import asdict
from typing import Any, ClassVar

import torch

from harness import closed_loop, trace_capture, traces_synthetic
from harness.closed_loop import Course, Start
from harness.errors import UserError
from harness.fidelity_record import LOOP_FILE, LoopRecord, record_key, source_hash
from harness.fidelity_run import Plan, Say, loaded, one_thread, prompts_of
from harness.prompts import Prompt
from harness.record import Outcome
from harness.store import Store
from harness.traces import key_of
from locks_kernels.selectors import SELECTORS
from locks_kernels.shapes import SelectOptions

DEFAULT = (
    *("oracle", "locks-r8", "locks-r4", "locks-r2x4-r8", "second-order", "quest", "quest-group", "shared-svd-int4"),
    *("shadowkv", "rocketkv", "sliding-window"),
)
DEFAULT_TASKS = ("niah_single_1", "niah_single_2", "niah_multikey_1", "qa_synth")  # which small models can answer
FILES = ("closed_loop.py", "trace_capture.py", "trace_model.py", "prompts.py")


class LoopStore(Store):
    file: ClassVar[str] = LOOP_FILE
    kind: ClassVar[Any] = LoopRecord


def run(plan: Plan, store: Store, say: Say) -> list[LoopRecord]:
    """The records of the plan, those that the store has already among them, in the order of samples and selectors."""
    if plan.model in traces_synthetic.NAMES and plan.path is None:
        raise UserError("synthetic keys answer nothing; --closed-loop needs a model: --model smollm2-135m or --model-path DIR")
    model, haystack = loaded(plan)
    code, records = source_hash(*FILES), []
    basis: torch.Tensor | None = None
    for number, prompt in enumerate(prompts_of(plan, model, haystack), start=1):
        source = trace_capture.source_of(model, prompt, plan.ctx, haystack, plan.kvzip)
        cells = [(name, budget) for name in plan.selectors for budget in plan.budgets]
        keys = {cell: record_key(key_of(source), *cell, plan.sink_pages, code) for cell in cells}
        known = {cell: store.find(keys[cell]) for cell in cells}
        missing = [cell for cell in cells if known[cell] is None]
        if missing:
            say(f"sample {number} of {plan.samples}: {prompt.task}, {plan.ctx} tokens, {len(missing)} courses")
            if basis is None and any(name.startswith("loki") for name, _ in missing):
                basis = trace_capture.calibrate(model, haystack)
            tokens = trace_capture.tokenise(model, prompt)
            start = closed_loop.prefill(model, tokens, prompt.seed, plan.kvzip, basis)
            facts = {**source, "tokens": len(tokens.ids)}
            with one_thread():
                for record in _answers(plan, prompt, start, facts, {cell: keys[cell] for cell in missing}):
                    store.append(record)
                    known[record.selector, record.budget] = record
        records += [record for record in known.values() if record is not None]
    return records


def _answers(
    plan: Plan, prompt: Prompt, start: Start, facts: dict[str, Any], keys: dict[tuple[str, int], str]
) -> Iterator[LoopRecord]:
    full = closed_loop.full_attention(start)
    first = start.layer(0, start.cache.layers[0].keys[0], start.cache.layers[0].values[0])
    for (name, budget), key in keys.items():
        reason = SELECTORS[name].missing(first)
        record = LoopRecord(
            key=key,
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
            _fill(record, prompt, start, full, plan.options(budget))
        yield record


def _fill(record: LoopRecord, prompt: Prompt, start: Start, full: Course, options: SelectOptions) -> None:
    found = closed_loop.diverge(start, SELECTORS[record.selector], options, full)
    record.text, record.full_text = (closed_loop.said(start, course.tokens) for course in (found.course, full))
    record.answers = len(prompt.answers)
    record.found, record.full_found = (closed_loop.found(prompt.answers, text) for text in (record.text, record.full_text))
    record.steps, record.agreed, record.first_difference = found.steps, found.agreed, found.first
    record.kl, record.active = found.kl, found.active
