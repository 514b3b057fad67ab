"""Versions of the packages and source files that decide numbers."""

from __future__ import annotations

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
    """Return the version and code hash, such as ``0.1.0+3f9a2c1d``.

    The hash has 8 digits and covers the measuring code.

    The hash covers every Python file of ``headscan``, ``headscan.cluster`` and ``headscan.pipelines`` except the
    command line, the demo and the code for tests. Any edit of them, even of a comment, is another version.
    ``headscan.analysis`` only stores and judges.
    """
    digest = hashlib.sha256()
    for name, path in _measuring_files():
        # Text, not bytes, so that other line ends give the same hash.
        digest.update(f"{name}\n{path.read_text(encoding='utf-8')}\0".encode())
    return f"{headscan.__version__}+{digest.hexdigest()[:8]}"


def _measuring_files() -> Iterator[tuple[str, Path]]:
    """The measuring code: relative names and paths, in fixed order."""
    root = Path(headscan.__path__[0])
    for folder, left_out in _MEASURING.items():
        for path in sorted((root / folder).rglob("*.py")):
            # In a checkout the folders inside the package are links.
            if path.relative_to(root / folder).parts[0] not in left_out:
                yield path.relative_to(root).as_posix(), path
