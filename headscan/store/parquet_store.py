"""Stores as Parquet data sets, which are read through the tables, views and functions of a store file.

DuckDB reads the files through pyarrow, so its connection has no access to files, as with a store file.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import duckdb
import pyarrow as pa

from headscan.errors import NotAStoreError, StoreError, StoreMissingError, StoreVersionError, first_line
from headscan.store.connection import READING, confine
from headscan.store.output_files import DATA_SET_FORMAT, PARTITIONS, SCHEMA_FILE, file_system, is_partitioned
from headscan.store.scan_tables import Table
from headscan.store.store import Store
from headscan.store.tables import RENAMED, SCHEMA_VERSION, TABLES
from headscan.store.views import view_statements

if TYPE_CHECKING:
    import pyarrow.dataset as ds
    from fsspec import AbstractFileSystem


def store_at(path: str | Path, *, lock_timeout: float = 30.0, on_wait: Callable[[str], None] | None = None) -> Store:
    """Return the store in a DuckDB file, or in the Parquet data set of a folder or URL, which is read-only."""
    if "://" in str(path) or (Path(path) / SCHEMA_FILE).is_file():
        return ParquetStore(path)
    return Store(path, lock_timeout=lock_timeout, on_wait=on_wait)


class ParquetStore(Store):
    """The store in a Parquet data set that `Store.export_parquet` wrote. Every reading method works; writing ones raise
    StoreError.
    """

    def __init__(self, folder: str | Path) -> None:
        super().__init__(folder)
        self._folder = str(folder)

    @contextmanager
    def connect(
        self, *, read_only: bool = False, create: bool = False, memory: str | None = None
    ) -> Iterator[duckdb.DuckDBPyConnection]:
        """Yield the connection with the tables and views; all calls yield the same one, whatever its ``memory``."""
        if not read_only:
            raise StoreError(f"{self._folder} is a Parquet data set, which cannot be written. Name a DuckDB file")
        yield self._connection

    @cached_property
    def _connection(self) -> duckdb.DuckDBPyConnection:
        system, root = file_system(self._folder)
        declared = _read_schema(system, root, self._folder)
        connection = duckdb.connect(":memory:", config=dict(READING))
        for table in TABLES.values():
            files = _files(system, root, table, declared)
            connection.register(f"files_of_{table.name}", files)
            old_names = RENAMED.get(table.name, {})
            numbers = []
            for column in table.columns:
                names = (column.name, old_names.get(column.name))
                source = next((name for name in names if name in files.schema.names), "NULL")
                numbers.append(f"{source}::{column.type} AS {column.name}")
            connection.execute(
                f"CREATE TEMP VIEW {table.name} AS SELECT {', '.join(numbers)} FROM files_of_{table.name}"
            )
        for statement in view_statements():
            connection.execute(_temporary(statement))
        confine(connection)
        return connection


def _temporary(statement: str) -> str:
    """Return a statement that makes a temporary view or function: others cannot read registered files."""
    for kind in ("VIEW", "MACRO"):
        if statement.startswith(f"CREATE {kind} "):
            return statement.replace(f"CREATE {kind} ", f"CREATE TEMP {kind} ", 1)
    return statement.replace("COMMENT ON TABLE ", "COMMENT ON VIEW ", 1)


def _read_schema(system: AbstractFileSystem, root: str, shown: str) -> Mapping[str, Any]:
    """Return the tables of a data set, as in its ``schema.json``."""
    try:
        schema = json.loads(system.cat_file(f"{root}/{SCHEMA_FILE}"))
        version, tables = int(schema["schema_version"]), dict(schema["tables"])
        known = schema["format"] == DATA_SET_FORMAT
    except FileNotFoundError as error:
        raise StoreMissingError(
            f"{shown} has no {SCHEMA_FILE}, so it is no complete Parquet data set. Run `headscan export parquet` again"
        ) from error
    except OSError as error:
        raise StoreError(f"{shown}: {first_line(error)}. Check the address and the permissions") from error
    except (ValueError, KeyError, TypeError) as error:
        raise NotAStoreError(f"{shown}/{SCHEMA_FILE} is not one of headscan. Name another folder") from error
    if not known:
        raise NotAStoreError(f"{shown}/{SCHEMA_FILE} is not one of headscan. Name another folder")
    if version > SCHEMA_VERSION:
        raise StoreVersionError(
            f"{shown} has schema version {version}, newer than version {SCHEMA_VERSION} of this headscan. Install a"
            " newer headscan"
        )
    return tables


def _files(system: AbstractFileSystem, root: str, table: Table, declared: Mapping[str, Any]) -> ds.Dataset | pa.Table:
    """Return the files of a table. Tables that the data set lacks, or without rows, are empty."""
    import pyarrow.dataset as ds  # which imports pandas: 0.3 s that questions to a store file do not need

    empty = pa.table({column.name: pa.nulls(0) for column in table.columns})
    if table.name not in declared:
        return empty
    if not is_partitioned(table):
        return ds.dataset(f"{root}/{table.name}.parquet", filesystem=system, format="parquet")
    if not system.exists(f"{root}/{table.name}"):
        return empty
    partitioning = ds.partitioning(PARTITIONS, flavor="hive")
    return ds.dataset(f"{root}/{table.name}", filesystem=system, format="parquet", partitioning=partitioning)
