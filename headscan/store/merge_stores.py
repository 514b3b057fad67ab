"""Merge stores: the runs of several stores in one.

A run that both stores have is joined shard by shard, an evaluation arm by arm, effects of heads mode by mode. What both
have must be equal, except summaries, verdicts and effects: these follow from shards and arms that are compared, in
floating-point numbers that differ between processors, so the rows of the target stay. A group of shards, an arm, a mask
or another table of a run lands in one transaction with the row that says so, and rows that are there already are
compared instead of written, so the same merge again resumes an interrupted one.

Every declared table takes part: its first column says whether its rows belong to a run, an arm or a mask, and a column
``sequence`` or ``shard`` that rows of a run belong to a shard. Rows pass through Arrow in bounded groups, so that
neither store is attached to a connection with access to files.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import duckdb
import pyarrow as pa

from headscan.errors import MergeError
from headscan.store.provenance import provenance_changes, this_process
from headscan.store.records import SHARDED_KINDS, RunStatus
from headscan.store.scan_tables import Table
from headscan.store.store import Store, joined_parts, to_json
from headscan.store.tables import ALL_BUT_ONE, EACH, TABLES

#: Rows of heads that are read and written together.
_GROUP_ROWS = 1_000_000
#: Arms that are read and written together, with their answers.
_GROUP_ARMS = 8


@dataclass(frozen=True)
class MergedRun:
    """A run of the merged store, with the numbers of shards and arms that the store did not have before. The number of
    shards of the whole corpus, ``total_shards``, is None if no source has read it to its end.
    """

    run_id: str
    kind: str
    model: str
    corpus: str | None
    status: str
    shards: int
    total_shards: int | None
    added_shards: int
    added_arms: int


def _owned(key: str, *, by_shard: bool | None = None) -> tuple[Table, ...]:
    """Return the tables whose first column is ``key``; ``by_shard`` selects those with or without rows of shards."""
    tables = (table for table in TABLES.values() if table.columns[0].name == key)
    return tuple(t for t in tables if by_shard is None or by_shard is bool({"sequence", "shard"} & {*t.names}))


_OF_SHARD = _owned("run_id", by_shard=True)
_OF_RUN = tuple(table for table in _owned("run_id", by_shard=False) if table.name not in ("runs", "units"))
_OF_ARM = tuple(table for table in _owned("arm_id") if table.name != "arms")
_OF_MASK = _owned("mask_id")

#: Columns of ``runs`` that equal fingerprints do not decide, and that decide numbers.
_DECIDING = ("dtype", "num_layers", "num_heads", "grid")


def merge_stores(
    sources: Sequence[Store], into: Store, *, say: Callable[[str], None] = lambda line: None
) -> list[MergedRun]:
    """Add all runs of the sources to the store ``into``, which is created if it is missing. A run of which every shard
    is stored then is finished. ``say`` is called with lines for the user. If both stores have the same shard, arm, mask
    or result with other rows, raise MergeError; what was merged before stays.
    """
    paths = [store.path.resolve() for store in (*sources, into)]
    for path in paths:
        if paths.count(path) > 1:
            raise MergeError(f"store {path} is named twice. Name each store once, and another one for the result")
    merged: dict[str, MergedRun] = {}
    for source in sources:
        with source.reading():  # also checks that the store exists
            runs = source.query("FROM runs ORDER BY started_at, run_id").to_pylist()
            masks = source.query(_MASKS).to_pylist()
        if not merged:
            with into.connect(create=True):
                pass
        if masks:
            _add_masks(source, masks, into)
        for run in runs:
            joined = _RunMerge(source, into, run, say).join()
            if before := merged.get(joined.run_id):
                shards, arms = before.added_shards + joined.added_shards, before.added_arms + joined.added_arms
                joined = replace(joined, added_shards=shards, added_arms=arms)
            merged[joined.run_id] = joined
    return list(merged.values())


_MASKS = "SELECT name, mask_id FROM masks"


def _add_masks(source: Store, theirs: Sequence[Mapping[str, Any]], into: Store) -> None:
    known = {row["name"]: row["mask_id"] for row in into.query(_MASKS).to_pylist()}
    new = []
    for row in theirs:
        if known.get(row["name"], row["mask_id"]) != row["mask_id"]:
            raise MergeError(
                f"mask {row['name']} of {source.path} has other heads or another origin than in {into.path}. Merge into"
                " another store"
            )
        if row["name"] not in known:
            new.append(row["mask_id"])
    if new:
        _copy(source, into, {table.name: ("mask_id IN (SELECT unnest(?))", [new]) for table in _OF_MASK})


#: A condition on the rows of a table, and its parameters.
_Where = tuple[str, list[Any]]


def _copy(
    source: Store, into: Store, wheres: Mapping[str, _Where], *, first: Sequence[tuple[str, list[Any]]] = ()
) -> None:
    """Copy the rows of tables in one transaction, after the statements ``first``."""
    with source.reading():
        tables = {name: _rows_where(source, name, where) for name, where in wheres.items()}
    with into.merge_transaction() as connection:
        for statement, parameters in first:
            connection.execute(statement, parameters)
        for name, rows in tables.items():
            _insert(connection, name, rows)


def _rows_where(store: Store, table: str, where: _Where) -> pa.Table:
    return store.query(f"SELECT {', '.join(TABLES[table].names)} FROM {table} WHERE {where[0]}", where[1])


def _insert(connection: duckdb.DuckDBPyConnection, table: str, rows: pa.Table, conflicts: str = "") -> None:
    if rows.num_rows:
        connection.register("merged_rows", rows)
        connection.execute(f"INSERT {conflicts}INTO {table} BY NAME FROM merged_rows")
        connection.unregister("merged_rows")


_ARMS = "SELECT arm_id, name, status FROM arms WHERE run_id = ? ORDER BY started_at, arm_id"


class _RunMerge:
    """The merge of one run, a row of ``runs`` of the source."""

    def __init__(self, source: Store, into: Store, run: Mapping[str, Any], say: Callable[[str], None]) -> None:
        self._source, self._into, self._theirs, self._say = source, into, run, say
        self._run_id = str(run["run_id"])
        self._by_shard = run["kind"] in SHARDED_KINDS
        self._ours: Mapping[str, Any] | None = None

    def join(self) -> MergedRun:
        """Add what the store lacks of the run."""
        of_run: _Where = ("run_id = ?", [self._run_id])
        with self._reading():
            known = self._into.query("FROM runs WHERE run_id = ?", [self._run_id]).to_pylist()
            self._ours = known[0] if known else None
            if self._ours is not None:
                self._compare_runs(self._ours)
            common, new_shards = self._read_ledgers()
            arms, our_arms = (store.query(_ARMS, [self._run_id]).to_pylist() for store in (self._source, self._into))
            for unit, what in self._contradicting_units(of_run):
                raise self._contradiction(f"unit {unit} ({what}) has other numbers")
            units = _rows_where(self._source, "units", of_run)
            missing = {table.name: of_run for table in self._missing(_OF_RUN, of_run)}
            if not self._by_shard and not (our_arms or arms):  # other results follow from shards or arms
                for table in _OF_RUN:
                    if table.name not in missing and self._differ(table, of_run):
                        raise self._contradiction(f"other rows of {table.name}")
            if modes := sorted(self._modes(self._source) - self._modes(self._into)):
                missing["head_effects"] = ("run_id = ? AND mode IN (SELECT unnest(?))", [self._run_id, modes])
            schema = _rows_where(self._source, "runs", ("false", [])).schema
        if self._ours is None:
            begun = {**self._theirs, "status": "running", "writer": this_process(), "finished_at": None}
            with self._into.merge_transaction() as connection:
                _insert(connection, "runs", pa.Table.from_pylist([begun], schema=schema))
        self._compare_shards(common)
        for group in _groups(new_shards):
            _copy(self._source, self._into, {table.name: self._of_shards(table, group) for table in _OF_SHARD})
        added_arms = self._add_arms(arms, {arm["arm_id"]: arm for arm in our_arms})
        tables = dict[str, pa.Table]()
        if missing:
            with self._source.reading():
                tables = {name: _rows_where(self._source, name, where) for name, where in missing.items()}
        with self._into.merge_transaction() as connection:
            _insert(connection, "units", units, "OR IGNORE ")
            done = "SELECT arm_id FROM arms WHERE run_id = $1 AND status = 'finished'"
            connection.execute(f"DELETE FROM units WHERE run_id = $1 AND arm_id IN ({done})", [self._run_id])
            for name, rows in tables.items():
                _insert(connection, name, rows)
            row = self._finish(connection)
        if row["status"] == "finished" and self._by_shard and "head_summaries" not in tables:
            self._into.summarise(self._run_id)
        return MergedRun(**row, added_shards=len(new_shards), added_arms=added_arms)

    def _contradiction(self, what: str) -> MergeError:
        return MergeError(
            f"run {self._run_id}: {what} in {self._source.path} and in {self._into.path}. Keep the store with the right"
            " rows and leave the other one out"
        )

    def _compare_runs(self, ours: Mapping[str, Any]) -> None:
        """Raise MergeError if the numbers of both runs do not belong together."""
        theirs = self._theirs
        pairs = [(name, ours[name], theirs[name]) for name in _DECIDING]
        if self._by_shard:
            mine, other = (json.loads(run["config"]).get("shard_size") for run in (ours, theirs))
            pairs += [("shard_size", mine, other), ("total_shards", ours["total_shards"], theirs["total_shards"])]
            # Before a run has read its corpus to the end, the hash does not cover the text.
            mine, other = (run["corpus_hash"] if _is_read(run) else None for run in (ours, theirs))
            pairs += [("corpus_hash", mine, other)]
        for name, mine, other in pairs:
            if None not in (mine, other) and mine != other:
                shown = "" if name == "grid" else f" {other} and {mine}"
                raise self._contradiction(f"other {name}{shown}")

    def _read_ledgers(self) -> tuple[list[int], list[dict[str, Any]]]:
        """Return the shards of both stores, and the ledger rows that only the source has."""
        ledger = "SELECT shard, content_hash, head_rows FROM shards WHERE run_id = ? ORDER BY shard"
        theirs = self._source.query(ledger, [self._run_id]).to_pylist()
        ours = {row["shard"]: row for row in self._into.query(ledger, [self._run_id]).to_pylist()}
        common = [row for row in theirs if row["shard"] in ours]
        for row in common:
            if row["content_hash"] != ours[row["shard"]]["content_hash"]:
                raise self._contradiction(f"shard {row['shard']} has other text")
        return [row["shard"] for row in common], [row for row in theirs if row["shard"] not in ours]

    def _of_shards(self, table: Table, shards: Sequence[int]) -> _Where:
        """Return the condition for the rows of shards."""
        if "shard" in table.names:
            return "run_id = ? AND shard IN (SELECT unnest(?))", [self._run_id, list(shards)]
        sequences = "SELECT sequence FROM sequences WHERE run_id = ? AND shard IN (SELECT unnest(?))"
        return f"run_id = ? AND sequence IN ({sequences})", [self._run_id, self._run_id, list(shards)]

    def _compare_shards(self, shards: Sequence[int]) -> None:
        """Raise MergeError if a shard of both stores has other rows; its ledger row may differ in time and place."""
        if not shards:
            return
        where: _Where = ("run_id = ? AND shard IN (SELECT unnest(?))", [self._run_id, list(shards)])
        tables = [table for table in _OF_SHARD if table.name != "shards"]
        hashes = []
        for store in (self._source, self._into):
            with store.reading():
                hashes.append({table.name: _hashes(store, table, where, ["shard"]) for table in tables})
        theirs, ours = hashes
        for name, rows in theirs.items():
            for shard in shards:
                if rows.get((shard,)) != ours[name].get((shard,)):
                    raise self._contradiction(f"shard {shard} has other rows of {name}")

    def _add_arms(self, arms: Sequence[Mapping[str, Any]], our_arms: Mapping[str, Mapping[str, Any]]) -> int:
        """Add the arms of the source that the store, with ``our_arms`` by id, lacks; return their number."""
        new, both, added = list[str](), list[str](), 0
        names = {row["name"]: arm_id for arm_id, row in our_arms.items()}
        for arm in arms:
            arm_id, ours = arm["arm_id"], our_arms.get(arm["arm_id"])
            if names.get(arm["name"], arm_id) != arm_id:
                raise self._contradiction(f"arm {arm['name']} has other settings")
            states = (ours and ours["status"], arm["status"])
            if ours is None or states == ("running", "finished"):
                new.append(arm_id)
                added += ours is None
            elif states == ("finished", "finished"):
                both.append(arm_id)
        missing = list[tuple[list[Table], _Where]]()
        for arm_id in both:
            where: _Where = ("arm_id = ?", [arm_id])
            with self._reading():  # for one arm, because writers wait
                if self._differ(TABLES["answers"], where):
                    raise self._contradiction(f"arm {our_arms[arm_id]['name']} has other answers")
                missing.append((self._missing(_OF_ARM, where), where))
        of_arm = ("arms", *(table.name for table in _OF_ARM))
        for first in range(0, len(new), _GROUP_ARMS):
            where = "arm_id IN (SELECT unnest(?))", [new[first : first + _GROUP_ARMS]]
            emptied = [(f"DELETE FROM {name} WHERE {where[0]}", where[1]) for name in of_arm]
            _copy(self._source, self._into, dict.fromkeys(of_arm, where), first=emptied)
        for tables, where in missing:
            if tables:
                _copy(self._source, self._into, {table.name: where for table in tables})
        return added

    @contextmanager
    def _reading(self) -> Iterator[None]:
        """Keep both stores open for several short reads."""
        with self._source.reading(), self._into.reading():
            yield

    def _missing(self, tables: Sequence[Table], where: _Where) -> list[Table]:
        """Return the tables of which the source has rows and the store has none."""
        return [t for t in tables if _has_rows(self._source, t, where) and not _has_rows(self._into, t, where)]

    def _modes(self, store: Store) -> set[str]:
        """Return the modes of an ablate run that have their effects; a mode has those of all its heads or of none."""
        rows = store.query("SELECT DISTINCT mode FROM head_effects WHERE run_id = ?", [self._run_id])
        return set(rows["mode"].to_pylist())

    def _contradicting_units(self, where: _Where) -> list[tuple[Any, ...]]:
        """Return the units that have other numbers in the two stores."""
        theirs, ours = (
            _hashes(store, TABLES["units"], where, ["unit", "what"]) for store in (self._source, self._into)
        )
        return [unit for unit in theirs.keys() & ours.keys() if theirs[unit] != ours[unit]]

    def _differ(self, table: Table, where: _Where) -> bool:
        return _hashes(self._source, table, where) != _hashes(self._into, table, where)

    def _finish(self, connection: duckdb.DuckDBPyConnection) -> dict[str, Any]:
        """Join both rows of ``runs`` into one, and set its status; return what `MergedRun` shows of it."""
        theirs, ours = self._theirs, self._ours or self._theirs
        read = next((run for run in (ours, theirs) if _is_read(run)), ours)
        total = next((run["total_shards"] for run in (read, ours, theirs) if run["total_shards"] is not None), None)
        counted = "(SELECT count(*) FROM shards WHERE run_id = $1)"
        unfinished = "(SELECT count(*) FROM arms WHERE run_id = $1 AND status <> 'finished')"
        # Arms of one mode may come from several stores, none of which has all of them and therefore their effects.
        no_effects = (
            f"(SELECT count(*) FROM arms WHERE run_id = $1 AND config ->> '$.mode' IN ('{EACH}', '{ALL_BUT_ONE}')"
            " AND config ->> '$.mode' NOT IN (SELECT mode FROM head_effects WHERE run_id = $1))"
        )
        [(shards, open_work)] = connection.execute(
            f"SELECT {counted}, {unfinished} + {no_effects}", [self._run_id]
        ).fetchall()
        status: RunStatus
        if self._by_shard:
            status = "finished" if _is_read(read) and shards == total else "part"
        else:
            status = "finished" if "finished" in (ours["status"], theirs["status"]) and not open_work else "running"
        parts = json.loads(theirs["config"]).get("parts", ())
        values = {
            "started_at": min(ours["started_at"], theirs["started_at"]),
            "config": to_json(joined_parts(json.loads(ours["config"]), parts)),
            "provenance": self._provenance(),
            "writer": this_process(),
        }
        if status == "running":
            values |= {"status": status, "finished_at": None}
        else:
            ends = [run["finished_at"] for run in (ours, theirs) if run["finished_at"] is not None]
            values |= {"status": status, "finished_at": max(ends, default=None), "total_shards": total}
            values |= {name: read[name] for name in ("report", "corpus_hash") if read[name] is not None}
        changes = ", ".join(f"{name} = ?" for name in values)
        connection.execute(f"UPDATE runs SET {changes} WHERE run_id = ?", [*values.values(), self._run_id])
        shown = ("run_id", "kind", "model", "corpus", "status", "total_shards")
        row = connection.execute(f"SELECT {', '.join(shown)} FROM runs WHERE run_id = ?", [self._run_id]).fetchone()
        assert row is not None
        return dict(zip(shown, row, strict=True)) | {"shards": shards}

    def _provenance(self) -> str:
        """Return the software and devices of both runs in the order of time, and report changes."""
        ours, theirs = (json.loads(run["provenance"]) for run in (self._ours or self._theirs, self._theirs))
        new = [entry for entry in theirs if all(_without_time(entry) != _without_time(known) for known in ours)]
        for entry in new:
            changes = ", ".join(provenance_changes(ours[-1], entry)) or "other software"
            self._say(f"run {self._run_id} in {self._source.path}: {changes}; both are recorded in runs.provenance")
        return to_json(sorted([*ours, *new], key=lambda entry: str(entry["since"])))


def _has_rows(store: Store, table: Table, where: _Where) -> bool:
    return store.query(f"SELECT 1 FROM {table.name} WHERE {where[0]} LIMIT 1", where[1]).num_rows > 0


def _hashes(
    store: Store, table: Table, where: _Where, by: Sequence[str] = ()
) -> dict[tuple[Any, ...], tuple[int, str | None]]:
    """Return the number of rows and their hash, which no order changes, by the values of the columns ``by``; rows
    without a column ``shard`` have that of their sequence.
    """
    joined = " JOIN sequences USING (run_id, sequence)" if {*by} - {*table.names} else ""
    numbers = ", ".join(f"{table.name}.{name}" for name in table.names)
    query = (
        f"SELECT {''.join(f'{name}, ' for name in by)}count(*) AS count, sum(hash({numbers}))::VARCHAR AS hash"
        f" FROM {table.name}{joined} WHERE {where[0]} GROUP BY ALL"
    )
    rows = zip(*store.query(query, where[1]).to_pydict().values(), strict=True)
    return {tuple(key): (count, hashed) for *key, count, hashed in rows}


def _groups(shards: Sequence[Mapping[str, Any]]) -> Iterator[list[int]]:
    """Yield the indices of shards with up to `_GROUP_ROWS` rows together, or of one larger shard."""
    group: list[int] = []
    rows = 0
    for shard in shards:
        if group and rows + shard["head_rows"] > _GROUP_ROWS:
            yield group
            group, rows = [], 0
        group.append(shard["shard"])
        rows += shard["head_rows"]
    if group:
        yield group


def _is_read(run: Mapping[str, Any]) -> bool:
    """Return True if a run has read its corpus to the end."""
    return run["status"] in ("finished", "part") and run["total_shards"] is not None


def _without_time(entry: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in entry.items() if name != "since"}
