"""Copies of stores for tests that write into them, and arms and probes in them."""

from __future__ import annotations

import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from headscan.store.connection import checked_file
from headscan.store.records import ArmKind, ArmRecord, RunRecord
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


def sequence_rows(tokens: Sequence[int], first: int = 0, source: str = "text") -> pa.Table:
    """Return the rows of whole sequences of these lengths, each of which is a document."""
    numbers = list(range(first, first + len(tokens)))
    columns = {"sequence": numbers, "document": numbers, "source": [source] * len(tokens), "tokens": tokens}
    hashes = [f"h{number}" for number in numbers]
    return pa.table({**columns, "truncated": [False] * len(tokens), "content_hash": hashes})


def write_behaviours(
    store: Store, values: Mapping[str, np.ndarray], fingerprint: str = "p0", model: str = "tiny", **record: Any
) -> str:
    """Write a finished probe with the value (L, H) of each behaviour, and return its run."""
    layers, heads = next(iter(values.values())).shape
    run_id = store.begin_run(RunRecord("probe", fingerprint, model, layers, heads, **record)).run_id
    rows = [
        {"site": "self", "layer": layer, "head": head, "behaviour": name, "value": float(value)}
        for name, of_heads in values.items()
        for (layer, head), value in np.ndenumerate(of_heads)
    ]
    store.add_behaviours(run_id, pa.Table.from_pylist(rows))
    store.finish_run(run_id)
    return run_id
