"""Definitions in a store, and their differences from the schema.

A view or function of an untrusted store could read files or return wrong numbers under a known name, and a function
named like a built-in one (``avg``) replaces it. A store is trusted only if its tables, views and functions equal those
of the schema. It may have further tables and views; headscan does not read them.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from functools import cache
from typing import NamedTuple

import duckdb

from headscan.analysis.schema.tables import schema_statements
from headscan.analysis.schema.views import view_statements
from headscan.analysis.store.confinement import WRITING


class Entry(NamedTuple):
    """One catalog entry.

    Attributes:
        kind: table, column, constraint, view, function, index, trigger or type.
        name: Its name; for a constraint its text.
        table: Table of a column, constraint, index or trigger; otherwise empty.
    """

    kind: str
    name: str
    table: str = ""

    def __str__(self) -> str:
        name = f"{self.table}.{self.name}" if self.kind == "column" else self.name
        return f"{self.kind} {name}" + (f" of {self.table}" if self.table and self.kind != "column" else "")


Definitions = Mapping[Entry, tuple[object, ...]]

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
KINDS = tuple(_QUERIES)

#: headscan never reads other schemas of a file.
_OWN = "WHERE database_name NOT IN ('system', 'temp') AND schema_name = 'main'"


def tables(connection: duckdb.DuckDBPyConnection) -> set[str]:
    """Return the names of the tables in the main schema."""
    return {str(row[0]) for row in connection.execute(f"{_QUERIES['table']} {_OWN}").fetchall()}


def functions(connection: duckdb.DuckDBPyConnection) -> set[tuple[str, str]]:
    """Return name and DuckDB type of the functions in the main schema."""
    rows = connection.execute(f"{_QUERIES['function']} {_OWN}").fetchall()
    return {(str(row[0]), str(row[2])) for row in rows}


def definitions(connection: duckdb.DuckDBPyConnection) -> Definitions:
    """Return all definitions of the main schema."""
    found: dict[Entry, tuple[object, ...]] = {}
    for kind, query in _QUERIES.items():
        for name, table, *rest in connection.execute(f"{query} {_OWN}").fetchall():
            entry = Entry(kind, name, table)
            # One name can have several definitions, such as the overloads of a function; all are compared.
            found[entry] = (*found.get(entry, ()), *rest)
    views = {entry.name for entry in found if entry.kind == "view"}
    # The columns of a view follow from its query, so they are not compared.
    return {entry: value for entry, value in found.items() if not (entry.kind == "column" and entry.table in views)}


@cache
def declared() -> Definitions:
    """Return this version's definitions as the installed DuckDB writes them."""
    with duckdb.connect(":memory:", config=dict(WRITING)) as connection:
        for statement in (*schema_statements(), *view_statements()):
            # Comments are not compared, and they take longer than all other statements.
            if not statement.startswith("COMMENT "):
                connection.execute(statement)
        return definitions(connection)


def differences(found: Definitions, kinds: Collection[str] = KINDS) -> list[str]:
    """Return the differences of a store from the schema, as phrases.

    The list is empty if the store can be trusted.

    Args:
        kinds: Kinds of entries to compare.
    """
    expected = {entry: definition for entry, definition in declared().items() if entry.kind in kinds}
    lost = {entry.name for entry in expected if entry.kind == "table" and entry not in found}
    # The columns of a missing table need no phrases of their own.
    phrases = [f"{entry} is missing" for entry in expected if entry not in found and entry.table not in lost]
    phrases += [f"{entry} differs" for entry in expected if entry in found and found[entry] != expected[entry]]
    ours = {entry.name for entry in expected if entry.kind == "table"}
    for entry in found:
        if (
            entry.kind in kinds
            and entry not in expected
            and (entry.table in ours or entry.kind in ("function", "type"))
        ):
            phrases.append(f"{entry} is not part of the schema")
    return sorted(phrases)
