"""The import direction ci -> bench -> reports -> harness -> locks_kernels, no cycles, and no torch where none is needed."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
LAYERS = ("locks_kernels", "harness", "reports", "bench", "ci")  # each may import those before it
NO_TORCH = (
    "harness.record",
    "harness.case",
    "harness.store",
    "harness.environment",
    "harness.presets",
    "reports.rows",
    "reports.table",
    "bench.cli",
    "locks_kernels.shapes",
    "locks_kernels.cost",
    "locks_kernels.selector_cost",
)


def imports(tree: ast.AST, *, at_run_time: bool) -> set[str]:
    """Modules named by absolute imports; `from a import b` counts as a and a.b.

    at_run_time: only what importing the file imports (not in functions, not under TYPE_CHECKING).
    """
    found: set[str] = set()
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0 and node.module, "imports are absolute here"
            found |= {node.module} | {f"{node.module}.{alias.name}" for alias in node.names}
        elif at_run_time and isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
            continue
        elif at_run_time and isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            found |= imports(ast.Module(node.orelse, type_ignores=[]), at_run_time=True)
        else:
            found |= imports(node, at_run_time=at_run_time)
    return found


def sources() -> dict[str, ast.AST]:
    """Every module of the layers by dotted name."""
    trees = {}
    for layer in LAYERS:
        for file in sorted((ROOT / layer).rglob("*.py")):
            parts = file.relative_to(ROOT).with_suffix("").parts
            trees[".".join(part for part in parts if part != "__init__")] = ast.parse(file.read_text(), str(file))
    return trees


def graph(trees: dict[str, ast.AST]) -> dict[str, set[str]]:
    """Module -> what importing it imports: our modules and `torch`; a module's package comes with it."""
    edges = {}
    for module, tree in trees.items():
        named = imports(tree, at_run_time=True)
        ours = {name for name in named if name in trees and name != module}
        parents = {name.rpartition(".")[0] for name in ours} & set(trees) - {module}
        torch = {"torch"} if any(name.split(".")[0] == "torch" for name in named) else set()
        edges[module] = ours | {parent for parent in parents if not module.startswith(f"{parent}.")} | torch
    return edges


def upward(module: str, tree: ast.AST) -> list[str]:
    """Imports of `module`, lazy ones too, that go against the direction."""
    height = LAYERS.index(module.split(".")[0])
    forbidden = LAYERS[height + 1 :]
    return sorted(name for name in imports(tree, at_run_time=False) if name.split(".")[0] in forbidden)


def cycle(edges: dict[str, set[str]]) -> list[str] | None:
    """Modules of one import cycle, or None."""
    done: set[str] = set()

    def visit(module: str, path: list[str]) -> list[str] | None:
        if module in path:
            return [*path[path.index(module) :], module]
        if module in done:
            return None
        for following in sorted(edges.get(module, ())):
            if found := visit(following, [*path, module]):
                return found
        done.add(module)
        return None

    return next((found for module in sorted(edges) if (found := visit(module, []))), None)


def reachable(edges: dict[str, set[str]], module: str) -> set[str]:
    """All that importing a module imports, its parent packages included."""
    seen: set[str] = set()
    waiting = [module, module.rpartition(".")[0]]
    while waiting:
        at = waiting.pop()
        if at not in seen:
            seen.add(at)
            waiting += edges.get(at, ())
    return seen


def test_direction() -> None:
    violations = {module: found for module, tree in sources().items() if (found := upward(module, tree))}
    assert violations == {}


def test_no_cycles() -> None:
    assert cycle(graph(sources())) is None


@pytest.mark.parametrize("module", NO_TORCH)
def test_opens_without_torch(module: str) -> None:
    edges = graph(sources())
    assert module in edges
    assert "torch" not in reachable(edges, module)


def test_the_checks_see_what_they_look_for() -> None:
    lazy = ast.parse("def f():\n    from bench.cli import main\n")
    assert upward("harness.run", lazy) == ["bench.cli", "bench.cli.main"]
    assert imports(lazy, at_run_time=True) == set()
    typed = ast.parse("if TYPE_CHECKING:\n    import torch\nelse:\n    import json\n")
    assert imports(typed, at_run_time=True) == {"json"}
    assert cycle({"a": {"b"}, "b": {"c"}, "c": {"b"}}) == ["b", "c", "b"]
    assert cycle({"a": {"b", "c"}, "b": {"c"}}) is None
    assert "torch" in reachable({"x.a": {"y"}, "y": {"torch"}}, "x.a")
    assert "torch" in reachable(graph(sources()), "locks_kernels.cache")
