"""The project's source files and their imports, for tests of its structure."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from types import ModuleType

ROOT = Path(__file__).parents[1]
#: Files next to the repository that are no part of it; tests that need them are skipped where they are missing.
SHARED = ROOT.parent / "shared"

#: Parts of the package, and their folders; the instrument has all other folders, and the files at the top.
PARTS = {
    "instrument": (),
    "cluster": ("cluster",),
    "numbers": ("store", "ranking", "verdicts", "plans", "report"),
    "jobs": ("settings", "texts", "engine", "runs", "steps", "export", "study", "cli", "demo"),
}


@cache
def modules() -> dict[str, Path]:
    """Every module of the package by its name."""
    found = {}
    for path in (ROOT / "headscan").rglob("*.py"):
        found[".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")] = path
    assert len(found) > 200
    return found


def part_of(module: str) -> str:
    """The part of the package that holds a module."""
    folder = f"{module}.".split(".")[1]
    return next((part for part, folders in PARTS.items() if folder in folders), "instrument")


def re_exports(module: ModuleType) -> dict[str, str]:
    """Names that a module imports ``as`` themselves, for others, and where they come from."""
    tree = ast.parse(Path(str(module.__file__)).read_text("utf-8"))
    return {
        alias.asname: f"{node.module}.{alias.name}"
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
        if alias.asname
    }


def public_names(module: ModuleType) -> set[str]:
    """The re-exports of a module, and its own classes and functions without an underscore."""
    own = {name for name, value in vars(module).items() if getattr(value, "__module__", None) == module.__name__}
    return {name for name in own if not name.startswith("_")} | re_exports(module).keys()


@cache
def imports_of(path: Path, *, running: bool = False, at_once: bool = False) -> frozenset[str]:
    """Names of the modules that a file imports, anywhere in it.

    Args:
        path: The file.
        running: Leave out imports under ``if TYPE_CHECKING``.
        at_once: Leave out these, and those of functions: only what an import of the file imports is left.
    """
    names: set[str] = set()
    tree = ast.parse(path.read_text(encoding="utf-8"))
    for node in tree.body if at_once else _nodes(tree, running):
        if isinstance(node, ast.Import):
            names.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module and node.level == 0:
            inside = {f"{node.module}.{alias.name}" for alias in node.names}
            submodules = inside & modules().keys()
            names |= submodules
            if submodules != inside:
                names.add(node.module)
    return frozenset(names)


def _nodes(node: ast.AST, running: bool) -> Iterator[ast.AST]:
    if running and isinstance(node, ast.If) and getattr(node.test, "id", "") == "TYPE_CHECKING":
        return
    yield node
    for child in ast.iter_child_nodes(node):
        yield from _nodes(child, running)


def cycles(graph: dict[str, set[str]]) -> list[list[str]]:
    """Groups of nodes that reach each other."""
    reached = {start: _reached(graph, start) for start in graph}
    groups = {frozenset({b for b in reached[a] if a in reached.get(b, ())}) for a in graph if a in reached[a]}
    return sorted(sorted(group) for group in groups)


def _reached(graph: dict[str, set[str]], start: str) -> set[str]:
    seen: set[str] = set()
    waiting = list(graph[start])
    while waiting:
        node = waiting.pop()
        if node not in seen:
            seen.add(node)
            waiting.extend(graph.get(node, ()))
    return seen
