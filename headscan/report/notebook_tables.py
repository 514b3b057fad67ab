"""Tables of a store for notebooks, as DuckDB relations.

A relation holds a copy of its rows in memory, so the store is open only while they are read, and a scan can write to it
meanwhile.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING, Any

import duckdb

from headscan.errors import HeadscanError, StoreError, StoreMissingError, check_type
from headscan.store.parquet_store import ParquetStore, store_at
from headscan.store.records import RunKind
from headscan.store.store import Store
from headscan.text_tables import html_table

if TYPE_CHECKING:
    import plotly.graph_objects as go

    from headscan.verdicts.judge import Verdict


class StoreTables:
    """The tables of one store.

    Methods that list rows return a `duckdb.DuckDBPyRelation`: ``.df()`` gives a pandas frame, ``.pl()`` a polars frame,
    ``.to_arrow_table()`` an Arrow table (``.arrow()`` its batches), and ``.filter()``, ``.order()``, ``.aggregate()``
    go on in SQL. pandas and polars are not installed with headscan.

    ``run`` is the first characters of a run's id; None reads the newest finished run. All methods raise StoreError if
    no run or several runs match it.
    """

    def __init__(self, store: Store) -> None:
        self._store = store
        self._memory = duckdb.connect(":memory:")

    def __repr__(self) -> str:
        return f"{self._title()}\n{self._newest_runs()}"

    def _repr_html_(self) -> str:
        rows = self._newest_runs().to_arrow_table().to_pylist()
        return f"<p>{escape(self._title())}</p>{html_table(rows)}"

    def _title(self) -> str:
        kinds = self.query("SELECT kind, count(*) FROM runs GROUP BY kind ORDER BY kind").fetchall()
        counts = ", ".join(f"{count} {kind}" for kind, count in kinds) or "none"
        return (
            f"Store {self._store.path}, runs: {counts}. Methods: runs, heads, scores, arms, verdicts, verdict, plans,"
            " head_map, arm_chart, query"
        )

    def _newest_runs(self) -> duckdb.DuckDBPyRelation:
        return self.query(
            "SELECT run_id, kind, model, corpus, status, strftime(started_at, '%Y-%m-%d %H:%M') AS started FROM runs"
            " ORDER BY started_at DESC, run_id LIMIT 10"
        )

    def runs(self) -> duckdb.DuckDBPyRelation:
        """Return one row per run, newest first: scans, probes, evaluations."""
        return self.query("SELECT * FROM runs ORDER BY started_at DESC, run_id")

    def heads(self, run: str | None = None) -> duckdb.DuckDBPyRelation:
        """Return one row per query head of a scan: mean, spread and quantiles of statistics and scores."""
        return self._of_run("all_head_summary", "scan", run, "site, layer, head")

    def scores(self, run: str | None = None) -> duckdb.DuckDBPyRelation:
        """Return the scores of a scan: one row per sequence and query head."""
        return self._of_run("head_scores", "scan", run, "sequence, site, layer, head")

    def arms(self, run: str | None = None) -> duckdb.DuckDBPyRelation:
        """Return the accuracy of an evaluation: one row per arm and task."""
        return self._of_run("all_arm_summary", "evaluate", run, "arm, task")

    def verdicts(self, run: str | None = None) -> duckdb.DuckDBPyRelation:
        """Return the paired comparison of each arm of an evaluation with its baseline, with 95 % intervals: one row per
        arm and task. `verdict` judges arms by these comparisons and by the loss of text.
        """
        return self._of_run("all_arm_comparison", "evaluate", run, "arm, task")

    def verdict(
        self, run: str | None = None, *, max_loss: float | None = None, max_points: float | None = None
    ) -> Verdict:
        """Judge the finished arms of an evaluation.

        Args:
            max_loss: Limit of the loss of text, in nats per token; None uses that by which the run's job judged.
            max_points: Limit of the loss of accuracy, in percentage points; None likewise.
        """
        from headscan.verdicts.judge import judge  # slow to import, and tables do without it

        run_id = self._store.resolve_run(run, "evaluate")["run_id"]
        return judge(self._store, run_id, max_loss=max_loss, max_points=max_points)

    def plans(self, run: str | None = None) -> duckdb.DuckDBPyRelation:
        """Return the KV-cache plans of an evaluation with their verdicts: one row per plan, mode and task.

        ``kv_shares`` is a list of [tokens, share of the cache that is left].
        """
        run_id = self._store.resolve_run(run, "evaluate")["run_id"]
        return self.query(
            "SELECT c.*, a.config->>'mode' AS mode, a.config->>'method' AS method, a.config->'kv_shares' AS kv_shares"
            " FROM all_arm_comparison c JOIN arms a USING (arm_id) WHERE c.run_id = ? AND c.kind = 'plan'"
            " ORDER BY c.arm, c.task",
            [run_id],
        )

    def head_map(self, column: str = "output_norm_ln", run: str | None = None, *, site: str = "self") -> go.Figure:
        """Return a map of layers and heads that notebooks display. The scale goes from 0, or from the lowest negative
        value, to the highest value.

        Args:
            column: A number of `heads`.
            site: Kind of attention: ``self``, ``cross`` or ``encoder``.

        Raises:
            QueryError: There is no such column.
        """
        import numpy as np  # slow to import with plotly, and tables do without them

        from headscan.report.chart_style import colorbar, grid_figure, layer_heatmap, round_ticks

        run_id = self._store.resolve_run(run, "scan")["run_id"]
        rows = self._store.query(
            f'SELECT layer, head, "{column.replace(chr(34), chr(34) * 2)}" AS value FROM all_head_summary'
            " WHERE run_id = ? AND site = ? ORDER BY layer, head",
            [run_id, site],
        ).to_pylist()
        if not rows:
            raise HeadscanError(f"run {run_id} has 0 heads of {site} attention (limit 1). Choose another `site`")
        layers = sorted({row["layer"] for row in rows})
        columns = 1 + max(row["head"] for row in rows)
        values = np.full((len(layers), columns), np.nan)
        hover = np.full(values.shape, "", dtype=object)
        for row in rows:
            place = layers.index(row["layer"]), row["head"]
            values[place] = np.nan if row["value"] is None else row["value"]
            hover[place] = f"layer {row['layer']}, head {row['head']}<br>{column} {values[place]:.4g}"
        lowest, highest = min(0.0, float(np.nanmin(values))), float(np.nanmax(values))
        ticks = round_ticks(highest)
        cells = layer_heatmap(
            values,
            hover,
            layers,
            zmin=lowest,
            zmax=max(highest, lowest),
            colorscale="Cividis",
            colorbar=colorbar(ticks),
        )
        return grid_figure(cells, len(layers), columns, column, "head")

    def arm_chart(self, run: str | None = None) -> go.Figure:
        """Return the difference of each arm of an evaluation to its baseline, with 95 % intervals, as a figure."""
        from headscan.report.arm_chart import arms_figure  # slow to import, and tables do without it

        return arms_figure(self.verdict(run))

    def query(self, sql: str, parameters: Sequence[Any] | None = None) -> duckdb.DuckDBPyRelation:
        """Return the rows of any SELECT statement; ``?`` stands for the parameters in order.

        Raises:
            QueryError: DuckDB refuses the query.
        """
        return self._memory.from_arrow(self._store.query(sql, parameters))

    def _of_run(self, view: str, kind: RunKind, run: str | None, order: str) -> duckdb.DuckDBPyRelation:
        run_id = self._store.resolve_run(run, kind)["run_id"]
        return self.query(f"SELECT * FROM {view} WHERE run_id = ? ORDER BY {order}", [run_id])


def open_store(path: str | Path) -> StoreTables:
    """Return the tables of a store that a scan or an evaluation wrote, or of its Parquet data set (a folder or URL).

    Raises:
        StoreMissingError: There is no store at ``path``.
    """
    check_type("path", path, str | os.PathLike, "the path of a store", StoreError)
    store = store_at(path)
    if not isinstance(store, ParquetStore) and not store.path.exists():
        raise StoreMissingError(f"there is no store at {path}. Run `headscan scan` first, or name another path")
    return StoreTables(store)
