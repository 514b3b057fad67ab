"""Writes to an open store: runs and their shards, masks, arms and their answers."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from datetime import UTC, datetime
from typing import Any

import duckdb
import pyarrow as pa

from headscan.analysis.errors import FinishedArmError, ResumeError, StoreError
from headscan.analysis.store.provenance import provenance_changes, provenance_history, provenance_since, this_process
from headscan.analysis.store.records import (
    ArmRecord,
    ArmState,
    Mask,
    RunKind,
    RunRecord,
    RunState,
    RunStatus,
    ShardRecord,
)
from headscan.analysis.store.tables import TABLES
from headscan.catalog import PROFILES, STATISTICS

_HEAD_KEYS = ("sequence", "site", "layer", "head", "kv_head")
#: By kind of run, the table of its head rows and its columns of numbers; other kinds use ``head_statistics``.
_HEAD_TABLES = {"importance": ("head_importance", ("gate_gradient", "token_gradient", "entropy"))}
_BEHAVIOUR_COLUMNS = ("site", "layer", "head", "behaviour", "value")
_SEQUENCE_COLUMNS = ("sequence", "document", "source", "tokens", "truncated", "content_hash")


def to_json(value: Any) -> str:
    """Return JSON with sorted keys, so that equal values give equal text."""
    return json.dumps(value, sort_keys=True)


def identity(*parts: Any) -> str:
    """Return 12 hexadecimal digits of the hash of ``parts``. JSON must be able to hold them."""
    return hashlib.sha256(to_json(parts).encode()).hexdigest()[:12]


def check_columns(name: str, table: pa.Table, required: tuple[str, ...], optional: tuple[str, ...] = ()) -> None:
    """Raise StoreError unless a table has the right columns. These are the ``required`` ones, and any of the
    ``optional`` ones.
    """
    given = table.column_names
    wrong = [c for c in required if c not in given] + [c for c in given if c not in (*required, *optional)]
    if wrong or len(set(given)) != len(given):
        raise StoreError(
            f"the {name} table has wrong columns: {', '.join(given)} (required: {', '.join(required)}"
            + (f"; optional: {', '.join(optional)})" if optional else ")")
            + (f". Add or remove {', '.join(wrong)}" if wrong else ". Give each column once")
        )


def insert_record(connection: duckdb.DuckDBPyConnection, table: str, row: Mapping[str, Any]) -> None:
    """Insert a row; columns that it lacks are NULL."""
    places = ", ".join("?" for _ in row)
    connection.execute(f"INSERT INTO {table} ({', '.join(row)}) VALUES ({places})", list(row.values()))


def begin_run(
    connection: duckdb.DuckDBPyConnection, run: RunRecord, resume_anyway: bool = False, extends: bool = False
) -> RunState:
    """Insert or resume a run; see ``Store.begin_run``."""
    run_id = run_identity(run.kind, run.fingerprint)
    row = connection.execute("SELECT status FROM runs WHERE run_id = ?", [run_id]).fetchone()
    if row is None:
        columns = [c for c in TABLES["runs"].names if hasattr(run, c)]
        record = {c: getattr(run, c) for c in columns} | {"provenance": [provenance_since(run.provenance)]}
        record |= {c: to_json(v) for c, v in record.items() if c in ("grid", "config", "packages", "provenance")}
        record |= {"run_id": run_id, "status": "running", "writer": this_process()}
        insert_record(connection, "runs", {**record, "started_at": datetime.now(UTC)})
        return RunState(run_id, False, "running", {})
    finished = row[0] == "finished"
    changes = _compare_provenance(connection, run_id, run, resume_anyway, grows=extends or not finished)
    if not finished:
        reopen_run(connection, run_id)
    shards = connection.execute("SELECT shard, content_hash FROM shards WHERE run_id = ? ORDER BY 1", [run_id])
    return RunState(run_id, True, "finished" if finished else "running", dict(shards.fetchall()), changes)


def run_identity(kind: RunKind, fingerprint: str) -> str:
    """Return the ``run_id`` of a run."""
    return identity(kind, fingerprint)


def _compare_provenance(
    connection: duckdb.DuckDBPyConnection, run_id: str, run: RunRecord, resume_anyway: bool, *, grows: bool
) -> tuple[str, ...]:
    """Return changed software and device; record them if the run grows."""
    row = connection.execute(
        "SELECT provenance, packages, code_version, epoch(started_at) FROM runs WHERE run_id = ?", [run_id]
    ).fetchone()
    assert row is not None
    provenance, packages = (None if text is None else json.loads(text) for text in row[:2])
    history = provenance_history({"provenance": provenance, "packages": packages, "code_version": row[2]})
    changes = provenance_changes(history[-1], run.provenance)
    if changes and grows:
        if not resume_anyway:
            raise refuse_resume(run_id, changes)
        first = provenance_since(history[0], row[3])  # an entry from before schema 6 has no time
        now = [first, *history[1:], provenance_since(run.provenance)]
        connection.execute("UPDATE runs SET provenance = ? WHERE run_id = ?", [to_json(now), run_id])
    return changes


def refuse_resume(run_id: str, changes: Sequence[str]) -> ResumeError:
    """Return the error for a run whose software or device changed."""
    return ResumeError(
        f"cannot resume run {run_id}, which used other software or another device: {', '.join(changes)}. Restore them,"
        " or give resume_anyway=True, which records both in runs.provenance"
    )


def reopen_run(connection: duckdb.DuckDBPyConnection, run_id: str) -> None:
    """Set a run to running, by this process."""
    connection.execute(
        "UPDATE runs SET status = 'running', writer = ?, finished_at = NULL WHERE run_id = ?", [this_process(), run_id]
    )


def require_run(connection: duckdb.DuckDBPyConnection, run_id: str) -> str:
    """Return the kind of a run; raise StoreError unless the store has it."""
    row = connection.execute("SELECT kind FROM runs WHERE run_id = ?", [run_id]).fetchone()
    if row is None:
        raise StoreError(f"the store has no run {run_id}. Call begin_run first")
    return str(row[0])


def add_shard(
    connection: duckdb.DuckDBPyConnection, run_id: str, shard: ShardRecord, sequences: pa.Table, heads: pa.Table
) -> None:
    """Insert a shard's rows and its ledger row; see ``Store.add_shard``."""
    table, numbers = _HEAD_TABLES.get(require_run(connection, run_id), ("head_statistics", (*STATISTICS, *PROFILES)))
    known = connection.execute(
        "SELECT content_hash FROM shards WHERE run_id = ? AND shard = ?", [run_id, shard.shard]
    ).fetchone()
    if known is not None:
        if known[0] != shard.content_hash:
            raise StoreError(
                f"shard {shard.shard} of run {run_id} has other text: hash {shard.content_hash} (stored {known[0]})."
                " The corpus changed; scan it as a new run"
            )
        return
    check_columns("sequences", sequences, _SEQUENCE_COLUMNS)
    check_columns("heads", heads, _HEAD_KEYS, numbers)
    connection.register("incoming_sequences", sequences)
    connection.register("incoming_heads", heads)
    connection.execute(
        "INSERT INTO sequences BY NAME SELECT ? AS run_id, ? AS shard, * FROM incoming_sequences",
        [run_id, shard.shard],
    )
    # One NaN or infinity would make every mean and deviation over the column useless.
    finite = [_finite(name) for name in heads.column_names if name not in _HEAD_KEYS]
    connection.execute(
        f"INSERT INTO {table} BY NAME SELECT ? AS run_id, {', '.join((*_HEAD_KEYS, *finite))} FROM incoming_heads",
        [run_id],
    )
    connection.execute(
        "INSERT INTO shards BY NAME SELECT ? AS run_id, ? AS shard, ? AS content_hash, count(*) AS sequences,"
        " ? AS head_rows, ? AS nonfinite_rows, coalesce(sum(tokens), 0) AS tokens, ? AS seconds, ? AS worker,"
        " now() AS finished_at FROM incoming_sequences",
        [run_id, shard.shard, shard.content_hash, heads.num_rows, shard.nonfinite_rows, shard.seconds, shard.worker],
    )


