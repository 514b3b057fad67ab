"""query the store in SQL, read-only

    headscan sql "from head_summary order by output_norm_ln limit 10"
    headscan sql "select layer, avg(entropy) from head_statistics group by layer" --format csv

Tables: runs, shards, sequences, head_statistics, head_behaviours, head_importance, head_effects, head_gates, masks,
mask_heads, arms, responses, answers, arm_results, arm_verdicts, split_verdicts.
Views: head_scores, head_summary, head_profiles, positional_heads, behaviour_summary, importance_summary,
effect_summary, head_roles, arm_summary, arm_comparison, sweep_points, score_curves, question_split, sweep_confirmed.
They cover finished runs; the views all_head_summary, all_head_scores and so on cover all runs.
`describe head_summary` lists columns.
"""

from __future__ import annotations

import argparse
import io
import json
import re
import sys
from typing import TYPE_CHECKING

from headscan.pipelines.cli.shared import arguments
from headscan.pipelines.cli.shared import options as shared
from headscan.pipelines.cli.shared.json_output import Result, add_json
from headscan.pipelines.runs.text_tables import printable_lines

if TYPE_CHECKING:
    import pyarrow as pa


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("query", help="one SQL statement")
    shared.add_store(parser)
    parser.add_argument(
        "--format",
        choices=("table", "csv", "json"),
        default="table",
        help="output format; json is one object per row and line (default: table)",
    )
    add_json(parser)
    parser.add_argument(
        "--rows", type=arguments.whole(0), default=40, help="maximum number of rows of a table (default: 40)"
    )


def run(options: argparse.Namespace) -> Result | None:
    import pyarrow as pa

    from headscan.analysis.errors import QueryError

    if options.json and options.format != "table":
        raise arguments.UsageError(f"--json and --format {options.format} exclude each other: leave one of them out")
    table = shared.open_store(options).query(options.query)
    try:
        if options.json:
            return Result(table.to_pylist(), lambda: "", {"columns": table.column_names})
        if options.format == "csv":
            _print_csv(table)
        elif options.format == "json":
            _print_json(table)
        else:
            _print_table(table, options)
    except (OverflowError, pa.ArrowException) as error:
        raise QueryError(f"a value does not fit the output format ({error}). Cast its column to VARCHAR") from error
    return None


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


def _print_table(table: pa.Table, options: argparse.Namespace) -> None:
    from headscan.pipelines.runs.text_tables import text_table

    if not table.num_columns:
        print("done")
        return
    named = [name for name in table.column_names if re.search(rf"\b{re.escape(name)}\b", options.query)]
    print(text_table(table.slice(0, options.rows).to_pylist(), table.column_names, keep=named))
    if table.num_rows > options.rows:
        print(f"... {table.num_rows - options.rows} more rows: --rows or --format csv shows them")


def _without_lists(table: pa.Table) -> pa.Table:
    """Return the table with lists and structures as JSON, for CSV."""
    import pyarrow as pa

    for i, field in enumerate(table.schema):
        if pa.types.is_nested(field.type):
            texts = [None if v is None else json.dumps(v, default=str) for v in table.column(i).to_pylist()]
            table = table.set_column(i, field.name, pa.array(texts, pa.string()))
    return table
