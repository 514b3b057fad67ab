"""Opening a store: waiting for locks, telling a store from other files, creating it, and transactions.

What can be on disk after a hard crash: a whole store and its ``.wal`` (replayed by the next opening), or no store and a
hidden ``.<name>.<random>.new`` beside it (never looked at again). A store appears under its name only when its tables
are complete.
"""

from __future__ import annotations

import errno
import os
import re
import secrets
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path

import duckdb

from analysis.errors import (
    NotAStoreError,
    StoreError,
    StoreFullError,
    StoreLockedError,
    StoreMissingError,
    StoreVersionError,
)
from analysis.schema import FORMAT, SCHEMA_VERSION, schema_statements
from analysis.views import view_statements

#: A user's query may see the store, and neither files, the network, extensions nor the caller's Python variables.
CONFINED: Mapping[str, str] = {
    "enable_external_access": "false",
    "lock_configuration": "true",
}

_FULL = re.compile(r"no space left|quota exceeded|file too large", re.IGNORECASE)
_FULL_CODES = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
_FIRST_WAIT, _LONGEST_WAIT = 0.02, 0.5


def first_line(error: BaseException) -> str:
    """DuckDB's message without the position marker below it."""
    return str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__


def translated(error: duckdb.Error | OSError, path: Path) -> StoreError:
    """The error of ours that says what ``error`` means for the store at ``path``."""
    text = str(error)
    if _FULL.search(text) or (isinstance(error, OSError) and error.errno in _FULL_CODES):
        return StoreFullError(
            f"{path}: no space left on its device; nothing of this write was kept: free some space and run the same"
            " command again"
        )
    if "not a valid DuckDB database" in text:
        return NotAStoreError(f"{path} is not a headscan store (not even a DuckDB file): name another path")
    return StoreError(f"{path}: {first_line(error)}")


def _is_lock(error: duckdb.Error) -> bool:
    # The second: this very process has the file open for writing while it asks to read it, or the other way round.
    return "Could not set lock" in str(error) or "with a different configuration" in str(error)


def _holder(error: duckdb.Error) -> str:
    pid = re.search(r"PID (\d+)", str(error))
    return f"process {pid.group(1)}" if pid else "this process"


def _connect(
    path: Path,
    read_only: bool,
    config: Mapping[str, str],
    timeout: float,
    on_wait: Callable[[str], None] | None,
) -> duckdb.DuckDBPyConnection:
    """Open the file, waiting up to ``timeout`` seconds for whoever has it locked."""
    deadline = time.monotonic() + timeout
    pause = _FIRST_WAIT
    waited = False
    while True:
        try:
            return duckdb.connect(str(path), read_only=read_only, config=dict(config))
        except duckdb.Error as error:
            if not _is_lock(error):
                raise translated(error, path) from error
            left = deadline - time.monotonic()
            if left <= 0:
                raise StoreLockedError(
                    f"{path} is still in use by {_holder(error)} after {timeout:g} s: wait for it or end it, then run"
                    " the same command again"
                ) from error
            if not waited and on_wait is not None:
                on_wait(f"waiting up to {timeout:g} s for {path}, in use by {_holder(error)}")
            waited = True
            time.sleep(min(pause, left))
            pause = min(2 * pause, _LONGEST_WAIT)


def _is_empty(connection: duckdb.DuckDBPyConnection) -> bool:
    row = connection.execute("SELECT count(*) FROM duckdb_tables() WHERE NOT internal").fetchone()
    return row == (0,)


def _check(connection: duckdb.DuckDBPyConnection, path: Path) -> None:
    """Raise unless the open file is a store of this version. Reads only."""
    if _is_empty(connection):
        raise StoreMissingError(f"the store at {path} is empty: run `headscan scan` first, or name another path")
    try:
        meta = dict(connection.execute("SELECT key, value FROM meta").fetchall())
    except (duckdb.CatalogException, duckdb.BinderException):
        meta = {}
    if meta.get("format") != FORMAT:
        raise NotAStoreError(f"{path} is a DuckDB file but not a headscan store: name another path")
    version = meta.get("schema_version")
    if version != str(SCHEMA_VERSION):
        raise StoreVersionError(
            f"{path} has schema version {version}, this headscan reads version {SCHEMA_VERSION}: use the headscan that"
            " wrote it, or another path"
        )


