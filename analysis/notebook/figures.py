"""Figures of a store that notebooks display inline."""

from __future__ import annotations

import numpy as np
import plotly.graph_objects as go

from headscan.analysis.errors import AnalysisError
from headscan.analysis.report.figures.arm_chart import arms_figure
from headscan.analysis.report.figures.style import colorbar, grid_figure, layer_heatmap, round_ticks
from headscan.analysis.store.store import Store
from headscan.analysis.verdicts.judge import judge


def head_map(store: Store, run_id: str, column: str, site: str) -> go.Figure:
    """Draw a column of ``head_summary`` as a map of layers and heads.

    The scale goes from 0, or from the lowest negative value, to the highest value.

    Raises:
        QueryError: There is no such column.
        AnalysisError: The run measured no heads of the site.
    """
    rows = store.query(
        f'SELECT layer, head, "{column.replace(chr(34), chr(34) * 2)}" AS value FROM all_head_summary'
        " WHERE run_id = ? AND site = ? ORDER BY layer, head",
        [run_id, site],
    ).to_pylist()
    if not rows:
        raise AnalysisError(f"run {run_id} has 0 heads of {site} attention (limit 1). Choose another `site`")
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
        colorbar=colorbar(ticks, False),
    )
    return grid_figure(cells, len(layers), columns, column, "head")


def arm_chart(store: Store, run_id: str) -> go.Figure:
    """Draw the accuracy that each arm of an evaluation loses or gains, with 95 % intervals."""
    return arms_figure(judge(store, run_id))