def _finite(name: str) -> str:
    """Return SQL that stores a non-finite statistic or profile as NULL. The cast checks the length of a profile."""
    if name in PROFILES:
        return f"CASE WHEN isfinite(list_sum({name})) THEN {name}::REAL[{len(PROFILES[name].bins)}] END AS {name}"
    return f"CASE WHEN isfinite({name}) THEN {name} END AS {name}"


def finish_run(
    connection: duckdb.DuckDBPyConnection,
    run_id: str,
    status: RunStatus,
    report: Mapping[str, Any] | None,
    total_shards: int | None,
    corpus_hash: str | None,
) -> None:
    """Close a run; arguments that are None keep the stored values."""
    require_run(connection, run_id)
    connection.execute(
        "UPDATE runs SET status = ?, finished_at = now(), report = coalesce(?, report),"
        " total_shards = coalesce(?, total_shards), corpus_hash = coalesce(?, corpus_hash) WHERE run_id = ?",
        [status, None if report is None else to_json(report), total_shards, corpus_hash, run_id],
    )


def replace_rows(connection: duckdb.DuckDBPyConnection, table: str, run_id: str, rows: pa.Table) -> None:
    """Replace the rows of a run in a table; ``rows`` has the columns of the table."""
    require_run(connection, run_id)
    check_columns(table, rows, TABLES[table].names)
    connection.execute(f"DELETE FROM {table} WHERE run_id = ?", [run_id])
    connection.register("incoming_rows", rows)
    connection.execute(f"INSERT INTO {table} BY NAME FROM incoming_rows")


def add_behaviours(connection: duckdb.DuckDBPyConnection, run_id: str, behaviours: pa.Table) -> None:
    """Replace the behaviours of a run; see ``Store.add_behaviours``."""
    require_run(connection, run_id)
    check_columns("behaviours", behaviours, _BEHAVIOUR_COLUMNS)
    connection.execute("DELETE FROM head_behaviours WHERE run_id = ?", [run_id])
    connection.register("incoming_behaviours", behaviours)
    connection.execute("INSERT INTO head_behaviours BY NAME SELECT ? AS run_id, * FROM incoming_behaviours", [run_id])


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
    """Delete the verdict rows of an arm. Of a baseline, delete those of every arm of its run."""
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
