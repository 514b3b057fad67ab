"""In-place upgrade of a store from an older schema or DuckDB.

A store with an older schema is backed up first. DuckDB rewrites the SQL of views differently in each version, so
``meta`` records the version that wrote them.
"""

from __future__ import annotations

import filecmp
import itertools
import os
import secrets
import shutil
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, suppress
from pathlib import Path
from typing import BinaryIO, NamedTuple

import duckdb

from headscan.analysis.arm_kinds import ABLATING_KINDS_SQL
from headscan.analysis.errors import NotAStoreError, StoreChangedError, StoreMissingError, StoreVersionError
from headscan.analysis.schema.ddl import Table, comment_statements, literal, table_statements
from headscan.analysis.schema.tables import FORMAT, META_ROWS, SCHEMA_VERSION, TABLES
from headscan.analysis.schema.views import VIEWS, view_statements
from headscan.analysis.store.connection import transaction, translated
from headscan.analysis.store.stored_definitions import (
    KINDS,
    Definitions,
    Entry,
    definitions,
    differences,
    functions,
    tables,
)

#: Additional SQL of an upgrade from each schema version, which moves or fills data. It runs after missing tables and
#: columns were added and before views and functions are created.
STEPS: Mapping[int, Sequence[str]] = {
    # Before schema 8, ablated heads were always replaced by zero.
    7: (f"UPDATE arms SET replacement = 'zero' WHERE kind IN ({ABLATING_KINDS_SQL}) AND replacement IS NULL",)
}

_SHOWN = 5


class Written(NamedTuple):
    """Versions of the schema and of DuckDB that wrote a store."""

    schema: int
    duckdb: str | None

    @property
    def outdated(self) -> bool:
        return self.schema < SCHEMA_VERSION or self.duckdb != duckdb.__version__


def written_with(connection: duckdb.DuckDBPyConnection, path: Path) -> Written:
    """Return the versions that wrote the open file.

    It reads only the table ``meta``.

    Raises:
        StoreMissingError: The file has no tables.
        NotAStoreError: It is not a store.
        StoreVersionError: A newer headscan wrote it.
    """
    names = tables(connection)
    if not names:
        raise StoreMissingError(f"the store at {path} is empty. Run `headscan scan` first, or name another path")
    meta = _meta(connection) if "meta" in names else {}
    version = meta.get("schema_version") or ""
    if meta.get("format") != FORMAT or not (version.isascii() and version.isdecimal()):
        raise NotAStoreError(f"{path} is a DuckDB file but not a headscan store. Name another path")
    if int(version) > SCHEMA_VERSION:
        raise StoreVersionError(
            f"{path} has schema version {version}, newer than version {SCHEMA_VERSION} of this headscan. Install a"
            " newer headscan"
        )
    return Written(int(version), meta.get("duckdb_version"))


def _meta(connection: duckdb.DuckDBPyConnection) -> dict[str, str | None]:
    try:
        rows = connection.execute("SELECT key::VARCHAR, value::VARCHAR FROM main.meta LIMIT 100").fetchall()
    except (duckdb.BinderException, duckdb.CatalogException):  # another program's table of this name
        return {}
    return dict(rows)


def verify(connection: duckdb.DuckDBPyConnection, path: Path, kinds: Collection[str] = KINDS) -> None:
    """Raise StoreChangedError unless the definitions of the open file equal the schema.

    Args:
        kinds: Kinds of entries to compare.

    Raises:
        StoreChangedError: With the first differences.
    """
    found = differences(definitions(connection), kinds)
    if found:
        more = f" and {len(found) - _SHOWN} more" if len(found) > _SHOWN else ""
        raise StoreChangedError(
            f"{path} differs from the schema of a headscan store: {', '.join(found[:_SHOWN])}{more}. Use a copy that"
            " nobody has changed; do not use a changed store from an untrusted source"
        )