@contextmanager
def transaction(connection: duckdb.DuckDBPyConnection, path: Path) -> Iterator[None]:
    """All or nothing; DuckDB's errors come out as ours."""
    try:
        connection.execute("BEGIN TRANSACTION")
        try:
            yield
            connection.execute("COMMIT")
        except BaseException:
            # After a failed COMMIT there is nothing left to roll back, and the first error is the one to report.
            with suppress(duckdb.Error):
                connection.execute("ROLLBACK")
            raise
    except (duckdb.Error, OSError) as error:
        raise translated(error, path) from error


def _make_schema(connection: duckdb.DuckDBPyConnection, path: Path) -> None:
    with transaction(connection, path):
        for statement in (*schema_statements(), *view_statements()):
            connection.execute(statement)


def _publish(fresh: Path, path: Path) -> None:
    """Give ``fresh`` the name ``path`` unless a store has taken it meanwhile: that one is kept."""
    if path.exists() and path.stat().st_size == 0:
        fresh.replace(path)
        return
    try:
        os.link(fresh, path)
    except FileExistsError:
        return
    except OSError:  # a file system without hard links
        fresh.rename(path)


def _create(path: Path) -> None:
    """Make an empty store beside ``path`` and move it there whole."""
    fresh = path.parent / f".{path.name}.{secrets.token_hex(4)}.new"
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with _connect(fresh, False, {}, 0.0, None) as connection:
            _make_schema(connection, path)
        _publish(fresh, path)
    except (duckdb.Error, OSError) as error:
        raise translated(error, path) from error
    finally:
        for leftover in (fresh, Path(f"{fresh}.wal")):
            with suppress(OSError):
                leftover.unlink()


def _is_file_with_content(path: Path) -> bool:
    if path.is_dir():
        raise NotAStoreError(f"{path} is a directory, not a headscan store: name a file")
    return path.exists() and path.stat().st_size > 0


def _prepare(path: Path, create: bool, timeout: float, on_wait: Callable[[str], None] | None) -> None:
    """Before writing: create the store, or see that the file is one, without changing a byte of a file that is not."""
    if create and not _is_file_with_content(path):
        _create(path)
    with _connect(path, True, {}, timeout, on_wait) as connection:
        empty = create and _is_empty(connection)
        if not empty:
            _check(connection, path)
    if empty:
        with _connect(path, False, {}, timeout, on_wait) as connection:
            if _is_empty(connection):
                _make_schema(connection, path)


@contextmanager
def opened(
    path: Path,
    *,
    read_only: bool,
    create: bool = False,
    confined: bool = False,
    timeout: float = 30.0,
    on_wait: Callable[[str], None] | None = None,
) -> Iterator[duckdb.DuckDBPyConnection]:
    """A connection to the store at ``path``, closed (and so unlocked) at the end.

    Args:
        read_only: Others may read at the same time; otherwise nobody else may have it open.
        create: Make the store when there is none; only for writing.
        confined: Nothing outside the store can be reached.
        timeout: How long to wait for somebody else's lock, in seconds.
        on_wait: Called with a message when waiting begins.

    Raises:
        StoreError: Missing, locked, of another version, no store, full, or not readable.
    """
    if not _is_file_with_content(path) and not create:
        raise StoreMissingError(f"there is no store at {path}: run `headscan scan` first, or name its path")
    if not read_only:
        _prepare(path, create, timeout, on_wait)
    connection = _connect(path, read_only, CONFINED if confined else {}, timeout, on_wait)
    try:
        _check(connection, path)
        yield connection
    except BaseException:
        with suppress(duckdb.Error):
            connection.close()
        raise
    try:
        connection.close()
    except duckdb.Error as error:
        raise translated(error, path) from error
