"""The tables of a store, declared once as data.

The DDL, the column comments in the database, the checks on incoming Arrow tables and the documentation read these
declarations.
"""

from __future__ import annotations

import duckdb

from headscan.analysis.schema.arm_tables import (
    ANSWERS,
    ARM_RESULTS,
    ARM_VERDICTS,
    ARMS,
    MASK_HEADS,
    MASKS,
    RESPONSES,
    SPLIT_VERDICTS,
)
from headscan.analysis.schema.ddl import Column, Table, literal, table_statements
from headscan.analysis.schema.scan_tables import HEAD_BEHAVIOURS, HEAD_STATISTICS, RUNS, SEQUENCES, SHARDS

#: To be raised with every change of a table, view or function. Older stores are upgraded, see ``upgrade``:
#: new columns of old tables must be nullable.
SCHEMA_VERSION = 6

#: What ``meta`` holds under the key ``format``: how a store is told from any other DuckDB file.
FORMAT = "headscan store"

META = Table(
    "meta",
    "what this file is",
    (Column("key", "VARCHAR", "format, schema_version or duckdb_version"), Column("value", "VARCHAR", "its value")),
    (("key",),),
)

#: The rows of ``meta``. DuckDB writes views down in words of its version, so the version is kept beside them.
META_ROWS: dict[str, str] = {
    "format": FORMAT,
    "schema_version": str(SCHEMA_VERSION),
    "duckdb_version": duckdb.__version__,
}

TABLES: dict[str, Table] = {
    table.name: table
    for table in (
        META,
        RUNS,
        SHARDS,
        SEQUENCES,
        HEAD_STATISTICS,
        HEAD_BEHAVIOURS,
        MASKS,
        MASK_HEADS,
        ARMS,
        RESPONSES,
        ANSWERS,
        ARM_RESULTS,
        ARM_VERDICTS,
        SPLIT_VERDICTS,
    )
}


def schema_statements() -> list[str]:
    """Every statement that makes an empty store's tables, in order."""
    return [
        *(statement for table in TABLES.values() for statement in table_statements(table)),
        *(f"INSERT INTO meta VALUES ({literal(key)}, {literal(value)})" for key, value in META_ROWS.items()),
    ]
