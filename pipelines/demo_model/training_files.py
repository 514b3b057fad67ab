"""Training files of the demo model: the standard library without the held-out modules, and the source of installed
packages, without files that share much text with a held-out module (vendored copies, backports).
"""

from __future__ import annotations

import hashlib
import sysconfig
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np

from headscan.texts.stdlib_files import NOT_LIBRARY, held_out_files, standard_library_files

#: Packages whose source is used in training in addition to the standard library: varied, hand-written Python.
TRAINING_PACKAGES = """
    torch transformers accelerate ray datasets lm_eval huggingface_hub numpy scipy sklearn pandas networkx sympy mpmath
    nltk mypy pip setuptools pygments rich pydantic aiohttp anyio joblib fsspec jinja2 narwhals pytest _pytest filelock
    requests urllib3 yaml click attr multiprocess virtualenv tqdm regex typer
""".split()


def training_files(
    packages: Sequence[str] = TRAINING_PACKAGES, *, package_limit: int = 12_000_000, seed: int = 0
) -> Iterator[tuple[str, Path]]:
    """Yield ``(package, file)`` of the training files, the standard library as ``stdlib``. Of each installed package,
    at most ``package_limit`` bytes are drawn at random with ``seed``.
    """
    held_out = set(held_out_files())
    held_out_lines = {line for path in held_out for line in _long_lines(path)}
    seen: set[bytes] = set()

    def fresh(path: Path) -> bool:
        content = path.read_bytes()
        digest = hashlib.sha256(content).digest()
        if digest in seen or len(content) < 200:
            return False
        seen.add(digest)
        lines = list(_long_lines(path))
        return sum(line in held_out_lines for line in lines) <= 0.1 * len(lines)

    for path in standard_library_files():
        if path not in held_out and fresh(path):
            yield "stdlib", path
    site = Path(sysconfig.get_path("purelib"))
    for package in packages:
        files = sorted(p for p in (site / package).rglob("*.py") if not NOT_LIBRARY & set(p.relative_to(site).parts))
        taken = 0
        for index in np.random.default_rng(seed).permutation(len(files)):
            if taken > package_limit:
                break
            if fresh(files[index]):
                taken += files[index].stat().st_size
                yield package, files[index]


def _long_lines(path: Path) -> Iterator[str]:
    """Yield the lines of 30 or more characters, which are long enough to identify shared text."""
    for line in path.read_text(encoding="utf-8", errors="replace").splitlines():
        if len(line.strip()) >= 30:
            yield line.strip()
