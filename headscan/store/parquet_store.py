"""Stores as Parquet data sets, which are read through the tables, views and functions of a store file.

DuckDB reads the files through pyarrow, so its connection has no access to files, as with a store file.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

import duckdb
import pyarrow as pa

from headscan.errors import NotAStoreError, StoreError, StoreMissingError, first_line
from headscan.store.connection import READING, confine, require_schema
from headscan.store.output_files import DATA_SET_FORMAT, PARTITIONS, SCHEMA_FILE, file_system, is_partitioned
from headscan.store.scan_tables import Table
from headscan.store.store import Store
from headscan.store.tables import TABLES
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
        _require_schema(system, root, self._folder)
        connection = duckdb.connect(":memory:", config=dict(READING))
        for table in TABLES.values():
            files = _files(system, root, table)
            connection.register(f"files_of_{table.name}", files)
            numbers = [
                f"{column.name if column.name in files.schema.names else 'NULL'}::{column.type} AS {column.name}"
                for column in table.columns  # those of new statistics are missing in files
            ]
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


def _require_schema(system: AbstractFileSystem, root: str, shown: str) -> None:
    """Raise StoreError unless ``schema.json`` is that of a data set which this headscan reads."""
    try:
        schema = json.loads(system.cat_file(f"{root}/{SCHEMA_FILE}"))
        version, known = int(schema["schema_version"]), schema["format"] == DATA_SET_FORMAT
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
    require_schema(version, shown)


def _files(system: AbstractFileSystem, root: str, table: Table) -> ds.Dataset | pa.Table:
    """Return the files of a table; a partitioned table without rows has none."""
    import pyarrow.dataset as ds  # which imports pandas: 0.3 s that questions to a store file do not need

    if not is_partitioned(table):
        return ds.dataset(f"{root}/{table.name}.parquet", filesystem=system, format="parquet")
    if not system.exists(f"{root}/{table.name}"):
        return pa.table({column.name: pa.nulls(0) for column in table.columns})
    partitioning = ds.partitioning(PARTITIONS, flavor="hive")
    return ds.dataset(f"{root}/{table.name}", filesystem=system, format="parquet", partitioning=partitioning)
