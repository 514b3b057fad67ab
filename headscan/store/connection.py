"""Connections to the file of a store: queries, creation, check of its schema and of its definitions.

After a crash the disk holds either a complete store with its ``.wal``, which the next opening replays, or no store
and a hidden ``.<name>.<random>.new``, which is never read. A store gets its name only after its tables are complete.

A store of another schema is refused. Views, functions and comments hold no data, so they are created again if the hash
of the first two in ``meta`` differs, or the version of DuckDB, each of which rewrites the SQL of views differently.

A view or function of an untrusted store could read files or return wrong numbers under a known name, and a function
named like a built-in one (``avg``) replaces it. A store is trusted only if its tables, views and functions equal
those of the schema. It may have further tables and views; headscan does not read them.
"""

from __future__ import annotations

import errno
import hashlib
import os
import re
import secrets
import tempfile
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import AbstractContextManager, contextmanager, suppress
from difflib import get_close_matches
from functools import cache, partial
from pathlib import Path
from typing import Any, NamedTuple

import duckdb
import pyarrow as pa

from headscan.errors import (
    NotAStoreError,
    QueryError,
    StoreChangedError,
    StoreError,
    StoreFullError,
    StoreLockedError,
    StoreMissingError,
    StoreVersionError,
    first_line,
)
from headscan.store.scan_tables import HEAD_STATISTICS, literal, table_statement
from headscan.store.summaries import incomplete_summaries_sql
from headscan.store.tables import FORMAT, SCHEMA_VERSION, TABLES
from headscan.store.views import ALL_RUNS, VIEWS, view_statements

#: Settings of a writing connection, which uses the store, its log and its temporary folder.
WRITING: Mapping[str, str] = {
    "enable_external_access": "false",
    "autoinstall_known_extensions": "false",
    "autoload_known_extensions": "false",
    "allow_community_extensions": "false",
    "allow_persistent_secrets": "false",
    "preserve_insertion_order": "true",  # `site_rows.SiteRows` reads rows in the order in which they were written
}

#: Settings of a read-only connection; `confine` disables files once the store is open.
READING: Mapping[str, str] = {**WRITING, "temp_directory": ""}


def confine(connection: duckdb.DuckDBPyConnection, memory: str | None = None) -> None:
    """Disable file access of a read-only connection permanently, and limit DuckDB's memory unless ``memory`` is None.
    Connections of one process to one store share settings, so a second connection finds them locked and files disabled,
    and the limit of the first one.
    """
    try:
        if memory is not None:
            _limit_memory(connection, memory)
        connection.execute("SET disabled_filesystems = 'LocalFileSystem'")
        connection.execute("SET lock_configuration = true")
    except duckdb.InvalidInputException:
        if connection.execute("SELECT system.main.current_setting('lock_configuration')").fetchall() != [(True,)]:
            raise


def _limit_memory(connection: duckdb.DuckDBPyConnection, memory: str) -> None:
    """Limit the memory of DuckDB, as in ``1GB``, and with it the threads, because each has buffers of its own."""
    connection.execute(f"SET memory_limit = {literal(memory)}")
    connection.execute(f"SET threads = {min(_LIMITED_THREADS, os.cpu_count() or 1)}")


#: Most threads of DuckDB with limited memory.
_LIMITED_THREADS = 8

_FULL = re.compile(r"no space left|quota exceeded|file too large", re.IGNORECASE)
_FULL_CODES = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
_FIRST_WAIT, _LONGEST_WAIT = 0.02, 0.5


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
    path: Path, read_only: bool, timeout: float, on_wait: Callable[[str], None] | None
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
    path: Path,
    *,
    read_only: bool,
    timeout: float = 0.0,
    on_wait: Callable[[str], None] | None = None,
    memory: str | None = None,
) -> Iterator[duckdb.DuckDBPyConnection]:
    """Open a connection that can access no other file; closing it releases the lock. ``read_only`` shares the file with
    other readers and blocks all file access; otherwise the file is locked exclusively. A wait for the lock of another
    process takes up to ``timeout`` seconds; ``on_wait`` is called with a message when it begins, and None disables it.
    ``memory`` is the most memory of DuckDB, as in ``1GB``; None uses its default.
    """
    connection = _connect(path, read_only, timeout, on_wait)
    try:
        if read_only:
            confine(connection, memory)
        elif memory is not None:
            _limit_memory(connection, memory)
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
        return _interruptible(connection, lambda: _result_table(connection, sql, parameters))
    except duckdb.Error as error:
        raise refusal(error) from error


