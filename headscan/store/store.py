"""The store: one DuckDB file with statistics and answers.

The file is open only during a read or write, so a scan in progress can be read between two shards. Every writing method
is one transaction, or part of an open `Store.one_transaction`. Only these methods and `merge_stores` write.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from datetime import UTC, datetime, timedelta
from pathlib import Path
from threading import get_ident
from typing import Any

import duckdb
import pyarrow as pa

from headscan.catalog import PROFILES
from headscan.errors import ResumeError, StoreError
from headscan.store.connection import checked_file, opened, rows, transaction
from headscan.store.output_files import write_data_set
from headscan.store.provenance import has_ended, provenance_changes, provenance_since, this_process
from headscan.store.records import ArmRecord, Mask, RunKind, RunRecord, RunState, RunStatus, ShardRecord, ShardToWrite
from headscan.store.summaries import (
    SiteSummary,
    SummaryRows,
    count_shards,
    is_summarised,
    pool_quantiles,
    site_summaries,
    summarise_run,
)
from headscan.store.tables import TABLES
from headscan.store.views import SUMMARISED

_JSON_COLUMNS = tuple(c.name for c in TABLES["runs"].columns if c.type == "JSON")

#: The verb that creates runs of a kind, where the two names differ.
_MADE_BY = {"recording": "sweep"}

#: Kinds of runs that get a summary.
_SUMMARISED_KINDS = ("scan", "recording")

#: Memory of DuckDB while a summary is computed; the summary itself holds one column at a time in addition.
_SUMMARY_MEMORY = "512MB"

_HEAD_KEYS = ("sequence", "site", "layer", "head", "kv_head")
#: The table of the head rows by kind of run; other kinds use ``head_statistics``.
_HEAD_TABLES = {"importance": "head_importance"}
#: Times are numbers of microseconds since then.
_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
_ANSWER_KEYS = ("task", "question", "correct")


def to_json(value: Any) -> str:
    """Return JSON with sorted keys, so that equal values give equal text."""
    return json.dumps(value, sort_keys=True)


def short_hash(*parts: Any) -> str:
    """Return 12 hexadecimal digits of the hash of ``parts``, which JSON must be able to hold."""
    return hashlib.sha256(to_json(parts).encode()).hexdigest()[:12]


def run_identity(kind: RunKind, fingerprint: str) -> str:
    """Return the ``run_id`` of a run."""
    return short_hash(kind, fingerprint)


def refuse_resume(run_id: str, changes: Sequence[str]) -> ResumeError:
    """Return the error for a run whose software or device changed."""
    return ResumeError(
        f"cannot resume run {run_id}, which used other software or another device: {', '.join(changes)}. Restore them,"
        " or give `resume_anyway=True`, which records both in runs.provenance"
    )


class Store:
    """The store in the DuckDB file at ``path``, which the constructor does not touch. ``lock_timeout`` is the number of
    seconds to wait while another process has the file open; ``on_wait`` is called with one line when a wait begins, and
    None disables it.
    """

    def __init__(
        self, path: str | Path, *, lock_timeout: float = 30.0, on_wait: Callable[[str], None] | None = None
    ) -> None:
        self.path = Path(path)
        self.lock_timeout = lock_timeout
        self.on_wait = on_wait
        self._checked = checked_file(self.path.absolute())
        self._transaction: duckdb.DuckDBPyConnection | None = None
        self._reading = list[int]()  # the threads in blocks of `reading`
        self._never_summarised = set[str]()

    def __repr__(self) -> str:
        return f"Store({str(self.path)!r})"

    def connect(
        self, *, read_only: bool = False, create: bool = False, memory: str | None = None
    ) -> AbstractContextManager[duckdb.DuckDBPyConnection]:
        """Open a DuckDB connection for a ``with`` block; see `opened`."""
        if not read_only and get_ident() in self._reading:  # other threads wait for the end of the block
            raise StoreError(f"cannot write {self.path} while a block of reading() holds it. End the block first")
        return opened(
            self.path,
            self._checked,
            read_only=read_only,
            create=create,
            memory=memory,
            timeout=self.lock_timeout,
            on_wait=self.on_wait,
        )

    @contextmanager
    def reading(self) -> Iterator[None]:
        """Keep the file open for the reads inside the block. DuckDB needs 30 ms of CPU to open a file, and a connection
        to a file that this process has open takes none. Other processes can read but not write meanwhile, so keep the
        block short; it may not write to this store.
        """
        with self.connect(read_only=True):
            self._reading.append(get_ident())
            try:
                yield
            finally:
                self._reading.remove(get_ident())

    @contextmanager
    def one_transaction(self) -> Iterator[None]:
        """Write all or nothing inside the block, and open the file once; the block may not read. A block inside another
        one is part of its transaction.
        """
        with self._writing(create=True) as connection:
            outer, self._transaction = self._transaction, connection
            try:
                yield
            finally:
                self._transaction = outer

    def merge_transaction(self) -> AbstractContextManager[duckdb.DuckDBPyConnection]:
        """Open a connection for one transaction of `merge_stores`; all other code writes with the methods below."""
        return self._writing()

    @contextmanager
    def _writing(self, create: bool = False) -> Iterator[duckdb.DuckDBPyConnection]:
        if self._transaction is not None:
            yield self._transaction
            return
        with self.connect(create=create) as connection, transaction(connection, self.path):
            yield connection
        # Only rows were written. A process that writes between the closing and this line has checked the store itself.
        self._checked.remember(self.path)

    # Runs and shards

    def begin_run(self, run: RunRecord, *, resume_anyway: bool = False, extends: bool = False) -> RunState:
        """Begin a run, or resume the one with the same kind and fingerprint; a missing store is created. The shards in
        the returned state need not be measured again. ``resume_anyway`` resumes although software or device changed;
        the store records both. ``extends`` means that rows will be added even to a finished run, so a change matters
        there too.
        """
        run_id = run_identity(run.kind, run.fingerprint)
        if run.kind not in _SUMMARISED_KINDS:
            self._never_summarised.add(run_id)
        with self._writing(create=True) as connection:
            row = connection.execute("SELECT status FROM runs WHERE run_id = ?", [run_id]).fetchone()
            if row is None:
                record = {c: getattr(run, c) for c in TABLES["runs"].names if hasattr(run, c)}
                record |= {"provenance": [provenance_since(run.provenance)]}
                record |= {c: to_json(record[c]) for c in ("grid", "config", "packages", "provenance")}
                record |= {"run_id": run_id, "status": "running", "writer": this_process()}
                _insert_record(connection, "runs", {**record, "started_at": datetime.now(UTC)})
                return RunState(run_id, False, "running", {})
            finished = row[0] == "finished"
            changes = _compare_provenance(connection, run_id, run, resume_anyway, grows=extends or not finished)
            if not finished:
                _reopen_run(connection, run_id, run.config.get("parts", ()))
            shards = connection.execute("SELECT shard, content_hash FROM shards WHERE run_id = ? ORDER BY 1", [run_id])
            return RunState(run_id, True, "finished" if finished else "running", dict(shards.fetchall()), changes)

    def add_shards(self, run_id: str, shards: Iterable[ShardToWrite]) -> None:
        """Write shards with their ledger rows in one transaction; shards that the ledger already has are skipped.
        Opening and closing the store takes half as long as writing a large shard, so a caller with several shards
        passes them together.
        """
        with self._writing() as connection:
            for shard in shards:
                _add_shard(connection, run_id, *shard)

    def finish_run(
        self,
        run_id: str,
        *,
        status: RunStatus = "finished",
        report: Mapping[str, Any] | None = None,
        total_shards: int | None = None,
        corpus_hash: str | None = None,
    ) -> None:
        """Close a run; arguments that are None keep the stored values. A finished scan gets its summary; see
        `summarise`.
        """
        summary = self._new_summary(run_id) if status == "finished" else None
        with self._writing() as connection:
            _require_run(connection, run_id)
            if summary is not None:
                _add_summary(connection, run_id, summary)
            connection.execute(
                "UPDATE runs SET status = ?, finished_at = now(), report = coalesce(?, report),"
                " total_shards = coalesce(?, total_shards), corpus_hash = coalesce(?, corpus_hash) WHERE run_id = ?",
                [status, None if report is None else to_json(report), total_shards, corpus_hash, run_id],
            )

    def summarise(self, run_id: str) -> None:
        """Store the summary of a finished scan, if the store lacks it, as it does after a new score."""
        summary = self._new_summary(run_id)
        if summary is not None:
            with self._writing() as connection:
                _add_summary(connection, run_id, summary)

    def _new_summary(self, run_id: str) -> SummaryRows | None:
        """Return the summary of a run that has head rows but no summary. Other processes can read meanwhile."""
        # A block of one transaction may not read, and no scan ends in one.
        if self._transaction is not None or run_id in self._never_summarised:
            return None
        with self.connect(read_only=True, memory=_SUMMARY_MEMORY) as connection:
            known = connection.execute("SELECT kind FROM runs WHERE run_id = ?", [run_id]).fetchall()
            if not known or known[0][0] not in _SUMMARISED_KINDS or is_summarised(connection, run_id):
                return None
            return summarise_run(connection, run_id)

    def summaries(self, run_id: str, names: Sequence[str] = SUMMARISED) -> list[SiteSummary]:
        """Return the spread of the measured scores and statistics among ``names`` by site, self-attention first: as
        stored, or computed from all rows of a run without a summary.
        """
        with self.connect(read_only=True, memory=_SUMMARY_MEMORY) as connection:
            return site_summaries(connection, run_id, names)

    def pool_quantiles(self, run_id: str, site: str, measure: str, levels: Sequence[float]) -> list[float] | None:
        """Return quantiles of a score or statistic over all heads and sequences of a site, from one column of all rows;
        None if the run did not measure it.
        """
        with self.connect(read_only=True, memory=_SUMMARY_MEMORY) as connection:
            return pool_quantiles(connection, run_id, site, measure, levels)

    # Probes

    def add_behaviours(self, run_id: str, table: pa.Table) -> None:
        """Replace the behaviours of a probe run; ``table`` has one row per site, layer, query head and behaviour:
        ``site, layer, head, behaviour, value``.
        """
        with self._writing() as connection:
            _require_run(connection, run_id)
            connection.execute("DELETE FROM head_behaviours WHERE run_id = ?", [run_id])
            _insert(connection, "head_behaviours", table, run_id=run_id)

    # Evaluations

    def add_mask(
        self,
        name: str,
        heads: Iterable[tuple[int, int]],
        *,
        site: str = "self",
        run_id: str | None = None,
        criterion: str | None = None,
        share: float | None = None,
        config: Mapping[str, Any] | None = None,
    ) -> str:
        """Store (layer, head) pairs under a name; return the ``mask_id``. Equal masks have equal ids."""
        pairs = sorted({(int(layer), int(head)) for layer, head in heads})
        if not pairs:
            raise StoreError(f"mask {name} has 0 heads (limit 1). Give at least one head")
        settings = dict(config or {})
        mask_id = short_hash(name, site, pairs, run_id, criterion, share, settings)
        with self._writing(create=True) as connection:
            known = connection.execute("SELECT mask_id FROM masks WHERE name = ?", [name]).fetchone()
            if known is not None:
                if known[0] != mask_id:
                    raise StoreError(f"mask {name} exists with other heads or another origin. Choose another name")
                return mask_id
            row = {"mask_id": mask_id, "run_id": run_id, "name": name, "criterion": criterion, "share": share}
            _insert_record(connection, "masks", {**row, "config": to_json(settings), "created_at": datetime.now(UTC)})
            rows_of_heads = [[mask_id, site, *pair] for pair in pairs]
            connection.executemany("INSERT INTO mask_heads VALUES (?, ?, ?, ?)", rows_of_heads)
        return mask_id

    def mask(self, name: str) -> Mask:
        """Return the mask with this name or ``mask_id``."""
        with self.connect(read_only=True) as connection:
            row = connection.execute(
                "SELECT mask_id, name, run_id, criterion, share FROM masks WHERE name = ? OR mask_id = ?", [name, name]
            ).fetchone()
            if row is None:
                names = [n for (n,) in connection.execute("SELECT name FROM masks ORDER BY name").fetchall()]
                raise StoreError(f"the store has no mask {name}. Choose one of: {', '.join(names) or 'none'}")
            heads = connection.execute(
                "SELECT site, layer, head FROM mask_heads WHERE mask_id = ? ORDER BY ALL", [row[0]]
            ).fetchall()
        return Mask(row[0], row[1], heads[0][0], tuple((layer, head) for _, layer, head in heads), *row[2:])

    def begin_arm(self, arm: ArmRecord) -> bool:
        """Begin an arm, or find it by its id, which takes its name and the entries of ``config`` that it lacks. Return
        True if all its answers are stored, up to its look; an unfinished arm sets the run to running.
        """
        with self._writing() as connection:
            _require_run(connection, arm.run_id)
            same = connection.execute(
                "SELECT arm_id, name, status, look, config FROM arms WHERE arm_id = $1 OR (run_id = $2 AND name = $3)",
                [arm.arm_id, arm.run_id, arm.name],
            ).fetchall()
            if any(arm_id != arm.arm_id for arm_id, *_ in same):
                raise StoreError(f"run {arm.run_id} has another arm named {arm.name}. Choose another name")
            # Not now(), which is one time in a whole transaction: arms are listed in the order in which they began.
            begun = datetime.now(UTC)
            if not same:
                row = {**vars(arm), "config": to_json(arm.config), "status": "running", "started_at": begun}
                _insert_record(connection, "arms", row)
            else:
                [(_, name, status, look, config)] = same
                stored = json.loads(config)
                if name != arm.name:
                    connection.execute("UPDATE arms SET name = ? WHERE arm_id = ?", [arm.name, arm.arm_id])
                if arm.config.keys() - stored.keys():
                    merged = to_json({**arm.config, **stored})
                    connection.execute("UPDATE arms SET config = ? WHERE arm_id = ?", [merged, arm.arm_id])
                wanted, done = arm.look or 1, (look or 1) - (status != "finished")
                if done >= wanted:
                    return True
                if wanted > done + 1:
                    raise StoreError(f"arm {arm.name} has no answers of look {wanted - 1}. Ask them first")
                connection.execute(
                    "UPDATE arms SET status = 'running', look = ?, started_at = ?, finished_at = NULL WHERE arm_id = ?",
                    [arm.look, begun, arm.arm_id],
                )
            _reopen_run(connection, arm.run_id)
            return False

    def finish_arm(
        self, arm_id: str, answers: pa.Table, *, results: pa.Table | None = None, ablated_share: float | None = None
    ) -> None:
        """Replace an arm's answers, or add those of a later look, and close it, in one transaction; its units are
        deleted. ``answers`` has one row per task and question: ``task, question, correct`` (NULL without a right
        answer), and any of ``recall`` (default: false), ``doc_hash, target, response, log_likelihoods, metrics`` (JSON
        text). ``results`` has one row per task or group, metric and filter: ``task, is_group, metric, filter, value,
        standard_error, questions``. ``ablated_share`` is the measured share of ablated heads, 0 to 1.
        """
        with self._writing() as connection:
            look = _require_arm(connection, arm_id)[1] or 1
            optional = [c for c in TABLES["answers"].names if c not in (*_ANSWER_KEYS, "arm_id")]
            _check_columns("answers", answers, _ANSWER_KEYS, optional)
            _forget_verdicts(connection, arm_id)
            for table in ("units", *(("answers", "arm_results") if look == 1 else ())):
                connection.execute(f"DELETE FROM {table} WHERE arm_id = ?", [arm_id])
            recall: dict[str, Any] = {} if "recall" in answers.column_names else {"recall": False}
            _insert(connection, "answers", answers, check=False, arm_id=arm_id, **recall)
            if results is not None:
                _insert(connection, "arm_results", results, arm_id=arm_id)
            connection.execute(
                "UPDATE arms SET status = 'finished', finished_at = now(), ablated_share = ? WHERE arm_id = ?",
                [ablated_share, arm_id],
            )

    def add_verdicts(self, verdicts: pa.Table) -> None:
        """Replace the verdict rows of arms; ``verdicts`` has the columns of ``arm_verdicts``."""
        with self._writing() as connection:
            judged = verdicts["arm_id"].unique().to_pylist()
            connection.execute("DELETE FROM arm_verdicts WHERE arm_id IN (SELECT unnest(?))", [judged])
            _insert(connection, "arm_verdicts", verdicts)

    def replace_split_verdicts(self, run_id: str, verdicts: pa.Table) -> None:
        """Replace the split verdict rows of a run; ``verdicts`` has the columns of ``split_verdicts``."""
        of_run = "SELECT arm_id FROM arms WHERE run_id = ?"
        with self._writing() as connection:
            connection.execute(f"DELETE FROM split_verdicts WHERE arm_id IN ({of_run})", [run_id])
            _insert(connection, "split_verdicts", verdicts)

    def replace_rows(self, table: str, run_id: str, rows: pa.Table) -> None:
        """Replace a run's rows of ``head_effects`` or ``head_gates``; ``rows`` has the table's columns."""
        with self._writing() as connection:
            _require_run(connection, run_id)
            connection.execute(f"DELETE FROM {table} WHERE run_id = ?", [run_id])
            _insert(connection, table, rows)

    # Units of work

    def add_units(self, run_id: str, units: pa.Table) -> None:
        """Store finished units of a run, in place of earlier ones of the same names. ``units`` has the columns ``unit,
        what, numbers``, and may have ``arm_id, texts``. A finished run is running again.
        """
        with self._writing() as connection:
            _require_run(connection, run_id)
            _reopen_run(connection, run_id)
            _insert(connection, "units", units, "OR REPLACE ", optional=("arm_id", "texts"), run_id=run_id)
            # Another process may have finished an arm with the same answers.
            finished = "SELECT arm_id FROM arms WHERE run_id = $1 AND status = 'finished'"
            connection.execute(f"DELETE FROM units WHERE run_id = $1 AND arm_id IN ({finished})", [run_id])

    def units(self, run_id: str) -> pa.Table:
        """Return the finished units of a run."""
        return self.query("SELECT unit, what, arm_id, numbers, texts FROM units WHERE run_id = ?", [run_id])

    def restart_run(self, run: RunRecord) -> None:
        """Delete what a plan or prune run measured, so that it begins again with the software and device of ``run``."""
        run_id = run_identity(run.kind, run.fingerprint)
        with self._writing() as connection:
            _require_run(connection, run_id)
            connection.execute("DELETE FROM units WHERE run_id = ?", [run_id])
            connection.execute(
                "UPDATE runs SET provenance = ?, packages = ?, code_version = ? WHERE run_id = ?",
                [to_json([provenance_since(run.provenance)]), to_json(run.packages), run.code_version, run_id],
            )
            _reopen_run(connection, run_id)

    # Reading

    def query(
        self, sql: str, parameters: Sequence[Any] | None = None, *, tables: Mapping[str, pa.Table] | None = None
    ) -> pa.Table:
        """Return the rows of one statement, even from an untrusted source; ``?`` stands for the parameters in order.
        The connection reads the store and the further ``tables``, by name, only: no file, network, extension or
        variable of the caller.
        """
        with self.connect(read_only=True) as connection:
            return rows(connection, sql, parameters, tables)

    def runs(self, kind: RunKind | None = None) -> list[dict[str, Any]]:
        """Return all runs, or those of a kind, newest first: the columns of ``runs`` with decoded JSON, and
        ``finished_shards`` and ``nonfinite_rows`` of the shards, and ``last_written``, when the last shard or arm was
        finished. A running run whose process has ended gets the status ``interrupted``.
        """
        # Times are read as numbers, because pyarrow imports pandas, which takes 0.2 s, to convert those with a zone.
        found = self.query(
            "SELECT r.* REPLACE (epoch_us(r.started_at) AS started_at, epoch_us(r.finished_at) AS finished_at),"
            " coalesce(s.finished_shards, 0) AS finished_shards, coalesce(s.nonfinite_rows, 0) AS nonfinite_rows,"
            " epoch_us(greatest(s.last_written, a.last_written)) AS last_written FROM runs r LEFT JOIN (SELECT run_id,"
            " count(*) AS finished_shards, sum(nonfinite_rows)::BIGINT AS nonfinite_rows, max(finished_at) AS"
            " last_written FROM shards GROUP BY run_id) s USING (run_id) LEFT JOIN (SELECT run_id, max(finished_at) AS"
            " last_written FROM arms GROUP BY run_id) a USING (run_id) WHERE kind = coalesce(?, kind) ORDER BY"
            " r.started_at DESC, run_id",
            [kind],
        ).to_pylist()
        for row in found:
            for name in ("started_at", "finished_at", "last_written"):
                if row[name] is not None:
                    row[name] = (_EPOCH + timedelta(microseconds=row[name])).astimezone()
            if row["status"] == "running" and has_ended(row["writer"]):
                row["status"] = "interrupted"
        return [
            {c: json.loads(v) if c in _JSON_COLUMNS and v is not None else v for c, v in row.items()} for row in found
        ]

    def resolve_run(self, prefix: str | None = None, kind: RunKind = "scan") -> dict[str, Any]:
        """Return the run whose ``run_id`` begins with ``prefix``; without one, the newest finished run, or the newest
        if none is finished. A recording counts as a scan if ``prefix`` names it or if the store has no scans.
        """
        runs = self.runs(kind)
        if kind == "scan" and (prefix or not runs):
            runs += self.runs("recording")
        if not runs:
            named = f" {prefix}, and no other" if prefix else ""
            raise StoreError(f"{self.path} has no {kind} run{named}. Run `headscan {_MADE_BY.get(kind, kind)}` first")
        if not prefix:
            return next((run for run in runs if run["status"] == "finished"), runs[0])
        matching = [run for run in runs if run["run_id"].startswith(prefix)]
        if len(matching) != 1:
            names = ", ".join(run["run_id"] for run in matching or runs)
            raise StoreError(
                f"{len(matching)} {kind} runs match {prefix}: {names}. Give more characters of the id"
                if matching
                else f"{self.path} has no {kind} run {prefix}. Choose one of {names}"
            )
        return matching[0]

    def export_parquet(self, folder: str | Path) -> list[Path]:
        """Write all tables and ``head_summary`` as a Parquet data set; see `write_data_set`."""
        with self.connect(read_only=True) as connection:
            return write_data_set(connection, folder)


def _add_summary(connection: duckdb.DuckDBPyConnection, run_id: str, summary: SummaryRows) -> None:
    """Replace the summary of a run, unless another process has added shards since it was computed."""
    if count_shards(connection, run_id) != summary.shards:
        return
    _forget_summary(connection, run_id)
    for table, parts in (("head_summaries", summary.heads), ("measure_pools", summary.pools)):
        if parts:
            _insert(connection, table, pa.concat_tables(parts, promote_options="permissive"), check=False)


def _forget_summary(connection: duckdb.DuckDBPyConnection, run_id: str) -> None:
    for table in ("head_summaries", "measure_pools"):
        connection.execute(f"DELETE FROM {table} WHERE run_id = ?", [run_id])


def _check_columns(name: str, table: pa.Table, required: Sequence[str], optional: Sequence[str] = ()) -> None:
    """Raise StoreError unless a table has the ``required`` columns and no others but ``optional`` ones."""
    given = table.column_names
    wrong = [c for c in required if c not in given] + [c for c in given if c not in (*required, *optional)]
    if wrong or len(set(given)) != len(given):
        raise StoreError(
            f"the {name} table has wrong columns: {', '.join(given)} (required: {', '.join(required)}"
            + (f"; optional: {', '.join(optional)})" if optional else ")")
            + (f". Add or remove {', '.join(wrong)}" if wrong else ". Give each column once")
        )


def _insert(
    connection: duckdb.DuckDBPyConnection,
    table: str,
    incoming: pa.Table,
    conflicts: str = "",
    *,
    check: bool = True,
    optional: Sequence[str] = (),
    **constants: Any,
) -> None:
    """Insert rows into a table, with ``constants`` as columns of one value. ``conflicts`` is ``OR REPLACE`` and a space
    to replace rows that the table has; ``check`` raises StoreError if a column that is not ``optional`` is missing, or
    one is unknown.
    """
    if check:
        required = [c for c in TABLES[table].names if c not in (*constants, *optional)]
        _check_columns(table, incoming, required, optional)
    given = "".join(f"? AS {name}, " for name in constants)
    connection.register(f"incoming_{table}", incoming)
    connection.execute(
        f"INSERT {conflicts}INTO {table} BY NAME SELECT {given}* FROM incoming_{table}", list(constants.values())
    )


def _insert_record(connection: duckdb.DuckDBPyConnection, table: str, row: Mapping[str, Any]) -> None:
    """Insert a row; columns that it lacks are NULL."""
    places = ", ".join("?" for _ in row)
    connection.execute(f"INSERT INTO {table} ({', '.join(row)}) VALUES ({places})", list(row.values()))


def _compare_provenance(
    connection: duckdb.DuckDBPyConnection, run_id: str, run: RunRecord, resume_anyway: bool, *, grows: bool
) -> tuple[str, ...]:
    """Return changed software and device; record them if the run grows."""
    row = connection.execute("SELECT provenance FROM runs WHERE run_id = ?", [run_id]).fetchone()
    assert row is not None
    history = json.loads(row[0])
    changes = provenance_changes(history[-1], run.provenance)
    if changes and grows:
        if not resume_anyway:
            raise refuse_resume(run_id, changes)
        now = [*history, provenance_since(run.provenance)]
        connection.execute("UPDATE runs SET provenance = ? WHERE run_id = ?", [to_json(now), run_id])
    return changes


def _reopen_run(connection: duckdb.DuckDBPyConnection, run_id: str, parts: Sequence[str] = ()) -> None:
    """Set a run to running, by this process, and record further parts of the corpus."""
    connection.execute(
        "UPDATE runs SET status = 'running', writer = ?, finished_at = NULL WHERE run_id = ?", [this_process(), run_id]
    )
    if parts:
        row = connection.execute("SELECT config FROM runs WHERE run_id = ?", [run_id]).fetchone()
        assert row is not None
        config = joined_parts(json.loads(row[0]), parts)
        connection.execute("UPDATE runs SET config = ? WHERE run_id = ?", [to_json(config), run_id])


def joined_parts(config: Mapping[str, Any], parts: Iterable[str]) -> dict[str, Any]:
    """Return the config of a run with further parts of the corpus, such as ``3/8``, in order."""
    known = {*config.get("parts", ()), *parts}
    return {
        **config,
        **({"parts": sorted(known, key=lambda part: [*map(int, part.split("/"))][::-1])} if known else {}),
    }


def _require_run(connection: duckdb.DuckDBPyConnection, run_id: str) -> str:
    """Return the kind of a run; raise StoreError unless the store has it."""
    row = connection.execute("SELECT kind FROM runs WHERE run_id = ?", [run_id]).fetchone()
    if row is None:
        raise StoreError(f"the store has no run {run_id}. Call begin_run first")
    return str(row[0])


def _add_shard(
    connection: duckdb.DuckDBPyConnection, run_id: str, shard: ShardRecord, sequences: pa.Table, heads: pa.Table
) -> None:
    table = _HEAD_TABLES.get(_require_run(connection, run_id), "head_statistics")
    numbers = [name for name in TABLES[table].names if name not in ("run_id", *_HEAD_KEYS)]
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
    _check_columns("heads", heads, _HEAD_KEYS, numbers)
    _forget_summary(connection, run_id)
    _insert(connection, "sequences", sequences, optional=("recall_task",), run_id=run_id, shard=shard.shard)
    connection.register("incoming_heads", heads)
    # One NaN or infinity would make every mean and deviation over the column useless.
    finite = [_finite(name) for name in heads.column_names if name not in _HEAD_KEYS]
    connection.execute(
        f"INSERT INTO {table} BY NAME SELECT ? AS run_id, {', '.join((*_HEAD_KEYS, *finite))} FROM incoming_heads",
        [run_id],
    )
    ledger = {
        "run_id": run_id,
        "shard": shard.shard,
        "content_hash": shard.content_hash,
        "sequences": sequences.num_rows,
        "head_rows": heads.num_rows,
        "nonfinite_rows": shard.nonfinite_rows,
        "tokens": sum(sequences["tokens"].to_pylist()),
        "seconds": shard.seconds,
        "worker": shard.worker,
        "finished_at": datetime.now(UTC),
    }
    _insert_record(connection, "shards", ledger)


def _finite(name: str) -> str:
    """Return SQL that stores a non-finite statistic or profile as NULL. The cast checks the length of a profile."""
    if name in PROFILES:
        return f"CASE WHEN isfinite(list_sum({name})) THEN {name}::REAL[{len(PROFILES[name].bins)}] END AS {name}"
    return f"CASE WHEN isfinite({name}) THEN {name} END AS {name}"


def _require_arm(connection: duckdb.DuckDBPyConnection, arm_id: str) -> tuple[str, int | None]:
    """Return an arm's status and look; raise StoreError for an unknown arm."""
    # fetchall: DuckDB cannot register a table while a result is partly read.
    rows = connection.execute("SELECT status, look FROM arms WHERE arm_id = ?", [arm_id]).fetchall()
    if not rows:
        raise StoreError(f"the store has no arm {arm_id}. Call begin_arm first")
    [found] = rows
    return found


def _forget_verdicts(connection: duckdb.DuckDBPyConnection, arm_id: str) -> None:
    """Delete the verdict rows of an arm; for a baseline, those of every arm of its run."""
    for table in ("arm_verdicts", "split_verdicts"):
        connection.execute(
            f"DELETE FROM {table} WHERE arm_id = $1 OR arm_id IN (SELECT o.arm_id FROM arms a JOIN arms o USING"
            " (run_id) WHERE a.arm_id = $1 AND a.kind = 'baseline')",
            [arm_id],
        )
