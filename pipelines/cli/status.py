"""The verbs that show a store: status and sql."""

from __future__ import annotations

import io
import json
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, Literal

from headscan.options import Option
from headscan.pipelines.cli.option_parser import UsageError
from headscan.pipelines.cli.results import Json, Result
from headscan.pipelines.cli.verb_base import StoreOptions, StoreVerb
from headscan.pipelines.runs.text_tables import printable_lines

if TYPE_CHECKING:
    import pyarrow as pa

    from headscan.analysis.store.store import Store


@dataclass(frozen=True, kw_only=True)
class Status(StoreVerb):
    """list the runs of a store, their progress, and the arms of its evaluations

        headscan status --store s.duckdb

    A run in progress shows how many of its shards or arms are finished.
    """

    json: Json = False

    def run(self) -> Result:
        store = self.store.open()
        runs = [_run_row(store, run) for run in store.runs()]
        arms = store.query(
            "select run_id as run, arm, task, questions, accuracy, standard_error from all_arm_summary where task ="
            " '(all)' order by all"
        ).to_pylist()
        path = self.store.path
        return Result(runs, lambda: _text(path, runs, arms), {"store": path, "arms": arms})


def _run_row(store: Store, run: Mapping[str, Any]) -> dict[str, Any]:
    """Return the row of a run; counts that its kind lacks are None."""
    from headscan.analysis.store.provenance import host_of, is_visible
    from headscan.analysis.store.records import SHARDED_KINDS

    status = run["status"]
    if status == "running" and not is_visible(run["writer"]):
        status = f"running on {host_of(run['writer'])}, when last heard of"
    sharded, has_arms = run["kind"] in SHARDED_KINDS, run["kind"] in ("evaluate", "ablate")
    units = None
    if run["kind"] in ("plan", "prune"):
        units = store.query("select count(*) from measured_units where run_id = ?", [run["run_id"]])[0][0].as_py()
    return {
        "run_id": run["run_id"],
        "kind": run["kind"],
        "model": run["model"],
        "corpus": run["corpus"],
        "status": status,
        "finished_shards": run["finished_shards"] if sharded else None,
        "total_shards": run["total_shards"] if sharded else None,
        **(_arm_counts(store, run) if has_arms else dict.fromkeys(_ARM_COUNTS)),
        "measured_units": units,
        "started_at": run["started_at"],
        "last_written": run["last_written"],
    }


_ARM_COUNTS = ("arms", "finished_arms", "answered_requests", "open_requests")


def _arm_counts(store: Store, run: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arms of a run, and the requests of the unfinished ones; None if their number is unknown."""
    [found] = store.query(
        "select count(*) as arms, count(*) filter (status = 'finished') as finished_arms, (select count(*) from"
        " responses join arms using (arm_id) where run_id = $1) as answered_requests from arms where run_id = $1",
        [run["run_id"]],
    ).to_pylist()
    each, left = run["config"].get("requests"), found["arms"] - found["finished_arms"]
    return {**found, "open_requests": None if each is None else each * left}


def _text(store: str, runs: Sequence[Mapping[str, Any]], arms: Sequence[Mapping[str, Any]]) -> str:
    from headscan.pipelines.runs.text_tables import table_cells, text_table

    if not runs:
        return f"{store} holds no runs"
    columns: dict[str, str | Callable[[Mapping[str, Any]], Any]] = {
        "run": "run_id",
        "kind": "kind",
        "model": "model",
        "corpus or tasks": "corpus",
        "status": "status",
        "progress": _progress,
        "started": lambda row: f"{row['started_at']:%Y-%m-%d %H:%M}",
        "last written": lambda row: f"{row['last_written']:%Y-%m-%d %H:%M}" if row["last_written"] else "",
    }
    tables = [text_table(table_cells(runs, columns))]
    return "\n\n".join([*tables, text_table(arms)] if arms else tables)


def _progress(row: Mapping[str, Any]) -> str:
    """Return the finished shards or arms of a run, of all, or its measured units; ``?`` until the corpus is read."""
    if row["measured_units"] is not None:
        return f"{row['measured_units']:,} units"
    if row["finished_shards"] is not None:
        return f"{row['finished_shards']}/{'?' if row['total_shards'] is None else row['total_shards']} shards"
    if row["arms"] is None:
        return ""
    text = f"{row['finished_arms']}/{row['arms']} arms"
    if row["finished_arms"] == row["arms"]:
        return text
    total = "" if row["open_requests"] is None else f"/{row['open_requests']:,}"
    return f"{text}, {row['answered_requests']:,}{total} requests of the others"


@dataclass(frozen=True, kw_only=True)
class Sql(StoreVerb):
    """query the store in SQL, read-only

        headscan sql "from head_summary order by output_norm_ln limit 10"
        headscan sql "select layer, avg(entropy) from head_statistics group by layer" --format csv
        headscan sql "from head_summary" --parquet tables/

    Tables: runs, shards, sequences, head_statistics, head_summaries, measure_pools, head_behaviours, head_importance,
    head_effects, head_gates, masks, mask_heads, arms, responses, answers, arm_results, arm_verdicts, split_verdicts,
    measured_units.
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
    rows: Annotated[int, Option("maximum number of rows of a table", least=0)] = 40

    def __post_init__(self) -> None:
        if self.json and self.format != "table":
            raise UsageError(f"--json and --format {self.format} exclude each other: leave one of them out")
        if self.parquet is not None and self.store != StoreOptions():
            raise UsageError("--parquet and --store exclude each other: leave one of them out")

    def run(self) -> Result | None:
        import pyarrow as pa

        from headscan.analysis.errors import QueryError

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
            raise QueryError(f"a value does not fit the output format ({error}). Cast its column to VARCHAR") from error
        return None

    def _opened(self) -> Store:
        if self.parquet is None:
            return self.store.open()
        from headscan.analysis.store.parquet_store import ParquetStore

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
