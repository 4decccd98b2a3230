"""What a selector kept of a trace, and what a model said with it, as plain data: a record per (trace, selector, budget).
Imports nothing heavy.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from harness.record import Line, Outcome

SCHEMA = 1
FILE = "fidelity.ndjson"  # beside records.jsonl, whose readers do not look at it
LOOP_FILE = "closed_loop.ndjson"
FACTS = ("tokens", "steps", "layers", "shape", "agrees", "energy")  # of a trace: what it is like, the rest is what it is
DENOMINATORS = ("all", "oracle", "retrieval")


@dataclass
class FidelityRecord(Line):
    """One line of a store.  Means are over the steps, layers and query heads of one trace; absent is None, never 0.

    trace        what it is (model, task, seed, context, haystack) and what it is like (tokens, agreement, spectral energy)
    declaration  granularity, forced tokens, dense layers, whether the question was visible
    budget       tokens asked for, sink and recent pages among them where the method counts them
    sink_pages   first pages that page selectors keep without looking
    mass         attention mass inside the table; `oracle_mass` that of the exact ranking at the same budget
    error        ||o_T - o|| / ||o|| of the attention output
    recall       share of the oracle's ranked tokens that the table holds
    retention    by denominator: {"strict": [kept, cases], "loose": [kept, cases]}, see DENOMINATORS in reports.fidelity
    attended     distinct tokens of a KV head and step;  bytes: per step of the whole model, by part, and "full" attention's
    active       the table was smaller than the context in every sparse layer and step
    """

    key: str
    time: str
    command: str
    trace: dict[str, Any]
    selector: str
    declaration: dict[str, Any]
    budget: int
    outcome: Outcome
    reason: str | None = None
    mass: float | None = None
    oracle_mass: float | None = None
    error: float | None = None
    recall: float | None = None
    retention: dict[str, dict[str, list[int]]] = field(default_factory=dict)
    attended: float | None = None
    bytes: dict[str, float] | None = None
    active: bool | None = None
    sink_pages: int = 1
    schema: int = SCHEMA

    def cell(self) -> str:
        """What was asked, whichever version of the code answered."""
        trace = {name: value for name, value in self.trace.items() if name not in FACTS}
        return json.dumps([trace, self.selector, self.budget, self.sink_pages], sort_keys=True)


@dataclass
class LoopRecord(Line):
    """One line of a store: one prompt that the model answered with a selector in the place of full attention.

    answers           how many there are; `found` of them are in the text, `full_found` in what full attention says
    text, full_text   what was generated, without the given beginning
    steps             tokens generated after the first; `agreed` of them have full attention's likeliest token, given its tokens
    first_difference  index of the first token that differs from full attention's; None if none does
    kl                sum over the steps of KL(full attention || selector), nats
    active, sink_pages  as in FidelityRecord
    """

    key: str
    time: str
    command: str
    trace: dict[str, Any]
    selector: str
    declaration: dict[str, Any]
    budget: int
    outcome: Outcome
    reason: str | None = None
    answers: int | None = None
    found: int | None = None
    full_found: int | None = None
    text: str | None = None
    full_text: str | None = None
    steps: int | None = None
    agreed: int | None = None
    first_difference: int | None = None
    kl: float | None = None
    active: bool | None = None
    sink_pages: int = 1
    schema: int = SCHEMA


def source_hash(*more: str) -> str:
    """Hash of the code that decides what a record says: it changes, and records are made again.  more: files of harness/."""
    root = Path(__file__).resolve().parents[1]
    files = [*sorted((root / "locks_kernels" / "selectors").glob("*.py")), root / "locks_kernels" / "selector_cost.py"]
    files += [root / "locks_kernels" / "reference.py", root / "harness" / "fidelity.py"]
    files += [root / "harness" / name for name in more]
    return hashlib.sha256(b"".join(file.read_bytes() for file in files)).hexdigest()[:16]


def record_key(trace: str, selector: str, budget: int, sink_pages: int, code: str) -> str:
    return hashlib.sha256(json.dumps([trace, selector, budget, sink_pages, code, SCHEMA]).encode()).hexdigest()[:24]