def _result_table(connection: duckdb.DuckDBPyConnection, sql: str, parameters: Sequence[Any] | None) -> pa.Table:
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


class CatalogEntry(NamedTuple):
    """One catalog entry of a kind of `_QUERIES`, with its name (of a constraint, its text) and the table of a column,
    constraint, index or trigger, otherwise empty.
    """

    kind: str
    name: str
    table: str = ""

    def __str__(self) -> str:
        name = f"{self.table}.{self.name}" if self.kind == "column" else self.name
        return f"{self.kind} {name}" + (f" of {self.table}" if self.table and self.kind != "column" else "")


Definitions = Mapping[CatalogEntry, tuple[object, ...]]

#: Query of each kind: name, table and defining columns. Names are qualified with ``system.main`` because unqualified
#: names would resolve to functions of the store first.
_QUERIES: Mapping[str, str] = {
    "table": "SELECT table_name, '' FROM system.main.duckdb_tables()",
    "column": "SELECT column_name, table_name, data_type, is_nullable, column_default, is_generated,"
    " generation_expression FROM system.main.duckdb_columns()",
    "constraint": "SELECT constraint_text, table_name FROM system.main.duckdb_constraints()",
    "view": "SELECT view_name, '', sql FROM system.main.duckdb_views()",
    "function": "SELECT function_name, '', function_type, macro_definition, parameters, parameter_types"
    " FROM system.main.duckdb_functions()",
    "index": "SELECT index_name, table_name, sql FROM system.main.duckdb_indexes()",
    "trigger": "SELECT trigger_name, table_name, sql FROM system.main.duckdb_triggers()",
    "type": "SELECT type_name, '', logical_type FROM system.main.duckdb_types()",
}

#: All kinds of entries.
DEFINITION_KINDS = tuple(_QUERIES)

#: headscan never reads other schemas of a file.
_OWN = "WHERE database_name NOT IN ('system', 'temp') AND schema_name = 'main'"


def tables(connection: duckdb.DuckDBPyConnection) -> set[str]:
    """Return the names of the tables in the main schema."""
    return {str(row[0]) for row in connection.execute(f"{_QUERIES['table']} {_OWN}").fetchall()}


def definitions(connection: duckdb.DuckDBPyConnection) -> Definitions:
    """Return all definitions of the main schema."""
    entries: dict[CatalogEntry, tuple[object, ...]] = {}
    for kind, query in _QUERIES.items():
        for name, table, *rest in connection.execute(f"{query} {_OWN}").fetchall():
            entry = CatalogEntry(kind, name, table)
            # One name can have several definitions, such as the overloads of a function; all are compared.
            entries[entry] = (*entries.get(entry, ()), *rest)
    views = {entry.name for entry in entries if entry.kind == "view"}
    # The columns of a view follow from its query, so they are not compared.
    return {entry: value for entry, value in entries.items() if not (entry.kind == "column" and entry.table in views)}


#: The `digest` of `declared`, which takes 0.3 s to compute, by version of DuckDB. A store with this digest can be
#: trusted. With other versions of DuckDB, the definitions themselves are compared.
DIGESTS: Mapping[str, str] = {"2.0.0": "e6b576dfc35f725da831e14be9dc62841d1b4581df1dd3d74662910f91e76841"}


def schema_statements() -> list[str]:
    """Return the statements that create tables, views, functions and comments, in order."""
    return [*map(table_statement, TABLES.values()), *view_statements()]


def _meta_rows() -> dict[str, str]:
    """Return the rows of ``meta`` of a store that this version wrote."""
    # Without comments, whose change must not make a store unreadable that cannot be written.
    created = "\n".join(statement for statement in view_statements() if not statement.startswith("COMMENT "))
    views = hashlib.sha256(created.encode()).hexdigest()
    versions = {"schema_version": str(SCHEMA_VERSION), "duckdb_version": duckdb.__version__}
    return {"format": FORMAT, **versions, "views": views}


def _meta_statement() -> str:
    rows = (f"({literal(key)}, {literal(value)})" for key, value in _meta_rows().items())
    return f"INSERT OR REPLACE INTO meta VALUES {', '.join(rows)}"


def digest(definitions: Definitions) -> str:
    """Return the SHA-256 of definitions."""
    return hashlib.sha256(repr(sorted(definitions.items())).encode()).hexdigest()


@cache
def declared() -> Definitions:
    """Return this version's definitions as the installed DuckDB writes them."""
    with duckdb.connect(":memory:", config=dict(WRITING)) as connection:
        for statement in schema_statements():
            # Comments are not compared, and they take longer than all other statements.
            if not statement.startswith("COMMENT "):
                connection.execute(statement)
        return definitions(connection)


