"""The definitions that a store holds, and how they differ from the schema.

A view or a function of a stranger's store could read any file or give wrong numbers under a known name, and a function
named like a built-in one (``avg``) replaces it. A store is therefore trusted only if its tables, views and functions
are those of the schema. Further tables and views may be there; no command of headscan reads them.
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
    """One thing that a catalog defines.

    Attributes:
        kind: table, column, constraint, view, function, index, trigger or type.
        name: Its name; of a constraint its text.
        table: The table it belongs to; empty for all other kinds.
    """

    kind: str
    name: str
    table: str = ""

    def __str__(self) -> str:
        name = f"{self.table}.{self.name}" if self.kind == "column" else self.name
        return f"{self.kind} {name}" + (f" of {self.table}" if self.table and self.kind != "column" else "")


Definitions = Mapping[Entry, tuple[object, ...]]

#: Kind, and the query of its rows: name, table, and what defines it. The names start with ``system.main`` because
#: unqualified ones would find a store's own functions first.
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

#: Every kind of thing that is compared.
KINDS = tuple(_QUERIES)

#: Other schemas of a file are never searched.
_OWN = "WHERE database_name NOT IN ('system', 'temp') AND schema_name = 'main'"


def tables(connection: duckdb.DuckDBPyConnection) -> set[str]:
    """The names of the tables in the main schema of the open file."""
    return {str(row[0]) for row in connection.execute(f"{_QUERIES['table']} {_OWN}").fetchall()}


def functions(connection: duckdb.DuckDBPyConnection) -> set[tuple[str, str]]:
    """The names of the functions in the main schema of the open file, each with its type as DuckDB names it."""
    rows = connection.execute(f"{_QUERIES['function']} {_OWN}").fetchall()
    return {(str(row[0]), str(row[2])) for row in rows}


def definitions(connection: duckdb.DuckDBPyConnection) -> Definitions:
    """Everything that the main schema of the open file defines."""
    found: dict[Entry, tuple[object, ...]] = {}
    for kind, query in _QUERIES.items():
        for name, table, *rest in connection.execute(f"{query} {_OWN}").fetchall():
            entry = Entry(kind, name, table)
            # One name can hold several things, as the overloads of a function: all of them count.
            found[entry] = (*found.get(entry, ()), *rest)
    views = {entry.name for entry in found if entry.kind == "view"}
    # The columns of a view follow from its query.
    return {entry: value for entry, value in found.items() if not (entry.kind == "column" and entry.table in views)}


@cache
def declared() -> Definitions:
    """What the schema of this headscan defines, as the installed DuckDB writes it."""
    with duckdb.connect(":memory:", config=dict(WRITING)) as connection:
        for statement in (*schema_statements(), *view_statements()):
            # Comments define nothing, and to make them takes longer than everything else.
            if not statement.startswith("COMMENT "):
                connection.execute(statement)
        return definitions(connection)


def differences(found: Definitions, kinds: Collection[str] = KINDS) -> list[str]:
    """How the definitions of a store differ from the schema, one phrase for each; empty where it can be trusted.

    Args:
        kinds: The kinds of things that are compared.
    """
    expected = {entry: definition for entry, definition in declared().items() if entry.kind in kinds}
    lost = {entry.name for entry in expected if entry.kind == "table" and entry not in found}
    # Of a missing table its columns are no news.
    phrases = [f"{entry} is missing" for entry in expected if entry not in found and entry.table not in lost]
    phrases += [f"{entry} is another" for entry in expected if entry in found and found[entry] != expected[entry]]
    ours = {entry.name for entry in expected if entry.kind == "table"}
    for entry in found:
        if (
            entry.kind in kinds
            and entry not in expected
            and (entry.table in ours or entry.kind in ("function", "type"))
        ):
            phrases.append(f"{entry} is not part of the schema")
    return sorted(phrases)
