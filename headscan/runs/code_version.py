"""The versions of the software that decides numbers: packages, and this code, which is not imported for that."""

from __future__ import annotations

import ast
import hashlib
from collections.abc import Iterator
from functools import cache
from importlib import metadata
from pathlib import Path
from typing import Any

import headscan

#: Folders and files of the package that decide no stored number: they store and judge, or are for users and tests.
_NOT_MEASURING = {
    "store",
    "ranking",
    "verdicts",
    "plans",
    "report",
    "cli",
    "demo",
    "architectures.py",
    "text_tables.py",
}

#: Nodes that can have a docstring, and the fields of nodes that hold statements, handlers or cases.
_DOCUMENTED = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
_BLOCKS = ("body", "orelse", "finalbody", "handlers", "cases")


@cache
def code_version() -> str:
    """Return the version and 8 digits of the code's hash, such as ``0.1.0+3f9a2c1d``.

    The hash covers the statements of every Python file but those that only store and judge, the command line, the demo
    and the code for tests. Comments, docstrings and line breaks do not count.
    """
    digest = hashlib.sha256()
    for name, path in _measuring_files():
        digest.update(f"{name}\n{_statements(path.read_text(encoding='utf-8'))}\0".encode())
    return f"{headscan.__version__}+{digest.hexdigest()[:8]}"


def _statements(source: str) -> str:
    tree = ast.parse(source)
    blocks: list[ast.AST] = [tree]
    # Only statements hold statements, so the expressions, most of a tree, need no visit.
    while blocks:
        node = blocks.pop()
        if isinstance(node, _DOCUMENTED) and ast.get_docstring(node, clean=False) is not None:
            del node.body[0]
        for name in _BLOCKS:
            blocks += getattr(node, name, ())
    return ast.dump(tree)


def _measuring_files() -> Iterator[tuple[str, Path]]:
    """Yield relative names and paths of the measuring code, in fixed order."""
    root = Path(headscan.__path__[0])
    for path in sorted(root.rglob("*.py")):
        inside = path.relative_to(root)
        if inside.parts[0] not in _NOT_MEASURING:
            yield inside.as_posix(), path


_PACKAGES = ("torch", "transformers", "accelerate", "ray", "datasets", "lm-eval", "duckdb", "numpy")


def package_versions() -> dict[str, str]:
    """Return the installed versions of the packages that decide numbers."""
    versions = {}
    for name in _PACKAGES:
        try:
            versions[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return versions


def software_of(code_files_hash: str | None) -> dict[str, Any]:
    """Return the provenance that is known before the model is loaded; the hash is of the model's own code files."""
    return {"packages": package_versions(), "code_version": code_version(), "code_files_hash": code_files_hash}
