"""The tables of a store, declared once as data.

The DDL, the column comments in the database, the checks on incoming Arrow tables and the documentation read these
declarations.
"""

from __future__ import annotations

import duckdb

from headscan.analysis.store.arm_tables import (
    ANSWERS,
    ARM_RESULTS,
    ARM_VERDICTS,
    ARMS,
    HEAD_EFFECTS,
    MASK_HEADS,
    MASKS,
    RESPONSES,
    SPLIT_VERDICTS,
)
from headscan.analysis.store.scan_tables import (
    HEAD_BEHAVIOURS,
    HEAD_GATES,
    HEAD_IMPORTANCE,
    HEAD_STATISTICS,
    RUNS,
    SEQUENCES,
    SHARDS,
    Column,
    Table,
    literal,
    table_statements,
)

#: Raise it with every change of a table, view or function, but not of a comment. ``opening`` upgrades older stores, so
#: new columns of old tables must be nullable.
SCHEMA_VERSION = 9

#: Value of the key ``format`` in ``meta``, which distinguishes a store from other DuckDB files.
FORMAT = "headscan store"

META = Table(
    "meta",
    "format and versions of this file",
    (
        Column("key", "VARCHAR", "format, schema_version or duckdb_version"),
        Column("value", "VARCHAR", "value of the key"),
    ),
    (("key",),),
)

#: The rows of ``meta``. Each DuckDB version writes the SQL of views differently, so ``meta`` records the version.
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
        HEAD_IMPORTANCE,
        HEAD_EFFECTS,
        HEAD_GATES,
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
    """Return the statements that create an empty store's tables, in order."""
    return [
        *(statement for table in TABLES.values() for statement in table_statements(table)),
        *(f"INSERT INTO meta VALUES ({literal(key)}, {literal(value)})" for key, value in META_ROWS.items()),
    ]
