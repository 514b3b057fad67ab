"""Opening a store: creation, format check, upgrade and check of its definitions.

After a crash the disk holds either a complete store with its ``.wal``, which the next opening replays, or no store and
a hidden ``.<name>.<random>.new``, which is never read. A store gets its name only after its tables are complete.
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
    """Rename ``fresh`` to ``path`` unless another process created a store there first."""
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
    """Create an empty store and move it to ``path``."""
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
        raise NotAStoreError(f"{path} is a directory, not a headscan store. Name a file")
    return path.exists() and path.stat().st_size > 0


def _create_where_missing(path: Path, timeout: float, on_wait: Callable[[str], None] | None) -> None:
    """Create the store if the file is missing or has no tables."""
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
    """State of a file at its last check, or after the last write of this process.

    An unchanged file is not checked again.
    """

    def __init__(self) -> None:
        self._state: tuple[tuple[int, ...] | None, ...] | None = None

    def remember(self, path: Path) -> None:
        """Remember the state of ``path``, which this process holds open or has just closed."""
        self._state = _state(path)

    def holds(self, path: Path) -> bool:
        """Return True if the store at ``path`` and its log are unchanged."""
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
    """Open a connection to the store at ``path`` and close it.

    Closing it releases the lock.

    An older store is upgraded first, even for reading. A file that is not a store stays unchanged.

    Args:
        checked: State of the last check; updated here.
        read_only: Share the store with other readers and block all file access; otherwise lock it exclusively.
        create: Create a missing store; only for writing.
        timeout: Seconds to wait for the lock of another process.
        on_wait: Called with a message when a wait or an upgrade begins; None disables it.

    Raises:
        StoreError: Missing, locked, of a newer schema, not a store, different from the schema, full, or unreadable.
    """
    if create:
        _create_where_missing(path, timeout, on_wait)
    elif not _is_file_with_content(path):
        raise StoreMissingError(f"there is no store at {path}. Run `headscan scan` first, or name another path")
    reading = partial(connected, path, read_only=True, timeout=timeout, on_wait=on_wait)
    writing = partial(connected, path, read_only=False, timeout=timeout, on_wait=on_wait)
    if read_only or not checked.holds(path):
        with reading() as connection:
            known = checked.holds(path)
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
        if not checked.holds(path):  # the lock is held now, so no other process can write
            written_with(connection, path)
            verify(connection, path)
        yield connection
