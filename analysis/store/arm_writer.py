"""SQL that writes masks, arms, answers and verdicts, for ``Store``.

Every function needs an open connection inside a transaction, which ``Store`` provides.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from datetime import UTC, datetime
from typing import Any

import duckdb
import pyarrow as pa

from headscan.analysis.errors import FinishedArmError, StoreError
from headscan.analysis.schema.tables import TABLES
from headscan.analysis.store.records import ArmRecord, ArmState, Mask
from headscan.analysis.store.run_writer import check_columns, identity, insert_record, reopen_run, require_run, to_json

_ANSWER_KEYS = ("task", "question", "correct")
_ANSWER_OPTIONAL = tuple(c for c in TABLES["answers"].names if c not in (*_ANSWER_KEYS, "arm_id"))
_RESPONSE_COLUMNS = tuple(c for c in TABLES["responses"].names if c != "arm_id")
_RESULT_COLUMNS = tuple(c for c in TABLES["arm_results"].names if c != "arm_id")
_ARM_COLUMNS = ("run_id", "name", "kind", "mask_id", "score", "selection", "threshold", "share", "seed")


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
    """Insert a mask, or find the equal one; see ``Store.add_mask``."""
    pairs = sorted({(int(layer), int(head)) for layer, head in heads})
    if not pairs:
        raise StoreError(f"mask {name} has 0 heads (limit 1). Give at least one head")
    mask_id = identity(name, site, pairs, run_id, score, share, dict(config))
    known = connection.execute("SELECT mask_id FROM masks WHERE name = ?", [name]).fetchone()
    if known is not None:
        if known[0] != mask_id:
            raise StoreError(f"mask {name} exists with other heads or another origin. Choose another name")
        return mask_id
    row = {"mask_id": mask_id, "run_id": run_id, "name": name, "score": score, "share": share}
    insert_record(connection, "masks", {**row, "config": to_json(dict(config)), "created_at": datetime.now(UTC)})
    connection.executemany("INSERT INTO mask_heads VALUES (?, ?, ?, ?)", [[mask_id, site, *pair] for pair in pairs])
    return mask_id


def find_mask(connection: duckdb.DuckDBPyConnection, name: str) -> Mask:
    """Return the mask with this name or ``mask_id``."""
    row = connection.execute(
        "SELECT mask_id, name, run_id, score, share FROM masks WHERE name = ? OR mask_id = ?", [name, name]
    ).fetchone()
    if row is None:
        names = [n for (n,) in connection.execute("SELECT name FROM masks ORDER BY name").fetchall()]
        raise StoreError(f"the store has no mask {name}. Choose one of: {', '.join(names) or 'none'}")
    heads = connection.execute(
        "SELECT site, layer, head FROM mask_heads WHERE mask_id = ? ORDER BY ALL", [row[0]]
    ).fetchall()
    return Mask(row[0], row[1], heads[0][0], tuple((layer, head) for _, layer, head in heads), row[2], row[3], row[4])


def begin_arm(connection: duckdb.DuckDBPyConnection, arm: ArmRecord) -> ArmState:
    """Insert an arm, or find it in its run; see ``Store.begin_arm``."""
    require_run(connection, arm.run_id)
    row = {column: getattr(arm, column) for column in _ARM_COLUMNS}
    arm_id = identity(row, dict(arm.config))
    known = connection.execute(
        "SELECT arm_id, status FROM arms WHERE run_id = ? AND name = ?", [arm.run_id, arm.name]
    ).fetchone()
    if known is None:
        row |= {"arm_id": arm_id, "replacement": arm.replacement, "status": "running"}
        row["config"] = to_json({**arm.config, **arm.measured})
        # Not now(), which is one time in a whole transaction: arms are listed in the order in which they began.
        row["started_at"] = datetime.now(UTC)
        insert_record(connection, "arms", row)
        reopen_run(connection, arm.run_id)
        return ArmState(arm_id, False)
    if known[0] != arm_id:
        raise StoreError(f"run {arm.run_id} has another arm named {arm.name}. Choose another name")
    if known[1] == "finished":
        return ArmState(arm_id, True)
    connection.execute(
        "UPDATE arms SET status = 'running', started_at = ?, finished_at = NULL WHERE arm_id = ?",
        [datetime.now(UTC), arm_id],
    )
    reopen_run(connection, arm.run_id)
    return ArmState(arm_id, False)


def require_arm(connection: duckdb.DuckDBPyConnection, arm_id: str) -> str:
    """Return an arm's status; raise StoreError for an unknown arm."""
    # fetchall: DuckDB cannot register a table while a result is partly read.
    rows = connection.execute("SELECT status FROM arms WHERE arm_id = ?", [arm_id]).fetchall()
    if not rows:
        raise StoreError(f"the store has no arm {arm_id}. Call begin_arm first")
    return str(rows[0][0])