def differences(present: Definitions, kinds: Collection[str] = DEFINITION_KINDS) -> list[str]:
    """Return the differences of a store from the schema, as phrases. The list is empty if the store can be trusted."""
    expected = {entry: definition for entry, definition in declared().items() if entry.kind in kinds}
    lost = {entry.name for entry in expected if entry.kind == "table" and entry not in present}
    # The columns of a missing table need no phrases of their own.
    phrases = [f"{entry} is missing" for entry in expected if entry not in present and entry.table not in lost]
    phrases += [f"{entry} differs" for entry in expected if entry in present and present[entry] != expected[entry]]
    ours = {entry.name for entry in expected if entry.kind == "table"}
    for entry in present:
        if (
            entry.kind in kinds
            and entry not in expected
            and (entry.table in ours or entry.kind in ("function", "type"))
        ):
            phrases.append(f"{entry} is not part of the schema")
    return sorted(phrases)


_SHOWN_DIFFERENCES = 5


def is_current(connection: duckdb.DuckDBPyConnection, path: Path) -> bool:
    """Return True if this headscan and this DuckDB wrote the views of the open file, from the table ``meta`` alone;
    raise StoreVersionError for another schema.
    """
    names = tables(connection)
    if not names:
        raise StoreMissingError(f"the store at {path} is empty. Run `headscan scan` first, or name another path")
    meta = _meta(connection) if "meta" in names else {}
    version = meta.get("schema_version") or ""
    if meta.get("format") != FORMAT or not (version.isascii() and version.isdecimal()):
        raise NotAStoreError(f"{path} is a DuckDB file but not a headscan store. Name another path")
    require_schema(int(version), path)
    return _meta_rows().items() <= meta.items()


def require_schema(version: int, path: str | Path) -> None:
    """Raise StoreVersionError unless this headscan reads the schema ``version``."""
    if version != SCHEMA_VERSION:
        raise StoreVersionError(
            f"{path} has schema {version} (this headscan reads schema {SCHEMA_VERSION}). Use the version of headscan"
            " that made it, or scan again into a new store"
        )


def _meta(connection: duckdb.DuckDBPyConnection) -> dict[str, str | None]:
    try:
        rows = connection.execute("SELECT key::VARCHAR, value::VARCHAR FROM main.meta LIMIT 100").fetchall()
    except (duckdb.BinderException, duckdb.CatalogException):  # another program's table of this name
        return {}
    return dict(rows)


def verify(connection: duckdb.DuckDBPyConnection, path: Path, kinds: Collection[str] = DEFINITION_KINDS) -> None:
    """Raise StoreChangedError unless the definitions of the open file equal the schema."""
    own = definitions(connection)
    if digest(own) == DIGESTS.get(duckdb.__version__):
        return
    problems = differences(own, kinds)
    if problems:
        shown = ", ".join(problems[:_SHOWN_DIFFERENCES])
        more = f" and {len(problems) - _SHOWN_DIFFERENCES} more" if len(problems) > _SHOWN_DIFFERENCES else ""
        raise StoreChangedError(
            f"{path} differs from the schema of this headscan: {shown}{more}. If a newer headscan wrote it, install"
            " that; otherwise use a copy that nobody has changed, and no changed store from an untrusted source"
        )


def rewrite_views(path: Path, connect: Callable[[], AbstractContextManager[duckdb.DuckDBPyConnection]]) -> None:
    """Replace the views, functions and comments of a store that another headscan or DuckDB wrote, add the columns of
    new statistics, and delete summaries that lack a new score.
    """
    if not (os.access(path, os.W_OK) and os.access(path.absolute().parent, os.W_OK)):
        raise StoreVersionError(
            f"{path} has the views of another version of headscan or DuckDB, and it or its folder is read-only. Copy"
            " the store to a folder that you can write to and name the copy"
        )
    with connect() as connection:
        if is_current(connection, path):
            return
        with transaction(connection, path):
            for statement in _views_removed(connection):
                connection.execute(statement)
            for column in (each for each in HEAD_STATISTICS.columns if each.nullable):
                new = f"ADD COLUMN IF NOT EXISTS {column.name} {column.type}"
                connection.execute(f"ALTER TABLE IF EXISTS {HEAD_STATISTICS.name} {new}")
            verify(connection, path, ("table", "column", "constraint"))
            incomplete = [run_id for (run_id,) in connection.execute(incomplete_summaries_sql()).fetchall()]
            for table in ("head_summaries", "measure_pools"):
                connection.execute(f"DELETE FROM {table} WHERE list_contains(?, run_id)", [incomplete])
            for statement in (*view_statements(), _meta_statement()):
                connection.execute(statement)
            verify(connection, path)


