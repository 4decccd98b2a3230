"""Several stores -> a folder of pages for static hosting: an index, a page per run, and one page of all runs with history."""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

from harness.errors import UserError
from harness.fidelity_record import FidelityRecord
from harness.record import Record
from harness.store import files_of, load
from reports import fidelity_view, page
from reports.evidence import outcome_counts
from reports.panels import all_entries, panels
from reports.summary import summary

RAW_FILE = "records.jsonl"


@dataclass(frozen=True)
class Run:
    """One file of records: what the index says about it."""

    slug: str
    rows: int
    machines: str
    commits: str
    first: str
    last: str
    outcomes: str
    headline: str


def write(stores: Iterable[Path | str], folder: Path, title: str, on_note: Callable[[str], None]) -> Path:
    """Write the site; returns its index.  Pages of other runs that lie there already are left alone."""
    files = files_of(stores)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / page.PLOTLY_FILE).write_text(page.plotly_source(), encoding="utf-8")
    runs, everything = [], []
    for slug, file in zip(_slugs(files), files, strict=True):
        records = load([file], on_note)
        if not records:
            on_note(f"{file} holds no records; it has no page")
            continue
        everything.append(file)
        target = folder / "runs" / slug
        _page(records, fidelity_view.load([file], on_note), target, f"{title}: {slug}", "../..", RAW_FILE)
        shutil.copyfile(file, target / RAW_FILE)
        runs.append(_run(slug, records))
    if not runs:
        raise UserError("no records in these stores, so there is nothing to report; `locks-bench latency` makes some")
    _page(load(everything, on_note), fidelity_view.load(everything, on_note), folder / "all", f"{title}: all runs", "..", None)
    options = page.Options(plotly="directory", title=title)
    template = page.environment().get_template("index.html.j2")
    index = folder / "index.html"
    runs.sort(key=lambda run: (run.last, run.slug), reverse=True)
    index.write_text(template.render(options=options, runs=runs, **page.chrome(options) | {"plotly": ""}), encoding="utf-8")
    return index


def _page(records: list[Record], fidelity: list[FidelityRecord], target: Path, title: str, root: str, raw: str | None) -> None:
    options = page.Options(plotly="directory", title=title, assets=root, home=f"{root}/index.html", raw=raw)
    target.mkdir(parents=True, exist_ok=True)
    (target / "index.html").write_text(page.render(records, options, fidelity), encoding="utf-8")


def _run(slug: str, records: list[Record]) -> Run:
    found = panels(records)
    entries = list(all_entries(found))
    commits = sorted({str(entry.row["commit"])[:10] for entry in entries if entry.row["commit"]})
    return Run(
        slug,
        len(entries),
        ", ".join(sorted({panel.machine for panel in found})),
        ", ".join(commits) or "not known",
        min(entry.row["time"] for entry in entries),
        max(entry.row["time"] for entry in entries),
        outcome_counts(entry for entry in entries if entry.current),
        summary(found[0]).headline,
    )


def _slugs(files: list[Path]) -> list[str]:
    """Folder names for runs: that of the store, or of the file if it is not called like the one of every store."""
    slugs: list[str] = []
    for file in files:
        parts = file.resolve().parts
        name = parts[-2] if file.name == RAW_FILE and len(parts) > 1 else file.stem
        slug = re.sub(r"[^A-Za-z0-9._-]+", "-", name).strip("-.") or "run"
        taken = sum(known == slug or re.fullmatch(re.escape(slug) + r"-\d+", known) is not None for known in slugs)
        slugs.append(f"{slug}-{taken + 1}" if taken else slug)
    return slugs
