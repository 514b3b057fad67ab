"""Output files: text, written atomically, and the tables of a store as a Parquet data set.

A data set is a folder, also of an object store that fsspec can reach. Large tables are partitioned by run and layer, in
folders such as ``head_statistics/run_id=3f9a0c1d2e4b/layer=5``; the others are one file each. ``schema.json`` lists
tables, columns, types and meanings. It is written last, so a folder without it is no complete data set.
"""

from __future__ import annotations

import json
import secrets
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import duckdb
import pyarrow as pa

from headscan.errors import HeadscanError, StoreError, first_line
from headscan.store.connection import refusal, translated
from headscan.store.scan_tables import Table
from headscan.store.tables import SCHEMA_VERSION, TABLES

if TYPE_CHECKING:
    from fsspec import AbstractFileSystem

#: Most rows of one row group, and least rows that are collected for one of a partition.
_GROUP_ROWS, _LEAST_ROWS = 122_880, 16_384

#: Columns that partition the files of large tables, and their types.
PARTITIONS = pa.schema([("run_id", pa.string()), ("layer", pa.int16())])

#: File that makes a folder a data set, and the value of its key ``format``.
SCHEMA_FILE, DATA_SET_FORMAT = "schema.json", "headscan parquet"

#: Views that are exported in addition to all tables.
_VIEWS = ("head_summary",)


class OutputError(HeadscanError):
    """An output file cannot be written."""


@contextmanager
def replacing(target: Path) -> Iterator[Path]:
    """Yield a temporary file that replaces ``target`` if the block succeeds; a missing directory is created."""
    fresh = target.parent / f".{target.name}.{secrets.token_hex(4)}.partial"
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        yield fresh
        fresh.replace(target)
    finally:
        with suppress(OSError):
            fresh.unlink(missing_ok=True)


def write_text(path: str | Path, text: str) -> Path:
    """Write UTF-8 text to ``path`` atomically; a missing directory is created."""
    target = Path(path)
    try:
        with replacing(target) as fresh:
            fresh.write_text(text, encoding="utf-8", newline="\n")
    except OSError as error:
        raise OutputError(
            f"cannot write {target} ({error.strerror}). Choose another path, or free disk space"
        ) from error
    return target


def file_system(path: str | Path) -> tuple[AbstractFileSystem, str]:
    """Return the file system of a path or URL, and the path in it; raise StoreError if fsspec has no driver."""
    from fsspec.core import url_to_fs
    from fsspec.implementations.local import LocalFileSystem

    if "://" not in str(path):
        return LocalFileSystem(), str(Path(path).absolute())
    try:
        system, inner = url_to_fs(str(path))
    except (ImportError, ValueError) as error:
        raise StoreError(
            f"{path} needs a driver of fsspec: {first_line(error)}. Install it in this environment, or name a local"
            " folder"
        ) from error
    return system, str(inner).rstrip("/")


def is_partitioned(table: Table) -> bool:
    """Return True if the files of a table are partitioned by run and layer."""
    return {"run_id", "sequence", "layer"} <= {*table.names}


def write_data_set(connection: duckdb.DuckDBPyConnection, folder: str | Path) -> list[Path]:
    """Write all tables and ``head_summary`` as a Parquet data set; an older one in the folder is replaced. Return the
    paths of its files, or folders, and of its schema. pyarrow writes the batches that DuckDB returns, so the connection
    needs no file access.
    """
    import pyarrow.parquet as pq

    system, root = file_system(folder)
    try:
        system.makedirs(root, exist_ok=True)
        schema_path = f"{root}/{SCHEMA_FILE}"
        if system.exists(schema_path):
            system.rm(schema_path)
        paths = []
        for name in (*TABLES, *_VIEWS):
            batches = connection.sql(f"FROM {name}").to_arrow_reader(_GROUP_ROWS)
            if name in TABLES and is_partitioned(TABLES[name]):
                paths.append(f"{root}/{name}")
                _write_partitions(batches, system, paths[-1])
            else:
                paths.append(f"{root}/{name}.parquet")
                with system.open(paths[-1], "wb") as file, pq.ParquetWriter(file, batches.schema) as writer:
                    for batch in batches:
                        writer.write_batch(batch)
        with system.open(schema_path, "wb") as file:
            file.write(json.dumps(_schema(connection), indent=1).encode())
    except duckdb.Error as error:
        raise refusal(error) from error
    except OSError as error:
        raise translated(error, Path(folder)) from error
    return [Path(path) for path in (*paths, schema_path) if system.exists(path)]


def _write_partitions(batches: pa.RecordBatchReader, system: AbstractFileSystem, folder: str) -> None:
    import pyarrow.dataset as ds  # which imports pandas: 0.3 s that questions to a store do not need

    if system.exists(folder):
        others = [
            each for each in system.ls(folder, detail=False) if "run_id=" not in each.rstrip("/").rsplit("/", 1)[-1]
        ]
        if others:
            raise OutputError(f"cannot replace {folder}: it holds {others[0]}. Choose an empty folder")
        system.rm(folder, recursive=True)
    ds.write_dataset(
        batches,
        folder,
        filesystem=system,
        format="parquet",
        partitioning=ds.partitioning(PARTITIONS, flavor="hive"),
        basename_template="part-{i}.parquet",
        min_rows_per_group=_LEAST_ROWS,
        max_rows_per_group=_GROUP_ROWS,
    )


def _schema(connection: duckdb.DuckDBPyConnection) -> dict[str, Any]:
    tables: dict[str, Any] = {}
    for name in (*TABLES, *_VIEWS):
        rows = connection.execute(
            "SELECT column_name, data_type, is_nullable, comment FROM duckdb_columns() WHERE table_name = ?"
            " AND NOT internal AND schema_name = 'main' ORDER BY column_index",
            [name],
        ).fetchall()
        keys = ("name", "type", "nullable", "comment")
        tables[name] = {"columns": [dict(zip(keys, row, strict=True)) for row in rows]}
        if name in TABLES:
            table = TABLES[name]
            tables[name] |= {"comment": table.comment, "keys": [list(key) for key in table.keys]}
            if is_partitioned(table):
                tables[name] |= {"files": f"{name}/*/*/*.parquet", "partitioned_by": PARTITIONS.names}
        tables[name].setdefault("files", f"{name}.parquet")
    return {"format": DATA_SET_FORMAT, "schema_version": SCHEMA_VERSION, "tables": tables}
