"""Versions of the packages and source files that decide numbers."""

from __future__ import annotations

import ast
import hashlib
from collections.abc import Iterator
from functools import cache
from importlib import metadata
from pathlib import Path

import headscan

_PACKAGES = ("torch", "transformers", "accelerate", "ray", "datasets", "lm-eval", "duckdb", "numpy")

#: Folders with measuring code, by their path in the package, and their subfolders that decide no stored number.
_MEASURING = {
    ".": ("analysis", "cluster", "pipelines", "gpu_proof", "testing"),
    "cluster": (),
    "pipelines": ("cli", "demo"),
}


def package_versions() -> dict[str, str]:
    """Return the installed versions of the packages that decide numbers."""
    versions = {}
    for name in _PACKAGES:
        try:
            versions[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return versions


@cache
def code_version() -> str:
    """Return the version and 8 digits of the code's hash, such as ``0.1.0+3f9a2c1d``.

    The hash covers the statements of every Python file of ``headscan``, ``headscan.cluster`` and ``headscan.pipelines``
    except the command line, the demo and the code for tests. Comments, docstrings and line breaks do not count.
    ``headscan.analysis`` only stores and judges.
    """
    digest = hashlib.sha256()
    for name, path in _measuring_files():
        digest.update(f"{name}\n{_statements(path.read_text(encoding='utf-8'))}\0".encode())
    return f"{headscan.__version__}+{digest.hexdigest()[:8]}"


def _statements(source: str) -> str:
    """Return the syntax tree of a file without docstrings."""
    tree = ast.parse(source)
    for node in ast.walk(tree):
        if not isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            continue
        if ast.get_docstring(node, clean=False) is not None:
            del node.body[0]
    return ast.dump(tree)


def _measuring_files() -> Iterator[tuple[str, Path]]:
    """The measuring code: relative names and paths, in fixed order."""
    root = Path(headscan.__path__[0])
    for folder, left_out in _MEASURING.items():
        for path in sorted((root / folder).rglob("*.py")):
            # In a checkout the folders inside the package are links.
            if path.relative_to(root / folder).parts[0] not in left_out:
                yield path.relative_to(root).as_posix(), path
