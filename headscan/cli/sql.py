"""The verb sql."""

from __future__ import annotations

import io
import json
import re
import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Literal

from headscan.cli.option_parser import UsageError
from headscan.cli.verb_base import StoreOptions, StoreVerb
from headscan.errors import first_line
from headscan.options import Option
from headscan.steps.results import Json, Result
from headscan.text_tables import counted, printable_lines

if TYPE_CHECKING:
    import pyarrow as pa

    from headscan.store.store import Store


@dataclass(frozen=True, kw_only=True)
class Sql(StoreVerb):
    """query the store in SQL, read-only

        headscan sql "from head_summary order by output_norm_ln limit 10"
        headscan sql "select layer, avg(entropy) from head_statistics group by layer" --format csv
        headscan sql "from head_summary" --parquet tables/

    Tables: runs, shards, sequences, head_statistics, head_summaries, measure_pools, head_behaviours, head_importance,
    head_effects, head_gates, masks, mask_heads, arms, answers, arm_results, arm_verdicts, split_verdicts, units.
    Views: head_scores, head_summary, head_profiles, positional_heads, behaviour_summary, importance_summary,
    effect_summary, head_roles, arm_summary, arm_comparison, sweep_points, score_curves, question_split,
    sweep_confirmed. They cover finished runs; the views all_head_summary, all_head_scores and so on cover all runs.
    `describe head_summary` lists columns.
    """

    query: Annotated[str, Option("one SQL statement", flag="query")]
    format: Annotated[Literal["table", "csv", "json"], Option("output format; json is one object per row and line")] = (
        "table"
    )
    json: Json = False
    parquet: Annotated[
        str | None,
        Option(
            "Parquet data set of `headscan export parquet` to query instead of a store: a folder, or a URL such as "
            "s3://bucket/tables if its driver of fsspec is installed",
            metavar="FOLDER",
        ),
    ] = None
    rows: Annotated[int, Option("maximum number of rows of a table", least=0, needs="--format table; no --json")] = 40

    def __post_init__(self) -> None:
        if not self.query.strip():
            raise UsageError("the query is empty: give one SQL statement")
        if self.json and self.format != "table":
            raise UsageError(f"--json and --format {self.format} exclude each other: leave one of them out")
        if self.parquet is not None and self.store != StoreOptions():
            raise UsageError("--parquet and --store exclude each other: leave one of them out")

    def run(self) -> Result | None:
        import pyarrow as pa

        from headscan.errors import QueryError

        table = self._opened().query(self.query)
        try:
            if self.json:
                return Result(table.to_pylist(), lambda: "", {"columns": table.column_names})
            if self.format == "csv":
                _print_csv(table)
            elif self.format == "json":
                _print_json(table)
            else:
                _print_table(table, self)
        except (OverflowError, pa.ArrowException) as error:
            raise QueryError(
                f"a value does not fit the output format ({first_line(error)}). Cast its column to VARCHAR"
            ) from error
        return None

    def _opened(self) -> Store:
        if self.parquet is None:
            return self.store.open()
        from headscan.store.parquet_store import ParquetStore

        return ParquetStore(self.parquet)


# A file or pipe gets the data as they are; a terminal would obey control characters in them.


def _print_csv(table: pa.Table) -> None:
    import pyarrow.csv as csv

    if sys.stdout.isatty():
        content = io.BytesIO()
        csv.write_csv(_without_lists(table), content)
        print(printable_lines(content.getvalue().decode()), end="")
    else:
        csv.write_csv(_without_lists(table), sys.stdout.buffer)


def _print_json(table: pa.Table) -> None:
    terminal = sys.stdout.isatty()
    for row in table.to_pylist():
        line = json.dumps(row, default=str)
        print(printable_lines(line) if terminal else line)


def _print_table(table: pa.Table, options: Sql) -> None:
    from headscan.text_tables import text_table

    if not table.num_columns:
        print("done")
        return
    named = [name for name in table.column_names if re.search(rf"\b{re.escape(name)}\b", options.query)]
    print(text_table(table.slice(0, options.rows).to_pylist(), table.column_names, keep=named))
    if table.num_rows > options.rows:
        print(f"... {counted(table.num_rows - options.rows, 'more row')}: --rows or --format csv shows them")


def _without_lists(table: pa.Table) -> pa.Table:
    """Return the table with lists and structures as JSON, for CSV."""
    import pyarrow as pa

    for i, field in enumerate(table.schema):
        if pa.types.is_nested(field.type):
            texts = [None if v is None else json.dumps(v, default=str) for v in table.column(i).to_pylist()]
            table = table.set_column(i, field.name, pa.array(texts, pa.string()))
    return table
