"""Connections to the file of a store, and queries on them."""

from __future__ import annotations

import errno
import re
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import contextmanager, suppress
from difflib import get_close_matches
from pathlib import Path
from typing import Any

import duckdb
import pyarrow as pa

from headscan.analysis.errors import NotAStoreError, QueryError, StoreError, StoreFullError, StoreLockedError
from headscan.analysis.store.tables import TABLES
from headscan.analysis.store.views import ALL_RUNS, VIEWS

#: Settings of a writing connection, which uses the store, its log and its temporary folder.
WRITING: Mapping[str, str] = {
    "enable_external_access": "false",
    "autoinstall_known_extensions": "false",
    "autoload_known_extensions": "false",
    "allow_community_extensions": "false",
    "allow_persistent_secrets": "false",
}

#: Settings of a read-only connection; `confine` disables files once the store is open.
READING: Mapping[str, str] = {**WRITING, "temp_directory": ""}


def confine(connection: duckdb.DuckDBPyConnection) -> None:
    """Disable file access of a read-only connection permanently. Connections of one process to one store share
    settings, so a second connection finds them locked and files disabled.
    """
    try:
        connection.execute("SET disabled_filesystems = 'LocalFileSystem'")
        connection.execute("SET lock_configuration = true")
    except duckdb.InvalidInputException:
        if connection.execute("SELECT system.main.current_setting('lock_configuration')").fetchone() != (True,):
            raise


_FULL = re.compile(r"no space left|quota exceeded|file too large", re.IGNORECASE)
_FULL_CODES = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
_FIRST_WAIT, _LONGEST_WAIT = 0.02, 0.5


def first_line(error: BaseException) -> str:
    """Return the first line of an error message, without DuckDB's position marker."""
    return str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__


def translated(error: duckdb.Error | OSError, path: Path) -> StoreError:
    """Return the StoreError for an error of DuckDB or the filesystem."""
    text = str(error)
    if _FULL.search(text) or (isinstance(error, OSError) and error.errno in _FULL_CODES):
        return StoreFullError(
            f"cannot write {path}: no space left on its device. Nothing of this write was stored; free space and run"
            " the same command again"
        )
    if "not a valid DuckDB database" in text:
        return NotAStoreError(f"{path} is not a headscan store or any DuckDB file. Name another path")
    return StoreError(f"{path}: {first_line(error)}")


def _is_lock(error: duckdb.Error) -> bool:
    # The second message: this process already has the file open in the other mode (read or write).
    return "Could not set lock" in str(error) or "with a different configuration" in str(error)


def _holder(error: duckdb.Error) -> str:
    pid = re.search(r"PID (\d+)", str(error))
    return f"process {pid.group(1)}" if pid else "this process"


def _connect(
    path: Path,
    read_only: bool,
    timeout: float,
    on_wait: Callable[[str], None] | None,
) -> duckdb.DuckDBPyConnection:
    """Open the file; wait up to ``timeout`` seconds for another lock."""
    deadline = time.monotonic() + timeout
    pause = _FIRST_WAIT
    waited = False
    while True:
        try:
            return duckdb.connect(str(path), read_only=read_only, config=dict(READING if read_only else WRITING))
        except duckdb.Error as error:
            if not _is_lock(error):
                raise translated(error, path) from error
            left = deadline - time.monotonic()
            if left <= 0:
                raise StoreLockedError(
                    f"{path} is still in use by {_holder(error)} after {timeout:g} s. Wait for that process or end it,"
                    " then run the same command again"
                ) from error
            if not waited and on_wait is not None:
                on_wait(f"waiting up to {timeout:g} s for {path}, in use by {_holder(error)}")
            waited = True
            time.sleep(min(pause, left))
            pause = min(2 * pause, _LONGEST_WAIT)


@contextmanager
def connected(
    path: Path, *, read_only: bool, timeout: float = 0.0, on_wait: Callable[[str], None] | None = None
) -> Iterator[duckdb.DuckDBPyConnection]:
    """Open a connection that can access no other file. Closing it releases the lock.

    Args:
        read_only: Share the file with other readers and block all file access; otherwise lock it exclusively.
        timeout: Seconds to wait for the lock of another process.
        on_wait: Called with a message when a wait begins; None disables it.
    """
    connection = _connect(path, read_only, timeout, on_wait)
    try:
        if read_only:
            confine(connection)
        yield connection
    except BaseException as error:
        with suppress(duckdb.Error):
            connection.close()
        if isinstance(error, duckdb.Error):
            raise translated(error, path) from error
        raise
    try:
        connection.close()
    except duckdb.Error as error:
        raise translated(error, path) from error


@contextmanager
def transaction(connection: duckdb.DuckDBPyConnection, path: Path) -> Iterator[None]:
    """Run a block as one transaction; raise errors of DuckDB as StoreError."""
    try:
        connection.execute("BEGIN TRANSACTION")
        try:
            yield
            connection.execute("COMMIT")
        except BaseException:
            # A failed COMMIT leaves nothing to roll back; the first error is the one to report.
            with suppress(duckdb.Error):
                connection.execute("ROLLBACK")
            raise
    except (duckdb.Error, OSError) as error:
        raise translated(error, path) from error


_MISSING_TABLE = re.compile(r"Table with name (\S+) does not exist")
#: Views that most questions start from, and most names that an error lists.
_FIRST, _SHOWN_TABLES = ("head_summary", "arm_summary", "runs"), 5
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
    """Return the rows of a query; see ``Store.query``."""
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
    """Return the result of ``read``; Ctrl-C stops its query. DuckDB does not return to Python before a query ends, so
    the query runs in a thread, and this one stays free for signals.
    """
    with ThreadPoolExecutor(1) as executor:
        reading = executor.submit(read)
        try:
            return reading.result()
        finally:
            while not reading.done():
                connection.interrupt()
                wait([reading], _BETWEEN_INTERRUPTS)
