"""Reads from an open store: tables, Parquet files and errors."""

from __future__ import annotations

import re
import secrets
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import suppress
from difflib import get_close_matches
from pathlib import Path
from typing import Any

import duckdb
import pyarrow as pa
import pyarrow.parquet as pq

from headscan.analysis.errors import QueryError
from headscan.analysis.schema.tables import TABLES
from headscan.analysis.schema.views import ALL_RUNS, VIEWS
from headscan.analysis.store.connection import first_line, translated

_MISSING_TABLE = re.compile(r"Table with name (\S+) does not exist")
#: Views that most questions start from, and most names that an error lists.
_FIRST, _SHOWN_TABLES = ("head_summary", "arm_summary", "runs"), 5
#: Rows of one row group: as many are in memory while a table is written.
_GROUP_ROWS = 122_880
#: Seconds between two requests to stop a query; one that arrives before the query begins has no effect.
_BETWEEN_INTERRUPTS = 0.1


def refusal(error: duckdb.Error) -> QueryError:
    """Return the QueryError for a query that DuckDB refuses or cannot finish."""
    text = first_line(error)
    if isinstance(error, duckdb.OutOfMemoryException):
        return QueryError(
            f"the query needs more memory than DuckDB may use ({text.removeprefix('Out of Memory Error: ')}), and a"
            " read-only connection writes no temporary files. Query one run_id and fewer columns, or use a machine with"
            " more memory"
        )
    if "LocalFileSystem has been disabled" in text:
        return QueryError(
            "the query uses a file, but a read-only store has no file access. Remove the file from the query;"
            " `headscan sql` writes rows to standard output"
        )
    if missing := _MISSING_TABLE.search(text):
        return QueryError(_no_table(missing[1]))
    return QueryError(text)


def _no_table(name: str) -> str:
    """Return the message for a table that the store lacks, with the nearest names."""
    known = [each for each in (*VIEWS, *TABLES) if name.startswith(ALL_RUNS) or not each.startswith(ALL_RUNS)]
    stem = name.lower().removesuffix("s")
    alike = sorted((each for each in known if stem in each), key=lambda each: each not in _FIRST)
    near = list(dict.fromkeys([*alike, *get_close_matches(name.lower(), known)]))[:_SHOWN_TABLES] or [*_FIRST]
    return f"the store has no table or view {name!r}; near: {', '.join(near)}. `headscan sql --help` lists all names"


def rows(
    connection: duckdb.DuckDBPyConnection,
    sql: str,
    parameters: Sequence[Any] | None = None,
    tables: Mapping[str, pa.Table] | None = None,
) -> pa.Table:
    """Return the rows of a query; see ``Store.query``.

    Raises:
        QueryError: DuckDB refuses the query.
    """
    try:
        for name, table in (tables or {}).items():
            connection.register(name, table)
        return _interruptible(connection, lambda: _read(connection, sql, parameters))
    except duckdb.Error as error:
        raise refusal(error) from error


def _read(connection: duckdb.DuckDBPyConnection, sql: str, parameters: Sequence[Any] | None) -> pa.Table:
    relation = connection.sql(sql, params=parameters) if parameters else connection.sql(sql)
    return pa.table({}) if relation is None else relation.to_arrow_table()


def _interruptible(connection: duckdb.DuckDBPyConnection, read: Callable[[], pa.Table]) -> pa.Table:
    """Return the result of ``read``; Ctrl-C stops its query.

    DuckDB does not return to Python before a query ends, so the query runs in a thread, and this one stays free for
    signals.
    """
    with ThreadPoolExecutor(1) as executor:
        reading = executor.submit(read)
        try:
            return reading.result()
        finally:
            while not reading.done():
                connection.interrupt()
                wait([reading], _BETWEEN_INTERRUPTS)


def write_parquet(connection: duckdb.DuckDBPyConnection, name: str, directory: Path) -> Path:
    """Write a table or view to ``<directory>/<name>.parquet`` atomically.

    pyarrow writes the batches that DuckDB returns, so the connection needs no file access.

    Raises:
        StoreError: The directory cannot be written or is full.
        QueryError: DuckDB cannot read the table.
    """
    partial = directory / f".{name}.{secrets.token_hex(4)}.partial"
    try:
        directory.mkdir(parents=True, exist_ok=True)
        batches = connection.sql(f"FROM {name}").to_arrow_reader(_GROUP_ROWS)
        with pq.ParquetWriter(partial, batches.schema) as writer:
            for batch in batches:
                writer.write_batch(batch)
        return partial.replace(directory / f"{name}.parquet")
    except duckdb.Error as error:
        raise refusal(error) from error
    except OSError as error:
        raise translated(error, directory) from error
    finally:
        with suppress(OSError):
            partial.unlink(missing_ok=True)
