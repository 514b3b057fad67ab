"""Copies of stores for tests that write into them, and arms in them."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

from headscan.store.connection import checked_file
from headscan.store.records import ArmKind, ArmRecord
from headscan.store.store import Store, short_hash


def copy_store(source: Path, target: Path) -> Path:
    """Copy a store that this process wrote or checked, and return the path of the copy, a file or one in the folder.

    The check of a store's definitions takes 60 to 100 ms of CPU, and copies have the definitions of their source.
    """
    copy = Path(shutil.copy(source, target)).absolute()
    checked_file(copy).remember(copy)
    return copy


def arm_record(run_id: str, name: str, kind: str, **columns: Any) -> ArmRecord:
    """Return the row of an arm that its name and columns identify."""
    arm_id = short_hash(run_id, name, kind, columns)
    return ArmRecord(arm_id=arm_id, run_id=run_id, name=name, kind=ArmKind(kind), **columns)


def begin_arm(store: Store, run_id: str, name: str, kind: str, **columns: Any) -> str:
    """Begin an arm, and return its id."""
    record = arm_record(run_id, name, kind, **columns)
    store.begin_arm(record)
    return record.arm_id
