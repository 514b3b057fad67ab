"""Copies of stores for tests that write into them."""

from __future__ import annotations

import shutil
from pathlib import Path

from headscan.store.connection import checked_file


def copy_store(source: Path, target: Path) -> Path:
    """Copy a store that this process wrote or checked, and return the path of the copy, a file or one in the folder.

    The check of a store's definitions takes 60 to 100 ms of CPU, and copies have the definitions of their source.
    """
    copy = Path(shutil.copy(source, target)).absolute()
    checked_file(copy).remember(copy)
    return copy
