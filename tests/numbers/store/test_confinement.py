"""A connection to a store reaches its own tables and nothing else, its own files included."""

from __future__ import annotations

import threading
from pathlib import Path

import duckdb
import pytest

from headscan.errors import QueryError
from headscan.store import connection as store_connection
from headscan.store.connection import READING
from tests.numbers.conftest import Scan


@pytest.mark.parametrize(
    "sql",
    [
        "COPY (SELECT 42) TO '{store}' (FORMAT csv, USE_TMP_FILE false)",
        "COPY (SELECT 42) TO '{store}' (FORMAT csv)",
        "COPY (SELECT 42) TO '{store}.wal' (FORMAT csv, USE_TMP_FILE false)",
        "COPY (SELECT 42) TO '{store}.tmp/new.csv' (FORMAT csv, USE_TMP_FILE false)",
        "COPY (SELECT 42 AS a) TO '{store}.tmp' (FORMAT csv, PARTITION_BY (a))",
        "WITH written AS (COPY (SELECT 42) TO '{store}' (FORMAT csv, USE_TMP_FILE false)) SELECT 1",
        "EXPORT DATABASE '{store}.tmp'",
        "EXPORT DATABASE '{store}'",
        "FROM read_blob('{store}')",
        "FROM read_text('{store}.wal')",
        "FROM read_text('{store}.tmp/left')",
        "FROM glob('{store}*')",
        "ATTACH '{store}' AS again (READ_ONLY)",
        "ATTACH '{store}.wal' AS again",
        "ATTACH '{store}.tmp/new.duckdb' AS again",
        "CALL enable_logging(storage = 'file', storage_path = '{store}.tmp')",
        "SET disabled_filesystems = ''",
        "RESET disabled_filesystems",
        "SET temp_directory = '{store}.tmp'",
        "LOAD httpfs",
        "DELETE FROM runs",
        "CREATE TABLE mine (a INTEGER)",
        "COPY runs TO '{dir}/out.csv'",
        "EXPORT DATABASE '{dir}/out'",
        "ATTACH '{dir}/out.duckdb'",
        "FROM read_text('{dir}/secret.txt')",
        "FROM '{dir}/secret.csv'",
        "SET enable_external_access = true",
        "RESET lock_configuration",
        "INSTALL httpfs",
        "FROM sql",
    ],
)
def test_a_query_reaches_no_file_not_even_those_of_its_own_store(scan: Scan, sql: str) -> None:
    folder = Path(f"{scan.store.path}.tmp")
    folder.mkdir()
    (folder / "left").write_text("temporary rows")
    for name in ("secret.txt", "secret.csv"):
        (folder.parent / name).write_text("a,b\n1,2\n")

    def files() -> dict[Path, bytes]:
        return {p: p.read_bytes() for p in scan.store.path.parent.rglob("*") if p.is_file()}

    before = files()
    with pytest.raises(QueryError) as caught:
        scan.store.query(sql.replace("{store}", str(scan.store.path)).replace("{dir}", str(folder.parent)))
    assert "\n" not in str(caught.value)
    assert files() == before


_LARGE = "(SELECT i, md5(i::VARCHAR) AS text FROM range(1500000) numbers(i))"


@pytest.mark.parametrize(
    "sql",
    [
        f"SELECT count(*) FROM (SELECT text, row_number() OVER (ORDER BY text) AS place FROM {_LARGE}) WHERE place > 9",
        f"SELECT count(*) FROM {_LARGE} a JOIN {_LARGE} b USING (text)",
    ],
)
def test_a_query_larger_than_memory_ends_in_one_line(scan: Scan, monkeypatch: pytest.MonkeyPatch, sql: str) -> None:
    monkeypatch.setattr(store_connection, "READING", {**READING, "memory_limit": "40MB", "threads": "1"})
    with pytest.raises(QueryError, match=r"^the query needs more memory than DuckDB may use .*fewer columns") as caught:
        scan.store.query(sql)
    assert "\n" not in str(caught.value)
    assert [p.name for p in scan.store.path.parent.iterdir()] == [scan.store.path.name]


def test_connections_of_one_process_are_all_confined(scan: Scan) -> None:
    refused = []

    def read() -> None:
        for _ in range(5):
            with scan.store.connect(read_only=True) as connection:
                try:
                    connection.execute(f"FROM read_blob('{scan.store.path}')")
                except duckdb.PermissionException:
                    refused.append(connection.execute("SELECT count(*) FROM runs").fetchone())

    with scan.store.connect(read_only=True):
        threads = [threading.Thread(target=read) for _ in range(3)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert refused == [(1,)] * 15


def test_a_connection_that_writes_reaches_no_other_file(scan: Scan, tmp_path: Path) -> None:
    (tmp_path / "secret.txt").write_text("secret")
    with scan.store.connect() as connection:
        for sql in ("FROM read_text('{dir}/secret.txt')", "COPY runs TO '{dir}/out.csv'", "ATTACH '{dir}/o.duckdb'"):
            with pytest.raises(duckdb.PermissionException):
                connection.execute(sql.replace("{dir}", str(tmp_path)))
