"""The store: one DuckDB file with statistics and answers.

The file is open only during a read or write, so a scan in progress can be read between two shards. Every writing method
is one transaction, and only these methods write.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

import duckdb
import pyarrow as pa

from headscan.analysis.errors import StoreError
from headscan.analysis.store import writers
from headscan.analysis.store.connection import rows, transaction
from headscan.analysis.store.opening import Checked, opened
from headscan.analysis.store.output_files import write_parquet
from headscan.analysis.store.provenance import has_ended
from headscan.analysis.store.records import (
    ArmRecord,
    ArmState,
    Mask,
    RunKind,
    RunRecord,
    RunState,
    RunStatus,
    ShardToWrite,
)
from headscan.analysis.store.tables import TABLES

_EXPORTED = (*TABLES, "head_summary")

_JSON_COLUMNS = tuple(c.name for c in TABLES["runs"].columns if c.type == "JSON")

#: The verb that creates runs of a kind, where the two names differ.
_MADE_BY = {"recording": "sweep"}


class Store:
    """A store at a path; the constructor does not touch the file.

    Args:
        path: The DuckDB file.
        lock_timeout: Seconds to wait while another process has the file open.
        on_wait: Called with one line when a wait begins; None disables it.
    """

    def __init__(
        self, path: str | Path, *, lock_timeout: float = 30.0, on_wait: Callable[[str], None] | None = None
    ) -> None:
        self.path = Path(path)
        self.lock_timeout = lock_timeout
        self.on_wait = on_wait
        self._checked = Checked()
        self._transaction: duckdb.DuckDBPyConnection | None = None

    def __repr__(self) -> str:
        return f"Store({str(self.path)!r})"

    def connect(
        self, *, read_only: bool = False, create: bool = False
    ) -> AbstractContextManager[duckdb.DuckDBPyConnection]:
        """Open a DuckDB connection for a ``with`` block; see ``opening.opened``."""
        return opened(
            self.path,
            self._checked,
            read_only=read_only,
            create=create,
            timeout=self.lock_timeout,
            on_wait=self.on_wait,
        )

    @contextmanager
    def one_transaction(self) -> Iterator[None]:
        """Write all or nothing inside the block, and open the file once; the block may not read."""
        with self._writing(create=True) as connection:
            self._transaction = connection
            try:
                yield
            finally:
                self._transaction = None

    @contextmanager
    def _writing(self, create: bool = False) -> Iterator[duckdb.DuckDBPyConnection]:
        if self._transaction is not None:
            yield self._transaction
            return
        with self.connect(create=create) as connection, transaction(connection, self.path):
            yield connection
        # Only rows were written. A process that writes between the closing and this line has checked the store itself.
        self._checked.remember(self.path)

    # Scans

    def begin_run(self, run: RunRecord, *, resume_anyway: bool = False, extends: bool = False) -> RunState:
        """Begin or resume a run; a missing store is created. The run with the same kind and fingerprint is resumed.

        Args:
            resume_anyway: Resume although software or device changed; the store records both.
            extends: Rows will be added even to a finished run, so a change matters there too.

        Returns:
            The run's id and its finished shards, which need not be measured again.
        """
        with self._writing(create=True) as connection:
            return writers.begin_run(connection, run, resume_anyway, extends)

    def add_shards(self, run_id: str, shards: Iterable[ShardToWrite]) -> None:
        """Write shards with their ledger rows, all in one transaction.

        Shards that the ledger already has are skipped. Opening and closing the store takes half as long as writing a
        large shard, so a caller with several shards passes them together.
        """
        with self._writing() as connection:
            for shard in shards:
                writers.add_shard(connection, run_id, *shard)

    def finish_run(
        self,
        run_id: str,
        *,
        status: RunStatus = "finished",
        report: Mapping[str, Any] | None = None,
        total_shards: int | None = None,
        corpus_hash: str | None = None,
    ) -> None:
        """Close a run; arguments that are None keep the stored values."""
        with self._writing() as connection:
            writers.finish_run(connection, run_id, status, report, total_shards, corpus_hash)

    # Probes

    def add_behaviours(self, run_id: str, table: pa.Table) -> None:
        """Replace the behaviours of a probe run.

        Args:
            table: One row per site, layer, query head and behaviour: ``site, layer, head, behaviour, value``.
        """
        with self._writing() as connection:
            writers.add_behaviours(connection, run_id, table)

    # Evaluations

    def add_mask(
        self,
        name: str,
        heads: Iterable[tuple[int, int]],
        *,
        site: str = "self",
        run_id: str | None = None,
        score: str | None = None,
        share: float | None = None,
        config: Mapping[str, Any] | None = None,
    ) -> str:
        """Store (layer, head) pairs under a name; return the ``mask_id``. Equal masks have equal ids."""
        with self._writing(create=True) as connection:
            return writers.add_mask(connection, name, heads, site, run_id, score, share, config or {})

    def mask(self, name: str) -> Mask:
        """Return the mask with this name or ``mask_id``."""
        with self.connect(read_only=True) as connection:
            return writers.find_mask(connection, name)

    def begin_arm(self, arm: ArmRecord) -> ArmState:
        """Begin an arm, or find it in its run. An unfinished arm sets the run to running."""
        with self._writing() as connection:
            return writers.begin_arm(connection, arm)

    def add_responses(self, arm_id: str, responses: pa.Table) -> None:
        """Store responses of an unfinished arm. Requests that are stored already are skipped.

        Args:
            responses: One row per request: ``request`` (its hash), ``log_likelihood, greedy_tokens, text`` (NULL where
                they do not apply) and ``zeroed_share``.
        """
        with self._writing() as connection:
            writers.add_responses(connection, arm_id, responses)

    def responses(self, arm_ids: Sequence[str]) -> pa.Table:
        """Return the rows of ``responses`` of unfinished writers."""
        return self.query("SELECT * FROM responses WHERE arm_id IN (SELECT unnest(?))", [list(arm_ids)])

    def finish_arm(
        self, arm_id: str, answers: pa.Table, *, results: pa.Table | None = None, zeroed_share: float | None = None
    ) -> None:
        """Replace an arm's answers and close it, in one transaction. Its responses are deleted.

        Args:
            answers: One row per task and question: ``task, question, correct`` (NULL without a right answer), and any
                of ``recall`` (default: false), ``doc_hash, target, response, log_likelihoods, metrics`` (JSON text).
            results: One row per task or group, metric and filter: ``task, is_group, metric, filter, value,
                standard_error, questions``.
            zeroed_share: Measured share of ablated heads, 0 to 1.
        """
        with self._writing() as connection:
            writers.finish_arm(connection, arm_id, answers, results, zeroed_share)

    def add_verdicts(self, verdicts: pa.Table) -> None:
        """Replace the verdict rows of arms; ``verdicts`` has the columns of ``arm_verdicts``."""
        with self._writing() as connection:
            writers.add_verdicts(connection, verdicts)

    def replace_split_verdicts(self, run_id: str, verdicts: pa.Table) -> None:
        """Replace the split verdict rows of a run.

        ``verdicts`` has the columns of ``split_verdicts``.
        """
        with self._writing() as connection:
            writers.replace_split_verdicts(connection, run_id, verdicts)

    def replace_rows(self, table: str, run_id: str, rows: pa.Table) -> None:
        """Replace a run's rows of ``head_effects`` or ``head_gates``; ``rows`` has the table's columns."""
        with self._writing() as connection:
            writers.replace_rows(connection, table, run_id, rows)

    # Reading

    def query(
        self,
        sql: str,
        parameters: Sequence[Any] | None = None,
        *,
        tables: Mapping[str, pa.Table] | None = None,
    ) -> pa.Table:
        """Return the rows of a query, even from an untrusted source. The connection reads the store and ``tables``
        only: no file, network, extension or variable of the caller.

        Args:
            sql: One statement; ``?`` stands for the parameters in order.
            tables: Further tables of this query, by name.
        """
        with self.connect(read_only=True) as connection:
            return rows(connection, sql, parameters, tables)

    def runs(self, kind: RunKind | None = None) -> list[dict[str, Any]]:
        """Return all runs, or those of a kind, newest first.

        A row has the columns of ``runs`` with decoded JSON, and ``finished_shards``, ``nonfinite_rows`` and
        ``last_written`` of its shards. A running run whose process has ended gets the status ``interrupted``.
        """
        found = self.query(
            "SELECT r.*, coalesce(s.finished_shards, 0) AS finished_shards, coalesce(s.nonfinite_rows, 0) AS"
            " nonfinite_rows, last_written FROM runs r LEFT JOIN (SELECT run_id, count(*) AS finished_shards,"
            " sum(nonfinite_rows)::BIGINT AS nonfinite_rows, max(finished_at) AS last_written FROM shards GROUP BY"
            " run_id) s USING (run_id) WHERE kind = coalesce(?, kind) ORDER BY started_at DESC, run_id",
            [kind],
        ).to_pylist()
        for row in found:
            if row["status"] == "running" and has_ended(row["writer"]):
                row["status"] = "interrupted"
        return [
            {c: json.loads(v) if c in _JSON_COLUMNS and v is not None else v for c, v in row.items()} for row in found
        ]

    def resolve_run(self, prefix: str | None = None, kind: RunKind = "scan") -> dict[str, Any]:
        """Return the run whose ``run_id`` begins with ``prefix``.

        Without a prefix it is the newest finished run, or the newest if none is finished. A recording counts as a scan
        if ``prefix`` names it or if the store has no scans.
        """
        runs = self.runs(kind)
        if kind == "scan" and (prefix or not runs):
            runs += self.runs("recording")
        if not runs:
            named = f" {prefix}, and no other" if prefix else ""
            raise StoreError(f"{self.path} has no {kind} run{named}. Run `headscan {_MADE_BY.get(kind, kind)}` first")
        if not prefix:
            return next((run for run in runs if run["status"] == "finished"), runs[0])
        found = [run for run in runs if run["run_id"].startswith(prefix)]
        if len(found) != 1:
            names = ", ".join(run["run_id"] for run in found or runs)
            raise StoreError(
                f"{len(found)} {kind} runs match {prefix}: {names}. Give more characters of the id"
                if found
                else f"{self.path} has no {kind} run {prefix}. Choose one of {names}"
            )
        return found[0]

    def export_parquet(self, directory: str | Path) -> list[Path]:
        """Write all tables and ``head_summary`` to ``<directory>/<name>.parquet``, each file atomically."""
        with self.connect(read_only=True) as connection:
            return [write_parquet(connection, name, Path(directory)) for name in _EXPORTED]