def add_responses(connection: duckdb.DuckDBPyConnection, arm_id: str, responses: pa.Table) -> None:
    """Insert responses of an unfinished arm; see ``Store.add_responses``."""
    if require_arm(connection, arm_id) == "finished":
        raise FinishedArmError(f"arm {arm_id} is finished and accepts no responses. Begin another arm")
    check_columns("responses", responses, _RESPONSE_COLUMNS)
    connection.register("incoming_responses", responses)
    connection.execute(
        "INSERT OR IGNORE INTO responses BY NAME SELECT ? AS arm_id, * FROM incoming_responses", [arm_id]
    )


def finish_arm(
    connection: duckdb.DuckDBPyConnection,
    arm_id: str,
    answers: pa.Table,
    results: pa.Table | None,
    zeroed_share: float | None,
) -> None:
    """Replace an arm's answers and close it; see ``Store.finish_arm``."""
    require_arm(connection, arm_id)
    check_columns("answers", answers, _ANSWER_KEYS, _ANSWER_OPTIONAL)
    _forget_verdicts(connection, arm_id)
    for table in ("responses", "answers", "arm_results"):
        connection.execute(f"DELETE FROM {table} WHERE arm_id = ?", [arm_id])
    connection.register("incoming_answers", answers)
    recall = "" if "recall" in answers.column_names else "false AS recall, "
    connection.execute(f"INSERT INTO answers BY NAME SELECT ? AS arm_id, {recall}* FROM incoming_answers", [arm_id])
    if results is not None:
        check_columns("results", results, _RESULT_COLUMNS)
        connection.register("incoming_results", results)
        connection.execute("INSERT INTO arm_results BY NAME SELECT ? AS arm_id, * FROM incoming_results", [arm_id])
    connection.execute(
        "UPDATE arms SET status = 'finished', finished_at = now(), zeroed_share = ? WHERE arm_id = ?",
        [zeroed_share, arm_id],
    )


def _forget_verdicts(connection: duckdb.DuckDBPyConnection, arm_id: str) -> None:
    """Delete the verdict rows of an arm.

    Of a baseline, delete those of every arm of its run.
    """
    for table in ("arm_verdicts", "split_verdicts"):
        connection.execute(
            f"DELETE FROM {table} WHERE arm_id = $1 OR arm_id IN (SELECT o.arm_id FROM arms a JOIN arms o USING"
            " (run_id) WHERE a.arm_id = $1 AND a.kind = 'baseline')",
            [arm_id],
        )


def add_verdicts(connection: duckdb.DuckDBPyConnection, verdicts: pa.Table) -> None:
    """Replace the verdict rows of arms; see ``Store.add_verdicts``."""
    check_columns("verdicts", verdicts, TABLES["arm_verdicts"].names)
    connection.register("incoming_verdicts", verdicts)
    connection.execute("DELETE FROM arm_verdicts WHERE arm_id IN (SELECT arm_id FROM incoming_verdicts)")
    connection.execute("INSERT INTO arm_verdicts BY NAME FROM incoming_verdicts")


def replace_split_verdicts(connection: duckdb.DuckDBPyConnection, run_id: str, verdicts: pa.Table) -> None:
    """Replace the split verdict rows of a run; see ``Store.replace_split_verdicts``."""
    check_columns("split verdicts", verdicts, TABLES["split_verdicts"].names)
    connection.register("incoming_split_verdicts", verdicts)
    of_run = "SELECT arm_id FROM arms WHERE run_id = ?"
    connection.execute(f"DELETE FROM split_verdicts WHERE arm_id IN ({of_run})", [run_id])
    connection.execute("INSERT INTO split_verdicts BY NAME FROM incoming_split_verdicts")
