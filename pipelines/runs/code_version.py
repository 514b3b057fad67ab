"""The version of the code that decides numbers, without importing that code."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from types import CodeType

import headscan

#: Folders with measuring code, by their path in the package, and their subfolders that decide no stored number.
_MEASURING = {
    ".": ("analysis", "cluster", "pipelines", "architectures.py"),
    "cluster": (),
    "pipelines": ("cli", "demo"),
}


@cache
def code_version() -> str:
    """Return the version and 8 digits of the code's hash, such as ``0.1.0+3f9a2c1d``.

    The hash covers what Python compiles of every file of ``headscan``, ``headscan.cluster`` and ``headscan.pipelines``
    except the command line, the demo and the code for tests. Comments, docstrings, assertions and line breaks do not
    count; another minor version of Python gives another hash. ``headscan.analysis`` only stores and judges.
    """
    digest = hashlib.sha256()
    for name, path in _measuring_files():
        digest.update(f"{name}\n{_compiled(path)}\0".encode())
    return f"{headscan.__version__}+{digest.hexdigest()[:8]}"


def _compiled(path: Path) -> str:
    # Compiling takes a quarter of the time of a walk over the syntax tree.
    return _facts(compile(path.read_bytes(), "", "exec", dont_inherit=True, optimize=2))


def _facts(value: object) -> str:
    """Return all of a constant or of compiled code that does not depend on its place in the file."""
    if isinstance(value, CodeType):
        names = (value.co_name, value.co_names, value.co_varnames, value.co_freevars, value.co_cellvars)
        counts = (value.co_argcount, value.co_posonlyargcount, value.co_kwonlyargcount, value.co_flags)
        own = (names, counts, value.co_code, value.co_exceptiontable)
        return f"{own!r}{_facts(value.co_consts)}"
    if isinstance(value, tuple):
        return f"({', '.join(map(_facts, value))})"
    # The order of a set of texts differs between processes.
    return f"{{{', '.join(sorted(map(_facts, value)))}}}" if isinstance(value, frozenset) else repr(value)


def _measuring_files() -> Iterator[tuple[str, Path]]:
    """Yield relative names and paths of the measuring code, in fixed order."""
    root = Path(headscan.__path__[0])
    for folder, left_out in _MEASURING.items():
        for path in sorted((root / folder).rglob("*.py")):
            # In a checkout the folders inside the package are links.
            if path.relative_to(root / folder).parts[0] not in left_out:
                yield path.relative_to(root).as_posix(), path
