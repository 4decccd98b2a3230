"""The events of a sweep -> a progress bar on stderr, and what there is to say at its end."""

from __future__ import annotations

from types import TracebackType

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeRemainingColumn
from rich.progress import Progress as Bar

from harness.case import Case
from harness.run import BackendStarted, CaseStarted, Event, LeftOut, RecordDone
from reports.table import short_size


class Progress:
    """A context manager; `on_event` is handed to run_sweep.  `total`: records expected.

    On a terminal one line shows what is running and the time left; in a pipe each case and its memory plan is one line.
    """

    def __init__(self, total: int) -> None:
        self.console = Console(stderr=True)
        columns = (
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("left"),
            TimeRemainingColumn(),
        )
        self.bar = Bar(*columns, console=self.console, transient=True, disable=not self.console.is_terminal)
        self.task = self.bar.add_task("starting", total=total)
        self.measured = self.reused = 0
        self.left_out: list[Case] = []

    def __enter__(self) -> Progress:
        self.bar.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.bar.stop()

    def on_event(self, event: Event) -> None:
        """Show one event."""
        match event:
            case CaseStarted(case=case, index=index, total=total, plan_text=plan):
                self.console.print(f"[{index}/{total}] {describe(case)}: {plan}", markup=False, highlight=False, soft_wrap=True)
                self.bar.update(self.task, description=describe(case))
            case BackendStarted(case=case, backend=backend):
                self.bar.update(self.task, description=f"{describe(case)} {backend}")
            case RecordDone(reused=reused):
                self.reused += reused
                self.measured += not reused
                self.bar.advance(self.task)
            case LeftOut(case=case):
                self.left_out.append(case)

    def closing_lines(self, store: str) -> list[str]:
        """What happened, for stderr: what was measured, reused and left out, and where the records are."""
        lines = [f"{self.measured} rows measured, {self.reused} found in the store; records are in {store}"]
        if self.left_out:
            cells = ", ".join(map(describe, self.left_out))
            lines.append(f"left out by --time-budget: {cells}; run the same command again to go on")
        return lines


def describe(case: Case) -> str:
    """A cell in a few words: "llama-3.1-8b attention 8K x 1"."""
    return f"{case.model.name} {case.level} {short_size(case.ctx)} x {case.batch}"
