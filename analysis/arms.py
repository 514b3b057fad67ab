"""Writing an evaluation: masks, arms and answers.

Every function takes an open connection inside a transaction; ``analysis.store`` opens both.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import duckdb
import pyarrow as pa

from analysis.errors import StoreError
from analysis.ledger import check_columns, identity, insert_record, require_run, to_json
from analysis.records import ArmRecord, ArmState, Mask, RunStatus
from analysis.schema import TABLES

_ANSWER_KEYS = ("task", "question", "correct")
_ANSWER_OPTIONAL = tuple(c for c in TABLES["answers"].names if c not in (*_ANSWER_KEYS, "arm_id"))


def add_mask(
    connection: duckdb.DuckDBPyConnection,
    name: str,
    heads: Iterable[tuple[int, int]],
    site: str,
    run_id: str | None,
    score: str | None,
    share: float | None,
    config: Mapping[str, Any],
) -> str:
    """Insert a mask, or find the same one; see ``Store.add_mask``."""
    pairs = sorted({(int(layer), int(head)) for layer, head in heads})
    if not pairs:
        raise StoreError(f"mask {name} has no heads: name one at least")
    mask_id = identity(name, site, pairs, run_id, score, share, dict(config))
    known = connection.execute("SELECT mask_id FROM masks WHERE name = ?", [name]).fetchone()
    if known is not None:
        if known[0] != mask_id:
            raise StoreError(f"mask {name} is in the store with other heads or another origin: choose another name")
        return mask_id
    row = {"mask_id": mask_id, "run_id": run_id, "name": name, "score": score, "share": share}
    insert_record(connection, "masks", {**row, "config": to_json(dict(config))}, "created_at")
    connection.executemany("INSERT INTO mask_heads VALUES (?, ?, ?, ?)", [[mask_id, site, *pair] for pair in pairs])
    return mask_id


def find_mask(connection: duckdb.DuckDBPyConnection, name: str) -> Mask:
    """The mask of this name or ``mask_id``."""
    row = connection.execute(
        "SELECT mask_id, name, run_id, score, share FROM masks WHERE name = ? OR mask_id = ?", [name, name]
    ).fetchone()
    if row is None:
        names = [n for (n,) in connection.execute("SELECT name FROM masks ORDER BY name").fetchall()]
        raise StoreError(f"the store has no mask {name}; it has: {', '.join(names) or 'none'}")
    heads = connection.execute(
        "SELECT site, layer, head FROM mask_heads WHERE mask_id = ? ORDER BY ALL", [row[0]]
    ).fetchall()
    return Mask(row[0], row[1], heads[0][0], tuple((layer, head) for _, layer, head in heads), row[2], row[3], row[4])


def begin_arm(connection: duckdb.DuckDBPyConnection, arm: ArmRecord) -> ArmState:
    """Insert an arm, or find the same one; see ``Store.begin_arm``."""
    require_run(connection, arm.run_id)
    arm_id = identity(arm.run_id, arm.name, arm.kind, arm.mask_id, arm.score, arm.threshold, dict(arm.config))
    known = connection.execute(
        "SELECT arm_id, status FROM arms WHERE run_id = ? AND name = ?", [arm.run_id, arm.name]
    ).fetchone()
    if known is None:
        row = {c: getattr(arm, c) for c in ("run_id", "name", "kind", "mask_id", "score", "threshold")}
        row |= {"arm_id": arm_id, "config": to_json(dict(arm.config)), "status": "running"}
        insert_record(connection, "arms", row, "started_at")
        return ArmState(arm_id, False)
    if known[0] != arm_id:
        raise StoreError(f"run {arm.run_id} has another arm named {arm.name}: choose another name")
    if known[1] == "finished":
        return ArmState(arm_id, True)
    connection.execute(
        "UPDATE arms SET status = 'running', started_at = now(), finished_at = NULL WHERE arm_id = ?", [arm_id]
    )
    return ArmState(arm_id, False)


def require_arm(connection: duckdb.DuckDBPyConnection, arm_id: str) -> None:
    """Raise unless the store has the arm."""
    if connection.execute("SELECT 1 FROM arms WHERE arm_id = ?", [arm_id]).fetchone() is None:
        raise StoreError(f"the store has no arm {arm_id}: begin it first")


def add_answers(connection: duckdb.DuckDBPyConnection, arm_id: str, answers: pa.Table) -> None:
    """Put ``answers`` in the place of the arm's earlier ones; see ``Store.add_answers``."""
    require_arm(connection, arm_id)
    check_columns("answers", answers, _ANSWER_KEYS, _ANSWER_OPTIONAL)
    connection.execute("DELETE FROM answers WHERE arm_id = ?", [arm_id])
    connection.register("incoming_answers", answers)
    connection.execute("INSERT INTO answers BY NAME SELECT ? AS arm_id, * FROM incoming_answers", [arm_id])


def finish_arm(
    connection: duckdb.DuckDBPyConnection, arm_id: str, zeroed_share: float | None, status: RunStatus
) -> None:
    """Close an arm; a ``zeroed_share`` of None keeps the value it has."""
    require_arm(connection, arm_id)
    connection.execute(
        "UPDATE arms SET status = ?, finished_at = now(), zeroed_share = coalesce(?, zeroed_share) WHERE arm_id = ?",
        [status, zeroed_share, arm_id],
    )
