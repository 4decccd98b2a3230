"""`locks-bench report`: stored records as one page for people who decide, as a site of runs, and as figures for papers."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from bench import arguments, output
from harness.errors import UserError
from harness.store import load

PLOTLY = ("inline", "cdn", "directory")


def report(
    stores: Annotated[list[str], typer.Argument(metavar="STORE...", help="Stores, folders of stores, or .jsonl files.")],
    to: Annotated[
        str,
        typer.Option("--output", "-o", metavar="PATH", help="A page (NAME.html), or a folder for a site with a page per run."),
    ] = "report.html",
    plotly: Annotated[
        str, typer.Option(help="Where pages get plotly from: inline (works offline), cdn, directory (a file beside the page).")
    ] = "inline",
    figures: Annotated[
        str | None,
        typer.Option("--figures", metavar="DIR", help="Write the figures there too, as PNG and SVG (needs matplotlib)."),
    ] = None,
    backends: Annotated[str | None, typer.Option(help="Only these in the files of --figures, such as fa3,locks.")] = None,
    title: Annotated[str, typer.Option(help="Heading of the page.")] = "LOCKS decode benchmark",
) -> None:
    """Write the report of stored records.  Needs no GPU and measures nothing."""
    if plotly not in PLOTLY:
        raise UserError(f"--plotly {plotly!r} is not known; use one of {', '.join(PLOTLY)}")
    records = load(stores, output.say)
    drawn = {record.backend for record in records} if backends is None else set(arguments.names(backends))
    if missing := drawn - {record.backend for record in records}:
        raise UserError(f"no record of {', '.join(sorted(missing))}; `locks-bench show` lists what a store has")

    from reports import draw, fidelity_view, page, site

    try:
        if to.endswith((".html", ".htm")):
            options = page.Options(plotly=plotly, title=title)  # type: ignore[arg-type]
            text = page.render(records, options, fidelity_view.load(stores, output.say))
            target = Path(to)
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_text(text, encoding="utf-8")
            if plotly == "directory":
                (target.parent / page.PLOTLY_FILE).write_text(page.plotly_source(), encoding="utf-8")
        else:
            target = site.write(stores, Path(to), title, output.say)
        output.say(f"{target}: {len(records)} rows, {target.stat().st_size / 1e6:.1f} MB")
        if figures:
            for file in draw.write([record for record in records if record.backend in drawn], Path(figures)):
                output.say(str(file))
    except OSError as error:
        raise UserError(f"{error.filename or to} cannot be written ({error.strerror}); choose another place with -o") from error
