"""A sweep of level `engine`: one engine per backend and set of options, each record stored as soon as its cell is timed."""

from __future__ import annotations

import itertools
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from harness import environment
from harness.engine.arguments import arguments, cell_of, no_memory, window
from harness.engine.cells import BACKENDS, PLUGIN_VARIABLE, EngineCase, plugin_options
from harness.engine.cells import DEFAULT as DEFAULT_BACKENDS
from harness.engine.events import EngineRun
from harness.engine.gate import prompt_lengths
from harness.engine.host import EngineProcess, Host, TimedOut
from harness.engine.model import read_folder
from harness.engine.record import TIMER, blank, outcome_of
from harness.engine.texts import Reference, Text
from harness.engine.worker import Broken, Cell, Checked, EngineJob
from harness.errors import UserError
from harness.record import Outcome, Record
from harness.run import RETRIED, BackendStarted, CaseStarted, Event, LeftOut, RecordDone, RecordStore, RunOptions
from harness.store import resume_key


@dataclass(frozen=True)
class EngineOptions:
    """model_folder: of the user's weights, with the longest context they are for.  logs: where those of failures are kept."""

    logs: Path
    model_folder: Path | None = None
    longest: int | None = None

    @classmethod
    def of(cls, store: Path, model_folder: str | None) -> EngineOptions:
        """For records in `store`.  UserError if the folder is none of a model."""
        logs = store / "engine-logs"
        return (
            cls(logs) if model_folder is None else cls(logs, Path(model_folder).resolve(), read_folder(Path(model_folder))[2])
        )


def run_engines(
    cases: Sequence[EngineCase],
    backends: Sequence[str] | Callable[[Any], Sequence[str]],
    store: RecordStore,
    options: RunOptions,
    engine_options: EngineOptions,
    on_event: Callable[[Event], None],
    host: Host | None = None,
) -> list[Record]:
    """As run.run_sweep, for cases of this level: cells of one backend that differ in context and batch share an engine."""
    sweep = _Sweep(cases, backends, store, options, engine_options, on_event, host or EngineProcess(options.case_timeout_s))
    groups: dict[EngineCase, list[EngineCase]] = {}
    for case in cases:
        groups.setdefault(replace(case, ctx=0, batch=1, kv="auto"), []).append(case)
    with tempfile.TemporaryDirectory(prefix="locks-bench-") as folder:
        for group in groups.values():
            sweep.group(group, Path(folder))
    for case in cases:
        if case in sweep.late:
            on_event(LeftOut(case))
    return [sweep.records[case, name] for case in cases for name in sweep.names(case) if (case, name) in sweep.records]


