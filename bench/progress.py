"""The events of a sweep -> a progress bar on stderr, and what there is to say at its end."""

from __future__ import annotations

import time
from collections.abc import Callable
from types import TracebackType

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, ProgressColumn, Task, TextColumn
from rich.progress import Progress as Bar
from rich.text import Text

from harness.case import Case
from harness.run import BackendStarted, CaseStarted, Event, LeftOut, RecordDone
from reports.table import short_size


class TimeLeft(ProgressColumn):
    """Time left at the pace of the rows measured so far; rows found in the store come at once and say nothing."""

    def __init__(self, total: int, clock_s: Callable[[], float] = time.monotonic) -> None:
        super().__init__()
        self.clock_s, self.remaining, self.measured = clock_s, total, 0
        self.start = self.latest = clock_s()

    def record_done(self, reused: bool) -> None:
        self.remaining -= 1
        self.measured += not reused
        self.latest = self.clock_s()

    def text(self) -> str:
        """The time left in words."""
        if not self.measured:
            return "time left not known yet"
        pace = (self.latest - self.start) / self.measured
        seconds = max(0.0, pace * self.remaining - (self.clock_s() - self.latest))
        return f"about {seconds:.0f} s left" if seconds < 90 else f"about {seconds / 60:.0f} min left"

    def render(self, task: Task) -> Text:
        return Text(self.text())


class Progress:
    """A context manager; `on_event` is handed to run_sweep.  `total`: records expected.

    On a terminal one line shows what is running and the time left; in a pipe each case and its memory plan is one line.
    """

    def __init__(self, total: int) -> None:
        self.console = Console(stderr=True)
        self.left = TimeLeft(total)
        columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), self.left)
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
                self.left.record_done(reused)
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