def _views_removed(connection: duckdb.DuckDBPyConnection) -> list[str]:
    """Return DROP statements of the schema's views and of all functions, which could replace built-in ones."""
    statements = [f"DROP VIEW IF EXISTS {name}" for name in VIEWS]
    for name, _, kind, *_ in connection.execute(f"{_QUERIES['function']} {_OWN}").fetchall():
        quoted = name.replace('"', '""')
        statements.append(f'DROP MACRO {"TABLE " if kind == "table_macro" else ""}"{quoted}"')
    return statements


def _make_schema(connection: duckdb.DuckDBPyConnection, path: Path) -> None:
    with transaction(connection, path):
        for statement in (*schema_statements(), _meta_statement()):
            connection.execute(statement)


def _publish(fresh: Path, path: Path) -> bool:
    """Rename ``fresh`` to ``path`` and return True, unless another process created a store there first."""
    if path.exists() and path.stat().st_size == 0:
        fresh.replace(path)
        return True
    try:
        os.link(fresh, path)
    except FileExistsError:
        return False
    except OSError:  # a file system without hard links
        fresh.rename(path)
    return True


@cache
def _empty_store() -> bytes:
    """Return the file of a store without rows. Its definitions take half a second; a copy of the file takes none."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "empty.duckdb"
        try:
            with connected(path, read_only=False) as connection:
                _make_schema(connection, path)
            return path.read_bytes()
        except (duckdb.Error, OSError) as error:
            raise translated(error, path) from error


def _create(path: Path) -> bool:
    """Create an empty store and move it to ``path``; return False if another process created one there first."""
    content = _empty_store()
    fresh = path.parent / f".{path.name}.{secrets.token_hex(4)}.new"
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with fresh.open("wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        return _publish(fresh, path)
    except (duckdb.Error, OSError) as error:
        raise translated(error, path) from error
    finally:
        with suppress(OSError):
            fresh.unlink()


def _is_file_with_content(path: Path) -> bool:
    if path.is_dir():
        raise NotAStoreError(f"{path} is a directory, not a headscan store. Name a file")
    return path.exists() and path.stat().st_size > 0


class Checked:
    """State of a file at its last check or after this process's last write; an unchanged file is not checked again."""

    def __init__(self) -> None:
        self._state: tuple[tuple[int, ...] | None, ...] | None = None

    def remember(self, path: Path) -> None:
        """Remember the state of ``path``, which this process holds open or has just closed."""
        self._state = _state(path)

    def holds(self, path: Path) -> bool:
        """Return True if the store at ``path`` and its log are unchanged."""
        return self._state is not None and self._state == _state(path)


@cache
def checked_file(path: Path) -> Checked:
    """Return the state of a file that all stores of this process share."""
    return Checked()


def _state(path: Path) -> tuple[tuple[int, ...] | None, ...]:
    def of(file: Path) -> tuple[int, ...] | None:
        try:
            status = file.stat()
        except FileNotFoundError:
            return None
        return status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns

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
    memory: str | None = None,
) -> Iterator[duckdb.DuckDBPyConnection]:
    """Open a connection to the store at ``path``; closing it releases the lock. Views of another version are rewritten
    first, even for reading, and a file that is not a store stays unchanged. The state ``checked`` of the last check is
    updated here. ``create`` creates a missing store, only for writing; other arguments are as in `connected`.
    """
    if not _is_file_with_content(path):
        if not create:
            missing = f"{path} is empty (0 bytes)" if path.exists() else f"there is no store at {path}"
            raise StoreMissingError(f"{missing}. Run `headscan scan` first, or name another path")
        if _create(path):
            checked.remember(path)
    reading = partial(connected, path, read_only=True, timeout=timeout, on_wait=on_wait, memory=memory)
    writing = partial(connected, path, read_only=False, timeout=timeout, on_wait=on_wait)
    if read_only or not checked.holds(path):
        with reading() as connection:
            known = checked.holds(path)
            empty = create and not known and not tables(connection)
            current = known or empty or is_current(connection, path)
            if read_only and current:
                if not known:
                    verify(connection, path)
                    checked.remember(path)
                yield connection
                return
        if not current:
            rewrite_views(path, writing)
    with (reading if read_only else writing)() as connection:
        if create and not checked.holds(path) and not tables(connection):
            _make_schema(connection, path)
        elif not checked.holds(path):  # the lock is held now, so no other process can write
            verify(connection, path)
        yield connection
