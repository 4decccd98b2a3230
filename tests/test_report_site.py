"""The folder of pages for several runs, and figures as files."""

from __future__ import annotations

import hashlib
from pathlib import Path

import pytest
from report_fakes import every_outcome, grid, two_runs
from report_page import FIGURES, Page
from typer.testing import CliRunner

from bench.cli import app
from harness.record import Record
from reports import draw, site

RUNNER = CliRunner()


def store(folder: Path, records: list[Record]) -> Path:
    folder.mkdir(parents=True)
    (folder / "records.jsonl").write_text("".join(record.to_json() + "\n" for record in records))
    return folder


def test_a_site_has_an_index_a_page_per_run_and_all_runs_together(tmp_path: Path) -> None:
    runs = two_runs()
    stores = [store(tmp_path / "nightly" / day, part) for day, part in (("monday", runs[:8]), ("tuesday", runs[8:]))]
    notes: list[str] = []
    index = site.write(stores, tmp_path / "site", "Nightly <runs>", notes.append)
    text = index.read_text()
    assert "Nightly &lt;runs&gt;" in text and "<runs>" not in text
    assert text.index("tuesday") < text.index("monday")  # the latest first
    for day, folder in zip(("monday", "tuesday"), stores, strict=True):
        page = tmp_path / "site" / "runs" / day / "index.html"
        assert tuple(Page(page.read_text()).figures) == FIGURES
        assert Page(page.read_text()).fetched == ["../../plotly.min.js"]
        assert (page.parent / "records.jsonl").read_bytes() == (folder / "records.jsonl").read_bytes()
    together = Page((tmp_path / "site" / "all" / "index.html").read_text())
    assert together.data()["count"] == 16 and together.data()["panels"][0]["figures"]["history"]["slices"]
    assert together.fetched == ["../plotly.min.js"] and (tmp_path / "site" / "plotly.min.js").stat().st_size > 1_000_000
    assert notes == []


def test_stores_of_the_same_name_have_pages_of_their_own(tmp_path: Path) -> None:
    stores = [store(tmp_path / name / "results", grid()[:4]) for name in ("a", "b")]
    site.write(stores, tmp_path / "site", "t", lambda note: None)
    assert sorted(path.name for path in (tmp_path / "site" / "runs").iterdir()) == ["results", "results-2"]


def test_an_empty_store_is_noted_and_has_no_page(tmp_path: Path) -> None:
    notes: list[str] = []
    site.write([store(tmp_path / "full", grid()[:4]), store(tmp_path / "empty", [])], tmp_path / "site", "t", notes.append)
    assert "empty" in notes[0] and not (tmp_path / "site" / "runs" / "empty").exists()


def test_figures_as_files_are_the_same_twice(tmp_path: Path) -> None:
    records = every_outcome()[:16]  # 8K with all batches, and two ways to fail
    files = list(draw.write(records, tmp_path / "one"))
    assert {file.suffix for file in files} == {".png", ".svg"} and len(files) == len(set(files))
    for name in draw.DRAWN:
        assert any(f"-{name}-" in file.name for file in files), name
    again = list(draw.write(records, tmp_path / "two"))
    assert [digest(file) for file in files] == [digest(file) for file in again]


def test_a_legend_of_many_backends_stands_beside_the_axes() -> None:
    from matplotlib.figure import Figure

    for count, beside in ((3, False), (20, True)):
        figure = Figure(figsize=(7.2, 4.2), layout="constrained")
        axes = figure.subplots()
        for index in range(count):
            axes.plot([1, 2], [1, 2], label=f"backend {index}")
        draw._legend(axes)
        assert bool(figure.legends) == beside and (axes.get_legend() is None) == beside
        figure.draw_without_rendering()
        if beside:
            assert figure.legends[0].get_window_extent().x0 >= axes.get_window_extent().x1
            assert figure.legends[0].get_window_extent().y0 >= 0


def digest(file: Path) -> str:
    return hashlib.sha256(file.read_bytes()).hexdigest()


def test_command_writes_page_site_and_figures(tmp_path: Path) -> None:
    folder = store(tmp_path / "run", grid()[:8])
    page = RUNNER.invoke(app, ["report", str(folder), "-o", str(tmp_path / "r.html"), "--plotly", "directory"])
    assert page.exit_code == 0, page.output
    assert (tmp_path / "plotly.min.js").exists() and (tmp_path / "r.html").stat().st_size < 500_000
    made = RUNNER.invoke(app, ["report", str(folder), "-o", str(tmp_path / "site"), "--figures", str(tmp_path / "figures")])
    assert made.exit_code == 0, made.output
    assert (tmp_path / "site" / "index.html").exists() and len(list((tmp_path / "figures").iterdir())) >= 10
    few = ["--figures", str(tmp_path / "few"), "--backends", "fa3,locks"]
    assert RUNNER.invoke(app, ["report", str(folder), "-o", str(tmp_path / "r.html"), *few]).exit_code == 0
    text = next((tmp_path / "few").glob("*-latency-*.svg")).read_text()
    assert "<!-- locks -->" in text and "<!-- flashinfer -->" not in text


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--figures", "f", "--backends", "fa3,mine"], "no record of mine"),
        (["--plotly", "somewhere"], "use one of inline, cdn, directory"),
        (["-o", "/dev/null/report.html"], "cannot be written"),
    ],
)
def test_bad_input_says_what_to_do(tmp_path: Path, arguments: list[str], message: str) -> None:
    done = RUNNER.invoke(app, ["report", str(store(tmp_path / "run", grid()[:4])), *arguments])
    assert message in str(done.exception)
