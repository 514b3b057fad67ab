"""Modules of the standard library as texts for the demo model.

The running interpreter's standard library is real text that every machine has. A fixed set of its modules is held out
*by name*; the demo scans and evaluates only those. `pipelines/demo_model/training_files.py` lists the training data.
"""

from __future__ import annotations

import sysconfig
from pathlib import Path

LIBRARY = Path(sysconfig.get_path("stdlib"))

#: Standard-library modules that are not in the training data. All exist since Python 3.11.
HELD_OUT_MODULES = """
    argparse calendar cmd configparser csv difflib dis fractions ftplib gettext heapq imaplib mailbox optparse
    pickletools plistlib pprint queue random sched shlex smtplib statistics tarfile textwrap wave
""".split()

#: Modules of the training data with much text in common with a held-out one, ``wave``.
_NEAR_HELD_OUT = {"aifc.py", "chunk.py", "sunau.py"}

#: Folders of a Python installation that do not belong to the library.
NOT_LIBRARY = {"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__"}


def standard_library_files() -> list[Path]:
    return sorted(path for path in LIBRARY.rglob("*.py") if not NOT_LIBRARY & set(path.relative_to(LIBRARY).parts))


def held_out_files() -> list[Path]:
    candidates = (LIBRARY / f"{name}.py" for name in HELD_OUT_MODULES)
    return [path for path in candidates if path.is_file()]


def seen_modules() -> list[Path]:
    """Return the single-file modules of the standard library that are not held out and share no text with those that
    are, sorted by name: they resemble the held-out modules, while packages such as ``encodings`` are mostly tables.
    """
    left_out = {*held_out_files(), *(LIBRARY / name for name in _NEAR_HELD_OUT)}
    return [path for path in standard_library_files() if path.parent == LIBRARY and path not in left_out]
