"""`locks-bench list`: what can be named on the command line.  Imports no torch."""

from __future__ import annotations

from typing import Annotated, Any

import typer
from rich import box
from rich.console import Group
from rich.markup import escape
from rich.table import Table

from bench import output
from bench.request import LEVELS
from bench.suite import load_suite
from bench.suite import names as suite_names
from harness import backends, presets
from harness.engine import cells as engine
from harness.libraries import BY_BACKEND, Library


def list_(
    json_to: Annotated[str | None, typer.Option("--json", metavar="FILE", help="Write it as JSON; - is stdout.")] = None,
) -> None:
    """List backends with their availability, model presets with their geometry, and suites."""
    found, engines, models, suites = backend_rows(), engine_rows(), model_rows(), suite_rows()
    tables = Group(
        _table("Backends", found),
        _table("Backends of --level engine", engines),
        _table("Models (--model), or a shape such as 32x8x128", models),
        _table("Suites (sweep SUITE), or a TOML file", suites),
    )
    output.show({"backends": found, "engine_backends": engines, "models": models, "suites": suites}, tables, json_to)


def backend_rows() -> list[dict[str, Any]]:
    """Every backend, with the library behind it and what is missing on this machine."""
    rows = []
    for name in backends.names():
        library = BY_BACKEND.get(name)
        package, version, missing = _installed(library) if library else _ask_plug_in(name)
        rows.append({"name": name, "library": package, "version": version, "available": missing is None, "missing": missing})
    return rows


def engine_rows() -> list[dict[str, Any]]:
    """Every attention backend of vLLM that level engine measures, with its name there and the devices it is for."""
    return [
        {
            "name": backend.name,
            "in_vllm": ", ".join(backend.attention.values()),
            "devices": ", ".join(backend.attention),
            "version": backend.version(),
            "missing": backend.unavailable(next(iter(backend.attention))),
        }
        for backend in engine.BACKENDS.values()
    ]


def _installed(library: Library) -> tuple[str | None, str | None, str | None]:
    return library.package, library.version(), library.missing()


def _ask_plug_in(name: str) -> tuple[str | None, str | None, str | None]:
    """Library, version and what is missing of a backend that came with another package; it may import what it likes."""
    backend = backends.make(name)
    try:
        return None, backend.version(), backend.unavailable()
    except Exception as error:
        return None, backend.version(), f"broken: {type(error).__name__}: {error}"


def model_rows() -> list[dict[str, Any]]:
    """Every preset with its geometry."""
    return [
        {
            "name": model.name,
            "layers": model.layers,
            "query_heads": model.query_heads,
            "kv_heads": model.kv_heads,
            "group": model.query_heads // model.kv_heads,
            "head_dim": model.head_dim,
            "hidden": model.hidden,
            "mlp": model.mlp,
            "vocabulary": model.vocabulary,
            "levels": [level for level in LEVELS if level not in dict(model.unsupported)],
        }
        for model in presets.models().values()
    ]


def suite_rows() -> list[dict[str, Any]]:
    """Every suite that comes with the package."""
    loaded = [load_suite(name) for name in suite_names()]
    return [{"name": suite.name, "device": suite.device or "any", "what": suite.title} for suite in loaded]


def _table(title: str, rows: list[dict[str, Any]]) -> Table:
    table = Table(title=title, box=box.SIMPLE_HEAD, title_justify="left")
    for name, value in rows[0].items():
        table.add_column(name.replace("_", " "), justify="right" if isinstance(value, int) and value > 1 else "left")
    for row in rows:
        table.add_row(*(escape(_cell(value)) for value in row.values()))
    return table


def _cell(value: object) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, list):
        return ", ".join(map(str, value))
    return "-" if value is None else str(value)