class _Sweep:
    def __init__(
        self,
        cases: Sequence[EngineCase],
        backends: Sequence[str] | Callable[[Any], Sequence[str]],
        store: RecordStore,
        options: RunOptions,
        engine_options: EngineOptions,
        on_event: Callable[[Event], None],
        host: Host,
    ) -> None:
        self.cases, self.backends, self.store, self.options = list(cases), backends, store, options
        self.engine_options, self.on_event, self.host = engine_options, on_event, host
        self.environment = environment.capture(cases[0].device) if cases else {}
        self.stop_at = None if options.time_budget_s is None else time.time() + options.time_budget_s
        self.records: dict[tuple[EngineCase, str], Record] = {}
        self.late: set[EngineCase] = set()
        self.numbers = itertools.count(1)

    def names(self, case: EngineCase) -> list[str]:
        return list(self.backends(case) if callable(self.backends) else self.backends)

    def group(self, cases: list[EngineCase], folder: Path) -> None:
        """All backends of cases that can share an engine, the dense ones first: they give the texts to compare with."""
        names = list(dict.fromkeys(name for case in cases for name in self.names(case)))
        names.sort(key=lambda name: not BACKENDS[name].dense)
        missing: dict[str, list[EngineCase]] = {}
        for name in names:
            wanted = [case for case in cases if name in self.names(case)]
            missing[name] = [case for case in wanted if not self._found(case, name)]
        lengths = prompt_lengths(cases[0].select.budget_tokens, max(case.ctx for case in cases))
        reference = self._known_texts(cases, lengths)
        for name in names:
            todo = [case for case in missing[name] if not self._refused(case, name)]
            if not todo:
                continue
            sparse = not BACKENDS[name].dense
            if sparse and reference is None:
                reference, outcome, reason = self._reference(cases, folder)
                if reference is None:
                    self._all(todo, name, outcome, f"no dense engine to compare its texts with: {reason}")
                    continue
            texts = self._engines(name, todo, cases, folder, reference)
            if reference is None and not sparse and texts is not None:
                reference = Reference(name, texts)

    def _found(self, case: EngineCase, name: str) -> bool:
        record = self.store.find(self._key(case, name))
        if record is None or record.outcome in RETRIED:
            return False
        self.records[case, name] = record
        self.on_event(RecordDone(record, reused=True))
        return True

    def _key(self, case: EngineCase, name: str) -> str:
        return resume_key(case, name, BACKENDS[name].version(), self.environment, TIMER, "layers")

    def _known_texts(self, cases: list[EngineCase], lengths: list[int]) -> Reference | None:
        """Of a dense engine of these cases that was measured before, if it was asked the same."""
        for (case, name), record in self.records.items():
            texts = [Text.of(text) for text in (record.gate or {}).get("texts", [])]
            if case not in cases or not BACKENDS[name].dense or record.outcome is not Outcome.OK:
                continue
            if [text.prompt_tokens for text in texts] == lengths:
                return Reference(name, texts)
        return None

    def _refused(self, case: EngineCase, name: str) -> bool:
        """Whether there is no use in starting an engine; then the row says why."""
        if reason := dict(case.model.unsupported).get("engine") or BACKENDS[name].unavailable(case.device):
            self._all([case], name, Outcome.SKIPPED, reason)
        elif reason := no_memory(case):
            self._all([case], name, Outcome.OOM, reason)
        return reason is not None

    def _reference(self, cases: list[EngineCase], folder: Path) -> tuple[Reference | None, Outcome, str]:
        """Texts of a dense engine that is started for nothing else; or None, how the last one ended, and why there are none."""
        outcome, reasons = Outcome.SKIPPED, []
        for name in DEFAULT_BACKENDS[cases[0].device]:
            if BACKENDS[name].dense:
                texts, outcome, reason = self._texts_of(name, cases, folder)
                if texts is not None:
                    return Reference(name, texts), outcome, reason
                reasons.append(f"{name}: {reason}")
        return None, outcome, "; ".join(reasons)

    def _texts_of(self, name: str, cases: list[EngineCase], folder: Path) -> tuple[list[Text] | None, Outcome, str]:
        if reason := BACKENDS[name].unavailable(cases[0].device):
            return None, Outcome.SKIPPED, reason
        self._say(cases[0], f"starting an engine with {name} for texts to compare with")
        texts, outcome, broken, log = None, Outcome.CRASHED, "it said nothing", self._log(name)
        try:
            for event in self.host.events(self._job(name, [], cases, folder, None), log):
                if isinstance(event, Checked):  # it then ends by itself, and leaves no shared memory behind
                    texts = event.texts if event.reason is None else None
                    outcome, broken = Outcome.SKIPPED, event.reason or ""
                elif isinstance(event, Broken) and texts is None:
                    outcome, broken = outcome_of(event.error), event.error
        except TimedOut as error:
            outcome, broken = Outcome.TIMEOUT, str(error)
        if texts is not None:
            log.unlink(missing_ok=True)
            return texts, Outcome.OK, ""
        return None, outcome, f"{broken} (log: {log.parent.name}/{log.name})"

    def _engines(
        self, name: str, todo: list[EngineCase], cases: list[EngineCase], folder: Path, reference: Reference | None
    ) -> list[Text] | None:
        """Engines of one backend until every cell has its outcome; another one only after a cell took the last with it."""
        waiting, texts = {cell_of(case): case for case in todo}, None
        while waiting:
            if self.stop_at is not None and time.time() > self.stop_at:
                self.late |= set(waiting.values())
                return texts
            first = next(iter(waiting.values()))
            self._say(first, f"starting an engine with {name}")
            run = EngineRun(self, name, waiting)
            log = self._log(name)
            try:
                for event in self.host.events(self._job(name, list(waiting), cases, folder, reference), log):
                    run.take(event, log)
            except TimedOut as error:
                run.give_up(Outcome.TIMEOUT, str(error))
            texts = texts or run.texts
            run.end()
            if not run.failed:
                log.unlink(missing_ok=True)
        return texts

    def _job(
        self, name: str, cells: list[Cell], cases: list[EngineCase], folder: Path, reference: Reference | None
    ) -> EngineJob:
        case, own = cases[0], self.engine_options.model_folder
        all_cells = [cell_of(one) for one in cases]
        sparse = not BACKENDS[name].dense
        return EngineJob(
            backend=name,
            sparse=sparse,
            model=case.model,
            model_folder=None if own is None else str(own),
            longest=self.engine_options.longest,
            dtype=case.dtype,
            seed=case.seed,
            budget=case.select.budget_tokens,
            cells=cells,
            settings_of=all_cells,
            window=window(case),
            arguments=arguments(case, name, own or folder / case.model.name, all_cells),
            environment={PLUGIN_VARIABLE: plugin_options(case.select, case.rank) if sparse else None},
            reference=reference,
            stop_at=self.stop_at,
            gpu_uuid=(self.environment.get("gpu") or {}).get("uuid"),
        )

    def _log(self, name: str) -> Path:
        logs = self.engine_options.logs
        try:
            logs.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise UserError(f"{logs} cannot be a folder for logs ({error.strerror}); choose another --store DIR") from error
        stamp = time.strftime("%Y%m%dT%H%M%S", time.gmtime())
        return logs / f"{stamp}-{next(self.numbers)}-{name}.log"

    def _all(self, cases: Sequence[EngineCase], name: str, outcome: Outcome, reason: str) -> None:
        for case in cases:
            record = self.blank(case, name)
            record.outcome, record.reason = outcome, reason
            self.keep(case, name, record)

    def blank(self, case: EngineCase, name: str, batch: int | None = None) -> Record:
        return blank(case, name, self._key(case, name), self.options.command, self.environment, batch)

    def begun(self, case: EngineCase, name: str, note: str) -> None:
        self._say(case, note)
        self.on_event(BackendStarted(case, name))

    def _say(self, case: EngineCase, note: str) -> None:
        self.on_event(CaseStarted(case, self.cases.index(case) + 1, len(self.cases), note))

    def keep(self, case: EngineCase, name: str, record: Record) -> None:
        """Store a record that is complete."""
        self.store.append(record)
        self.records[case, name] = record
        self.on_event(RecordDone(record, reused=False))
