"""Temporary folders that name the process that owns them, so that a later run can remove those of dead processes."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from headscan.analysis.atomic_files import write_text
from headscan.analysis.store.processes import has_ended, this_process

_OWNER = "owner"


def own(folder: Path) -> None:
    """Name this process as a folder's owner."""
    write_text(folder / _OWNER, this_process())


def owner_of(folder: Path) -> str | None:
    """Return the mark of the process that owns a folder; None if that process has ended, or is this one."""
    try:
        mark = (folder / _OWNER).read_text(encoding="utf-8")
    except OSError:
        return None
    is_mark = len(mark.split()) == len(this_process().split())
    return mark if is_mark and not has_ended(mark) and mark != this_process() else None


@contextmanager
def owned_folder(parent: Path, prefix: str) -> Iterator[Path]:
    """Yield a temporary folder, which is removed on exit; first remove those of processes that have ended.

    Args:
        parent: Folder that holds it.
        prefix: First characters of its name, and of those to remove.
    """
    for old in parent.glob(f"{prefix}*"):
        if (old / _OWNER).is_file() and owner_of(old) is None:
            shutil.rmtree(old, ignore_errors=True)
    with tempfile.TemporaryDirectory(prefix=prefix, dir=parent) as name:
        folder = Path(name)
        own(folder)
        yield folder
