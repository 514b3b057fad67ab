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

#: Folders of a Python installation that do not belong to the library.
NOT_LIBRARY = {"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__"}


def standard_library_files() -> list[Path]:
    return sorted(path for path in LIBRARY.rglob("*.py") if not NOT_LIBRARY & set(path.relative_to(LIBRARY).parts))


def held_out_files() -> list[Path]:
    candidates = (LIBRARY / f"{name}.py" for name in HELD_OUT_MODULES)
    return [path for path in candidates if path.is_file()]


def seen_modules() -> list[Path]:
    """Return the single-file modules of the standard library that are not held out, sorted by name: they resemble the
    held-out modules, while packages such as ``encodings`` are mostly tables.
    """
    held_out = set(held_out_files())
    return [path for path in standard_library_files() if path.parent == LIBRARY and path not in held_out]
