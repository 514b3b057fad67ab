"""Errors of files that cannot be opened, and the state after a crash."""

from __future__ import annotations

import errno
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import duckdb
import pyarrow as pa
import pytest

from headscan.errors import (
    NotAStoreError,
    QueryError,
    StoreError,
    StoreFullError,
    StoreLockedError,
    StoreMissingError,
    StoreVersionError,
)
from headscan.store import connection as store_connection
from headscan.store.records import ShardRecord, ShardToWrite
from headscan.store.store import Store
from headscan.store.tables import SCHEMA_VERSION
from tests.numbers.conftest import Scan, head_table, make_stats, scan_record, sequence_table
from tests.sources import ROOT


def _script(path: Path, body: str) -> subprocess.Popen[str]:
    """Another process with the store's file open in ``c``; it has printed a line when this returns."""
    code = f"import duckdb, sys, time\nc = duckdb.connect({str(path)!r})\n{body}"
    process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None and process.stdout.readline() == "ready\n"
    return process


def test_reading_a_missing_store_fails_with_a_fix_and_creates_nothing(tmp_path: Path) -> None:
    with pytest.raises(StoreMissingError, match=r"no\.duckdb\. Run `headscan scan`"):
        Store(tmp_path / "no.duckdb").query("FROM runs")
    assert list(tmp_path.iterdir()) == []


def test_a_file_that_is_no_database_is_refused_unchanged(tmp_path: Path) -> None:
    path = tmp_path / "notes.txt"
    path.write_text("my notes\n" * 1000)
    before = path.read_bytes()
    for attempt in (lambda: Store(path).begin_run(scan_record()), lambda: Store(path).query("FROM runs")):
        with pytest.raises(NotAStoreError, match="or any DuckDB file"):
            attempt()
    assert path.read_bytes() == before
    with pytest.raises(NotAStoreError, match="is a directory"):
        Store(tmp_path).begin_run(scan_record())


@pytest.mark.parametrize(
    ("statements", "error", "message"),
    [
        (["CREATE TABLE mine (a INTEGER)"], NotAStoreError, "not a headscan store"),
        (["CREATE TABLE meta (a INTEGER)"], NotAStoreError, "not a headscan store"),
        (
            [
                "CREATE TABLE meta (key VARCHAR, value VARCHAR)",
                "INSERT INTO meta VALUES ('format', 'headscan store'), ('schema_version', '99')",
            ],
            StoreVersionError,
            rf"has schema 99 \(this headscan reads schema {SCHEMA_VERSION}\)\. Use the version .*, or scan again",
        ),
    ],
)
def test_another_database_is_refused_unchanged(
    tmp_path: Path, statements: list[str], error: type[StoreError], message: str
) -> None:
    path = tmp_path / "other.duckdb"
    with duckdb.connect(str(path)) as connection:
        # As after a crash: opening such a file for writing would fold its log into it.
        for statement in ("PRAGMA disable_checkpoint_on_shutdown", *statements):
            connection.execute(statement)
    log = Path(f"{path}.wal")
    before = path.read_bytes(), log.read_bytes()
    store = Store(path)
    attempts = (lambda: store.begin_run(scan_record()), lambda: store.finish_run("r"), lambda: store.runs())
    for attempt in attempts:
        with pytest.raises(error, match=message):
            attempt()
    assert (path.read_bytes(), log.read_bytes()) == before
    assert sorted(tmp_path.iterdir()) == [path, log]


@pytest.mark.parametrize("content", ["zero bytes", "no tables"])
def test_an_empty_file_becomes_a_store_when_written_and_is_missing_when_read(tmp_path: Path, content: str) -> None:
    path = tmp_path / "new.duckdb"
    if content == "zero bytes":
        path.touch()
    else:
        duckdb.connect(str(path)).close()
    with pytest.raises(StoreMissingError, match="Run `headscan scan`"):
        Store(path).runs()
    Store(path).begin_run(scan_record())
    assert len(Store(path).runs()) == 1
    assert list(tmp_path.iterdir()) == [path]


def test_a_creation_that_fails_leaves_no_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(_: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(store_connection.os, "fsync", full)
    with pytest.raises(StoreFullError, match=r"new\.duckdb: no space left on its device"):
        Store(tmp_path / "new.duckdb").begin_run(scan_record())
    assert list(tmp_path.iterdir()) == []


def test_a_held_lock_is_waited_for_and_reported_once(scan: Scan) -> None:
    process = _script(scan.store.path, "print('ready', flush=True); time.sleep(0.6); c.close()")
    messages: list[str] = []
    store = Store(scan.store.path, lock_timeout=20.0, on_wait=messages.append)
    started = time.monotonic()
    assert len(store.runs()) == 1
    assert time.monotonic() - started > 0.1
    assert len(messages) == 1 and f"process {process.pid}" in messages[0]
    assert process.wait(10) == 0


def test_a_lock_that_stays_names_the_file_and_its_holder(scan: Scan) -> None:
    process = _script(scan.store.path, "print('ready', flush=True); time.sleep(60)")
    try:
        with pytest.raises(StoreLockedError) as caught:
            Store(scan.store.path, lock_timeout=0.2).begin_run(scan_record("more"))
    finally:
        process.kill()
        process.wait(10)
    assert str(scan.store.path) in str(caught.value)
    assert f"process {process.pid} after 0.2 s" in str(caught.value)
    assert "\n" not in str(caught.value)


def test_two_readers_at_once(scan: Scan) -> None:
    with scan.store.connect(read_only=True) as connection:
        code = f"from headscan.store.store import Store; print(len(Store({str(scan.store.path)!r}).runs()))"
        assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT).stdout == "1\n"
        assert connection.execute("SELECT count(*) FROM runs").fetchone() == (1,)


