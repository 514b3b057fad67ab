"""Charts of heads: positional heads, weight by distance, overlap of all pairs of scores, and removed heads."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import plotly.graph_objects as go
from plotly.subplots import make_subplots

from headscan.report.chart_style import (
    KIND_COLOURS,
    cell_height,
    colorbar,
    gaps,
    grid_figure,
    layer_heatmap,
    round_ticks,
    styled,
)
from headscan.report.share_chart import ArmPoint
from headscan.store.records import ArmKind
from headscan.store.store import Store
from headscan.text_tables import percent

_CELL = 36


def overlap_figure(rows: Sequence[Mapping[str, Any]]) -> go.Figure:
    """Draw the intersection over union of all pairs, rows of ``comparisons.score_overlap`` or ``mask_overlap``, in
    percent. Columns show the numbers of the scores.
    """
    names = list(dict.fromkeys(row[side] for side in ("score_a", "score_b") for row in rows))
    places = {name: place for place, name in enumerate(names)}
    values = np.full((len(names), len(names)), np.nan)
    hover = np.full(values.shape, "", dtype=object)
    for row in rows:
        a, b = places[row["score_a"]], places[row["score_b"]]
        values[a, b] = values[b, a] = 100 * row["overlap"]
        hover[a, b] = hover[b, a] = (
            f"{row['score_a']} picks {row['picked_a']:,}<br>{row['score_b']} picks {row['picked_b']:,}"
            f"<br>both {row['both']:,}: {percent(row['overlap'])} of what either picks"
        )
    figure = go.Figure(
        go.Heatmap(
            z=values,
            x=[str(place + 1) for place in range(len(names))],
            y=[f"{name}  {place + 1}" for place, name in enumerate(names)],
            zmin=0,
            zmax=100,
            colorscale="Blues",
            colorbar=colorbar([0, 25, 50, 75, 100]),
            texttemplate="%{z:.0f}",
            textfont={"size": 11},
            hovertext=hover,
            hoverinfo="text",
            hoverongaps=False,
            **gaps(len(names), len(names)),
        )
    )
    figure.update_yaxes(type="category", autorange="reversed", automargin=True, ticksuffix=" ")
    figure.update_xaxes(type="category", tickangle=0, side="top")
    figure.update_xaxes(showgrid=False, zeroline=False).update_yaxes(showgrid=False, zeroline=False)
    side = _CELL * len(names)
    return styled(figure, side + 300, side + 90).update_layout(margin={"t": 60, "b": 20})


def profiles_figure(store: Store, run_id: str, *, site: str = "self") -> go.Figure | None:
    """Draw the measured ones of positional heads and mean weight by distance, by layer; None without any."""
    charts = [c for c in (_positional_bars(store, run_id, site), _distance_heatmap(store, run_id, site)) if c]
    if not charts:
        return None
    layers = charts[0].trace.y
    figure = make_subplots(
        cols=len(charts), shared_yaxes=True, column_widths=[c.width for c in charts], horizontal_spacing=0.04
    )
    for column, chart in enumerate(charts, 1):
        figure.add_trace(chart.trace, row=1, col=column)
        figure.update_xaxes(title_text=chart.title, row=1, col=column, **chart.axis)
    height = cell_height(len(layers))
    figure.update_yaxes(type="category", categoryorder="array", categoryarray=layers, autorange="reversed")
    figure.update_yaxes(showgrid=False, zeroline=False, dtick=max(1, math.ceil(14 / height)))
    figure.update_yaxes(title_text="layer", row=1, col=1)
    width = sum(chart.width for chart in charts) + 190
    return styled(figure, width, max(len(layers) * height, 60) + 110)


class _Chart(NamedTuple):
    """One chart of the row; ``trace`` is by layer, ``width`` in pixels, ``axis`` horizontal."""

    trace: Any
    width: int
    title: str
    axis: dict[str, Any]


def _positional_bars(store: Store, run_id: str, site: str) -> _Chart | None:
    heads = store.query(
        "SELECT layer, count(DISTINCT head) AS heads FROM all_head_profiles"
        " WHERE run_id = ? AND site = ? AND profile = 'argmax_offsets' GROUP BY layer ORDER BY layer",
        [run_id, site],
    ).to_pylist()
    if not heads:
        return None
    positional: dict[int, list[str]] = {row["layer"]: [] for row in heads}
    for row in store.query(
        "SELECT layer, head, key_offset, share FROM all_positional_heads WHERE run_id = ? AND site = ?"
        " ORDER BY layer, head",
        [run_id, site],
    ).to_pylist():
        positional[row["layer"]].append(
            f"head {row['head']}: offset {row['key_offset']} in {percent(row['share'])} of queries"
        )
    trace = go.Bar(
        x=[len(positional[row["layer"]]) / row["heads"] for row in heads],
        y=[str(row["layer"]) for row in heads],
        orientation="h",
        marker={"color": KIND_COLOURS[ArmKind.MASK]},
        hovertext=[
            "<br>".join(
                [f"layer {row['layer']}: {len(positional[row['layer']])} of {row['heads']}", *positional[row["layer"]]]
            )
            for row in heads
        ],
        hoverinfo="text",
        showlegend=False,
    )
    axis = {"range": [0, 1], "tickvals": [0, 0.5, 1], "ticktext": ["0 %", "50 %", "100 %"], "zeroline": False}
    return _Chart(trace, 220, "positional heads", axis)


def _distance_heatmap(store: Store, run_id: str, site: str) -> _Chart | None:
    rows = store.query(
        "SELECT layer, bin, label, avg(share) AS share FROM all_head_profiles"
        " WHERE run_id = ? AND site = ? AND profile = 'mass_by_distance'"
        " GROUP BY layer, bin, label ORDER BY layer, bin",
        [run_id, site],
    ).to_pylist()
    if not rows:
        return None
    # The last bins are empty if no sequence is long enough.
    used = 1 + max((row["bin"] for row in rows if row["share"] > 0), default=0)
    layers = sorted({row["layer"] for row in rows})
    labels = [row["label"] for row in rows[:used]]
    values = np.array([row["share"] for row in rows]).reshape(len(layers), -1)[:, :used]
    ticks = round_ticks(float(values.max()))
    trace = go.Heatmap(
        z=values,
        x=labels,
        y=[str(layer) for layer in layers],
        text=[[percent(value) for value in row] for row in values],
        hovertemplate="layer %{y}, distance %{x}: %{text}<extra></extra>",
        zmin=0,
        zmax=ticks[-1],
        colorscale="Viridis",
        colorbar=colorbar(ticks),
        **gaps(len(layers), used),
    )
    every = slice(None, None, 1 if used <= 12 else 2)
    axis = {
        "type": "category",
        "tickvals": labels[every],
        "ticktext": [label.partition("-")[0] for label in labels][every],
        "tickangle": 0,
    }
    return _Chart(trace, 530, "weight by distance |q - k|, tokens (lower ends of bins)", axis)


def removed_map(points: Sequence[ArmPoint], heads_of: Mapping[int, int], title: str) -> go.Figure:
    """Draw the smallest share of removed heads, in percent, at which each head goes, for models of one method, unit and
    repair.
    """
    layers, width = sorted(heads_of), max(heads_of.values())
    shares = sorted({round(point.share, 4) for point in points})
    values = np.full((len(layers), width), np.nan)
    hover = np.full((len(layers), width), "", dtype=object)
    for row, layer in enumerate(layers):
        for head in range(heads_of[layer]):
            gone = [round(point.share, 4) for point in points if (layer, head) in point.removed]
            values[row, head] = shares.index(min(gone)) if gone else len(shares)
            when = f"removed from {percent(min(gone))}" if gone else "stays"
            hover[row, head] = f"layer {layer}, head {head}<br>{when}"
    colours = [*_shades(len(shares)), "#eceef1"]
    steps = [[(i + d) / len(colours), colour] for i, colour in enumerate(colours) for d in (0, 1)]
    percents = np.array([*(100 * share for share in shares), np.nan])
    numbers = np.where(np.isnan(values), np.nan, percents[np.nan_to_num(values).astype(int)])
    heatmap = layer_heatmap(
        values, hover, layers, customdata=numbers, zmin=-0.5, zmax=len(colours) - 0.5, colorscale=steps, showscale=False
    )
    figure = grid_figure(heatmap, len(layers), width, title, "query head")
    for name, colour in zip([*(f"removed from {percent(share)}" for share in shares), "stays"], colours, strict=True):
        # A heatmap has no legend, so traces without points show the colours.
        marker: dict[str, Any] = {"symbol": "square", "size": 12, "color": colour}
        figure.add_trace(go.Scatter(x=[None], y=[None], mode="markers", name=name, marker=marker))
    return figure.update_layout(showlegend=True, legend={"x": 1.02, "y": 1, "xanchor": "left"}, margin_r=190)


def _shades(count: int) -> list[str]:
    """Return reds from dark to pale."""
    dark, pale = np.array([139, 26, 26]), np.array([240, 180, 92])
    parts = np.linspace(0, 1, count) if count > 1 else [0.0]
    return ["#" + "".join(f"{round(c):02x}" for c in dark + part * (pale - dark)) for part in parts]
