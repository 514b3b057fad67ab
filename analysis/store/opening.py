"""Opening a store: creating it, telling it from other files, upgrading it, and checking its definitions.

What can be on disk after a hard crash: a whole store and its ``.wal`` (replayed by the next opening), or no store and a
hidden ``.<name>.<random>.new`` beside it (never looked at again). A store appears under its name only when its tables
are complete.
"""

from __future__ import annotations

import os
import secrets
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path

import duckdb

from headscan.analysis.errors import NotAStoreError, StoreMissingError
from headscan.analysis.schema.tables import schema_statements
from headscan.analysis.schema.views import view_statements
from headscan.analysis.store.connection import connected, transaction, translated
from headscan.analysis.store.stored_definitions import tables
from headscan.analysis.store.upgrade import upgrade, verify, written_with


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
        with connected(fresh, read_only=False) as connection:
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


def _create_where_missing(path: Path, timeout: float, on_wait: Callable[[str], None] | None) -> None:
    """Create the store, also in a DuckDB file without tables."""
    if not _is_file_with_content(path):
        _create(path)
        return
    with connected(path, read_only=True, timeout=timeout, on_wait=on_wait) as connection:
        empty = not tables(connection)
    if empty:
        with connected(path, read_only=False, timeout=timeout, on_wait=on_wait) as connection:
            if not tables(connection):
                _make_schema(connection, path)


class Checked:
    """The state of a file when its definitions were last compared: while it lasts, reading compares nothing again."""

    def __init__(self) -> None:
        self._state: tuple[tuple[int, ...] | None, ...] | None = None

    def remember(self, path: Path) -> None:
        """Note the state of the store at ``path``, which this process has open, so that nobody writes to it."""
        self._state = _state(path)

    def holds(self, path: Path) -> bool:
        """True if neither the store at ``path`` nor its log has changed since."""
        return self._state is not None and self._state == _state(path)


def _state(path: Path) -> tuple[tuple[int, ...] | None, ...]:
    def of(file: Path) -> tuple[int, ...] | None:
        try:
            found = file.stat()
        except FileNotFoundError:
            return None
        return found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns, found.st_ctime_ns

    return of(path), of(Path(f"{path}.wal"))


@contextmanager
def opened(
    path: Path,
    checked: Checked,
    *,
    read_only: bool,
    create: bool = False,
    timeout: float = 30.0,
    on_wait: Callable[[str], None] | None = None,
) -> Iterator[duckdb.DuckDBPyConnection]:
    """A connection to the store at ``path``, closed (and so unlocked) at the end.

    An older store is upgraded first, also for reading. A file that is no store is not changed in a byte.

    Args:
        checked: The state that was compared last; for reading. It is brought up to date.
        read_only: Others may read at the same time, and the connection can use no files; otherwise nobody else may
            have it open.
        create: Make the store when there is none; only for writing.
        timeout: How long to wait for somebody else's lock, in seconds.
        on_wait: Called with a message when waiting or an upgrade begins.

    Raises:
        StoreError: Missing, locked, newer, no store, not as the schema defines it, full, or not readable.
    """
    if create:
        _create_where_missing(path, timeout, on_wait)
    elif not _is_file_with_content(path):
        raise StoreMissingError(f"there is no store at {path}: run `headscan scan` first, or name its path")
    reading = partial(connected, path, read_only=True, timeout=timeout, on_wait=on_wait)
    writing = partial(connected, path, read_only=False, timeout=timeout, on_wait=on_wait)
    with reading() as connection:
        known = read_only and checked.holds(path)
        outdated = not known and written_with(connection, path).outdated
        if read_only and not outdated:
            if not known:
                verify(connection, path)
                checked.remember(path)
            yield connection
            return
    if outdated:
        upgrade(path, writing, on_wait)
    with (reading if read_only else writing)() as connection:
        written_with(connection, path)
        verify(connection, path)
        yield connection