def test_a_block_of_reading_opens_the_file_once(scan: Scan) -> None:
    """Its connections share one DuckDB with its settings, stay confined, and nobody writes meanwhile."""
    limit = "SELECT current_setting('memory_limit')"
    with scan.store.connect(read_only=True, memory="100MB") as connection:
        assert connection.execute(limit).fetchall() == [("95.3 MiB",)]
    with ThreadPoolExecutor(1) as thread, scan.store.reading():
        with scan.store.connect(read_only=True, memory="100MB") as connection:
            assert connection.execute(limit).fetchall() != [("95.3 MiB",)]
        with scan.store.reading():
            assert len(scan.store.runs()) == 1
        with pytest.raises(QueryError, match="no file access"):
            scan.store.query("FROM read_csv('/etc/hostname')")
        with pytest.raises(StoreError, match=r"while a block of reading\(\) holds it"):
            scan.store.begin_run(scan_record("more"))
        with pytest.raises(StoreLockedError):
            Store(scan.store.path, lock_timeout=0.1).begin_run(scan_record("more"))
        waiting = thread.submit(scan.store.begin_run, scan_record("more"))
        time.sleep(0.1)
        assert not waiting.done()
    assert not waiting.result(10).resumed
    assert len(scan.store.runs()) == 2


def test_a_writer_killed_in_a_transaction_leaves_the_last_shard_whole(scan: Scan) -> None:
    """One row is committed to the log only, one is not committed: the first survives, the second leaves no trace."""
    process = _script(
        scan.store.path,
        "row = \"INSERT INTO shards VALUES ('{}', {}, 'h', 1, 0, 0, 1, NULL, NULL, now())\"\n"
        f"c.execute(row.format({scan.run_id!r}, 7))\n"
        "c.execute('BEGIN')\n"
        f"c.execute(row.format({scan.run_id!r}, 8))\n"
        "c.execute('INSERT INTO head_statistics BY NAME SELECT * REPLACE (sequence + 1000 AS sequence)"
        " FROM head_statistics')\n"
        "print('ready', flush=True); time.sleep(60)",
    )
    process.send_signal(signal.SIGKILL)
    process.wait(10)
    assert Path(f"{scan.store.path}.wal").exists()
    rows = "SELECT count(*) AS n, max(sequence) AS last FROM head_statistics"
    expected = [{"n": scan.stats["entropy"].size, "last": len(scan.stats["entropy"]) - 1}]
    assert scan.store.query(rows).to_pylist() == expected
    assert list(scan.store.begin_run(scan_record()).shards) == [0, 1, 7]
    scan.store.add_shards(
        scan.run_id, [ShardToWrite(ShardRecord(8, "h"), sequence_table(100, 1), head_table(make_stats(), 0, 0))]
    )
    assert list(scan.store.begin_run(scan_record()).shards) == [0, 1, 7, 8]
    assert scan.store.query(rows).to_pylist() == expected


_FULL = """
import resource, signal
import numpy as np, pyarrow as pa
from tests.numbers.conftest import head_table, scan_record, sequence_table
from headscan.errors import StoreFullError
from headscan.store.records import ShardRecord, ShardToWrite
from headscan.store.store import Store

signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, ({limit}, resource.RLIM_INFINITY))
n = 300_000
rows = {{"sequence": np.zeros(n, int), "site": ["self"] * n, "kv_head": np.zeros(n, int)}}
rows |= {{"layer": np.zeros(n, int), "head": np.arange(n) % 99, "entropy": np.random.default_rng(0).random(n)}}
try:
    Store({path!r}).add_shards({run_id!r}, [ShardToWrite(ShardRecord(9, "h"), sequence_table(50, 1), pa.table(rows))])
except StoreFullError as error:
    print(error)
"""


def test_a_full_device_rolls_the_shard_back(scan: Scan) -> None:
    """A limit on the size of files stands in for the device: the write itself fails, in DuckDB."""
    before = scan.store.query("FROM head_statistics")
    limit = scan.store.path.stat().st_size + 100_000
    code = _FULL.format(limit=limit, path=str(scan.store.path), run_id=scan.run_id)
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT)
    assert done.stdout.startswith(f"cannot write {scan.store.path}: no space left on its device"), done.stderr
    assert scan.store.query("FROM head_statistics") == before
    assert list(scan.store.begin_run(scan_record()).shards) == [0, 1]
    scan.store.add_shards(
        scan.run_id, [ShardToWrite(ShardRecord(9, "h"), sequence_table(50, 1), head_table(make_stats(), 0, 0))]
    )
    assert list(scan.store.begin_run(scan_record()).shards) == [0, 1, 9]


def test_the_connection_is_closed_when_the_caller_raises(scan: Scan) -> None:
    with pytest.raises(ZeroDivisionError), scan.store.connect():
        raise ZeroDivisionError
    with duckdb.connect(str(scan.store.path), read_only=True) as connection:
        assert connection.sql("FROM runs").to_arrow_table().num_rows == 1


def test_an_error_in_a_transaction_takes_its_rows_back(scan: Scan) -> None:
    with scan.store.connect() as connection:
        with pytest.raises(ZeroDivisionError), store_connection.transaction(connection, scan.store.path):
            connection.execute("INSERT INTO meta VALUES ('half', 'done')")
            raise ZeroDivisionError
        assert connection.execute("SELECT count(*) FROM meta").fetchone() == (4,)


def test_a_connection_does_not_see_the_callers_variables(scan: Scan) -> None:
    mine = pa.table({"a": [1]})
    for read_only in (True, False):
        with scan.store.connect(read_only=read_only) as connection, pytest.raises(duckdb.CatalogException):
            connection.sql("FROM mine")
    assert mine.num_rows == 1
