"""SQL that writes runs, shards and behaviours, for ``Store``.

Every function needs an open connection inside a transaction, which ``Store`` provides.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from typing import Any

import duckdb
import pyarrow as pa

from headscan.analysis.errors import ResumeError, StoreError
from headscan.analysis.provenance import provenance_changes, provenance_history, provenance_since
from headscan.analysis.schema.tables import TABLES
from headscan.analysis.store.processes import this_process
from headscan.analysis.store.records import RunKind, RunRecord, RunState, RunStatus, ShardRecord
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
    """Return 12 hexadecimal digits of the hash of ``parts``.

    JSON must be able to hold them.
    """
    return hashlib.sha256(to_json(parts).encode()).hexdigest()[:12]


def check_columns(name: str, table: pa.Table, required: tuple[str, ...], optional: tuple[str, ...] = ()) -> None:
    """Raise StoreError unless a table has the right columns.

    These are the ``required`` ones, and any of the ``optional`` ones.
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
    """Return changed software and device; record them if the run grows.

    Raises:
        ResumeError: They changed, the run grows, and ``resume_anyway`` is False.
    """
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
    """Return SQL that stores a non-finite statistic or profile as NULL.

    The cast checks the length of a profile.
    """
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