def upgrade(
    path: Path,
    connect: Callable[[], AbstractContextManager[duckdb.DuckDBPyConnection]],
    say: Callable[[str], None] | None = None,
) -> None:
    """Upgrade the store at ``path`` if it is outdated.

    Args:
        connect: Opens the store for writing, with an exclusive lock.
        say: Called with one line when a backup was written; None disables it.

    Raises:
        StoreVersionError: The file or its folder is read-only.
        StoreChangedError: The store differs from the schema, and the upgrade cannot fix it.
        StoreError: Locked, or no space left. After any error the store is unchanged.
    """
    if not (os.access(path, os.W_OK) and os.access(path.absolute().parent, os.W_OK)):
        raise StoreVersionError(
            f"{path} was written with an older schema or DuckDB and must be upgraded, but it or its folder is"
            " read-only. Copy the store to a folder that you can write to and name the copy"
        )
    # POSIX drops DuckDB's file lock when this process closes any handle of the file, so this handle is closed last.
    with path.open("rb") as content, connect() as connection:
        written = written_with(connection, path)
        if not written.outdated:
            return
        if written.schema < SCHEMA_VERSION:
            backup = _back_up(connection, content, path, written.schema)
            if say is not None:
                say(f"upgrading {path} from schema {written.schema} to {SCHEMA_VERSION}; the old file is {backup}")
        with transaction(connection, path):
            migrate(connection, path, written.schema)
            verify(connection, path)


def migrate(
    connection: duckdb.DuckDBPyConnection, path: Path, version: int, steps: Mapping[int, Sequence[str]] = STEPS
) -> None:
    """Create missing tables and columns, and all views, functions and comments.

    Raises:
        StoreChangedError: Columns of a table cannot be fixed.
    """
    found = definitions(connection)
    statements = _drop_statements(found, functions(connection))
    statements += [change for table in TABLES.values() for change in _table_changes(table, found)]
    for step in range(version, SCHEMA_VERSION):
        statements += steps.get(step, ())
    for statement in statements:
        connection.execute(statement)
    verify(connection, path, ("table", "column", "constraint"))
    comments = [comment for table in TABLES.values() for comment in comment_statements(table)]
    rows = (f"({literal(key)}, {literal(value)})" for key, value in META_ROWS.items())
    for statement in (*view_statements(), *comments, f"INSERT OR REPLACE INTO meta VALUES {', '.join(rows)}"):
        connection.execute(statement)


def _drop_statements(found: Definitions, functions_found: Iterable[tuple[str, str]]) -> list[str]:
    """Return DROP statements of the schema's views and all functions.

    Functions of the store could replace built-in ones.
    """
    views = [f"DROP VIEW {entry.name}" for entry in found if entry.kind == "view" and entry.name in VIEWS]
    macros = []
    for name, kind in functions_found:
        quoted = name.replace('"', '""')
        macros.append(f'DROP MACRO {"TABLE " if kind == "table_macro" else ""}"{quoted}"')
    return views + macros


def _table_changes(table: Table, found: Definitions) -> list[str]:
    if Entry("table", table.name) not in found:
        return table_statements(table)
    missing = [c for c in table.columns if c.nullable and Entry("column", c.name, table.name) not in found]
    return [f"ALTER TABLE {table.name} ADD COLUMN {c.name} {c.type}" for c in missing]


def _back_up(connection: duckdb.DuckDBPyConnection, content: BinaryIO, path: Path, version: int) -> Path:
    """Copy the store to ``<name>.schema<version>.backup``, or to ``.schema<version>.<n>.backup``."""
    fresh = path.parent / f".{path.name}.{secrets.token_hex(4)}.partial"
    try:
        connection.execute("CHECKPOINT")  # moves rows from the write-ahead log into the file
        with fresh.open("wb") as copy:
            shutil.copyfileobj(content, copy, 1 << 20)
            copy.flush()
            os.fsync(copy.fileno())
        shutil.copymode(path, fresh)
        for number in itertools.count(1):
            target = path.with_name(f"{path.name}.schema{version}{f'.{number}' if number > 1 else ''}.backup")
            if not target.exists():
                return fresh.rename(target)
            if filecmp.cmp(fresh, target, shallow=False):  # an earlier upgrade stopped after its backup
                return target
        raise AssertionError("unreachable: itertools.count has no end")
    except (duckdb.Error, OSError) as error:
        raise translated(error, path) from error
    finally:
        with suppress(OSError):
            fresh.unlink(missing_ok=True)
