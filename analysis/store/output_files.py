"""Atomic writes of text and Parquet files, through a temporary file in the same folder."""

from __future__ import annotations

import secrets
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import duckdb
import pyarrow.parquet as pq

from headscan.analysis.errors import AnalysisError
from headscan.analysis.store.connection import refusal, translated

#: Rows of one row group: as many are in memory while a table is written.
_GROUP_ROWS = 122_880


class OutputError(AnalysisError):
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


def write_parquet(connection: duckdb.DuckDBPyConnection, name: str, directory: Path) -> Path:
    """Write a table or view to ``<directory>/<name>.parquet`` atomically. pyarrow writes the batches that DuckDB
    returns, so the connection needs no file access.
    """
    target = directory / f"{name}.parquet"
    try:
        with replacing(target) as fresh:
            batches = connection.sql(f"FROM {name}").to_arrow_reader(_GROUP_ROWS)
            with pq.ParquetWriter(fresh, batches.schema) as writer:
                for batch in batches:
                    writer.write_batch(batch)
    except duckdb.Error as error:
        raise refusal(error) from error
    except OSError as error:
        raise translated(error, directory) from error
    return target
