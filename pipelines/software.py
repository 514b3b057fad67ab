"""The software that decides numbers: versions of the packages, and of this project's own source files."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from functools import cache
from importlib import metadata
from pathlib import Path

import cluster
import headscan

_PACKAGES = ("torch", "transformers", "accelerate", "ray", "datasets", "lm-eval", "duckdb", "numpy")

#: Folders of this package that print, train the demo model or time things, and decide no stored number.
_NOT_MEASURING = ("cli", "demo", "benches")


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
    """Return the version of headscan and 8 digits of a hash of its measuring code, such as ``0.1.0+3f9a2c1d``.

    The hash covers every Python file of ``headscan``, ``cluster`` and ``pipelines`` (except its command line, demo and
    benchmarks), so any edit of them, even of a comment, is another version; ``analysis`` only stores and judges.
    """
    digest = hashlib.sha256()
    for name, path in _measuring_files():
        # Text, not bytes: a checkout with other line ends is the same code.
        digest.update(f"{name}\n{path.read_text(encoding='utf-8')}\0".encode())
    return f"{headscan.__version__}+{digest.hexdigest()[:8]}"


def _measuring_files() -> Iterator[tuple[str, Path]]:
    """The measuring code: names relative to the package, and paths, in a fixed order."""
    for folder in (Path(headscan.__path__[0]), Path(cluster.__path__[0]), Path(__file__).parent):
        for path in sorted(folder.rglob("*.py")):
            inside = path.relative_to(folder)
            if folder.name != "pipelines" or inside.parts[0] not in _NOT_MEASURING:
                yield f"{folder.name}/{inside.as_posix()}", path
