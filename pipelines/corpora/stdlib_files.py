"""Training files and held-out modules of the demo model.

The running interpreter's standard library is real text that every machine has. A fixed set of its modules is held out
*by name*; the demo scans and evaluates only those. Training also uses the source of installed packages, without files
that share much text with a held-out module (vendored copies, backports).
"""

from __future__ import annotations

import hashlib
import sysconfig
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np

#: Standard-library modules that are not in the training data. All exist since Python 3.11.
HELD_OUT_MODULES = (
    "argparse",
    "calendar",
    "cmd",
    "configparser",
    "csv",
    "difflib",
    "dis",
    "fractions",
    "ftplib",
    "gettext",
    "heapq",
    "imaplib",
    "mailbox",
    "optparse",
    "pickletools",
    "plistlib",
    "pprint",
    "queue",
    "random",
    "sched",
    "shlex",
    "smtplib",
    "statistics",
    "tarfile",
    "textwrap",
    "wave",
)

#: Packages whose source is used in training in addition to the standard library: varied, hand-written Python.
TRAINING_PACKAGES = """
    torch transformers accelerate ray datasets lm_eval huggingface_hub numpy scipy sklearn pandas networkx sympy mpmath
    nltk mypy pip setuptools pygments rich pydantic aiohttp anyio joblib fsspec jinja2 narwhals pytest _pytest filelock
    requests urllib3 yaml click attr multiprocess virtualenv tqdm regex typer
""".split()

#: Folders of a Python installation that do not belong to the library.
_NOT_LIBRARY = {"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__"}


def standard_library_files() -> list[Path]:
    root = Path(sysconfig.get_path("stdlib"))
    return sorted(path for path in root.rglob("*.py") if not _NOT_LIBRARY & set(path.relative_to(root).parts))


def held_out_files() -> list[Path]:
    root = Path(sysconfig.get_path("stdlib"))
    candidates = (root / f"{name}.py" for name in HELD_OUT_MODULES)
    return [path for path in candidates if path.is_file()]


def seen_modules() -> list[Path]:
    """Return the single-file modules of the standard library that are not held out, sorted by name: they resemble the
    held-out modules, while packages such as ``encodings`` are mostly tables.
    """
    root, held_out = Path(sysconfig.get_path("stdlib")), set(held_out_files())
    return [path for path in standard_library_files() if path.parent == root and path not in held_out]


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
        files = sorted(p for p in (site / package).rglob("*.py") if not _NOT_LIBRARY & set(p.relative_to(site).parts))
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
