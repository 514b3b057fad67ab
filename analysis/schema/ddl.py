"""Tables declared as data, and the SQL that creates them."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Column:
    """A column of a table.

    Attributes:
        type: DuckDB type.
        comment: Meaning, with the unit.
        nullable: True if values may be NULL.
    """

    name: str
    type: str
    comment: str
    nullable: bool = False


@dataclass(frozen=True)
class Table:
    """A table.

    Attributes:
        comment: Meaning of a row.
        keys: Columns of each unique key; the first is the primary key.
    """

    name: str
    comment: str
    columns: tuple[Column, ...]
    keys: tuple[tuple[str, ...], ...] = ()

    @property
    def names(self) -> tuple[str, ...]:
        """Column names in order."""
        return tuple(column.name for column in self.columns)


def literal(text: str) -> str:
    """Return ``text`` as an SQL string literal.

    COMMENT ON takes no parameters.
    """
    return "'" + text.replace("'", "''") + "'"


def table_statements(table: Table) -> list[str]:
    """Return CREATE TABLE and COMMENT ON statements of one table."""
    lines = [f"{c.name} {c.type}{'' if c.nullable else ' NOT NULL'}" for c in table.columns]
    for i, key in enumerate(table.keys):
        lines.append(f"{'UNIQUE' if i else 'PRIMARY KEY'} ({', '.join(key)})")
    return [f"CREATE TABLE {table.name} ({', '.join(lines)})", *comment_statements(table)]


def comment_statements(table: Table) -> list[str]:
    """Return COMMENT ON statements of one table and its columns."""
    return [
        f"COMMENT ON TABLE {table.name} IS {literal(table.comment)}",
        *(f"COMMENT ON COLUMN {table.name}.{c.name} IS {literal(c.comment)}" for c in table.columns),
    ]
