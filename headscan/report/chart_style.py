"""Colours, fonts, sizes and scales of all figures.

Text from a store is escaped wherever it enters a figure: plotly reads a few HTML tags in labels.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from html import escape
from typing import Any

import numpy as np
import plotly.graph_objects as go

from headscan.store.records import ArmKind
from headscan.verdicts.paired import Interval

#: Colours of arms; random ones are pale.
KIND_COLOURS = {
    ArmKind.MASK: "#1f5fa8",
    ArmKind.RULE: "#7b3fa0",
    ArmKind.RANDOM_MASK: "#9a9a9a",
    ArmKind.RANDOM_RULE: "#c3a9cf",
    ArmKind.PLAN: "#1d7a4c",
    ArmKind.RANDOM_PLAN: "#a9cdb9",
    ArmKind.MODEL: "#d9730d",
    ArmKind.PRUNED: "#a83232",
    ArmKind.RANDOM_PRUNED: "#dbb0b0",
    ArmKind.LAYERS_DROPPED: "#6b4f3a",
}

#: A legend above the plot, where it hides no points.
LEGEND_ABOVE = {"orientation": "h", "x": 0, "xanchor": "left", "y": 1.0, "yanchor": "bottom", "yref": "paper"}

INK, FAINT = "#222222", "#8a8a8a"
FONT = {"family": "system-ui, 'Segoe UI', 'Liberation Sans', sans-serif", "size": 13, "color": INK}


def cell_height(rows: int) -> float:
    """Return the height of a heatmap's cells in pixels: the largest that fits, from 9 to 32."""
    return min(max(640 / rows, 9), 32)


def gaps(rows: int, columns: int) -> dict[str, int]:
    """Return gaps between the cells of a heatmap; small cells have none."""
    gap = 1 if max(rows, columns) <= 40 else 0
    return {"xgap": gap, "ygap": gap}


def layer_heatmap(values: np.ndarray, hover: np.ndarray, layers: Sequence[int], **scale: Any) -> go.Heatmap:
    """Return the cells of a map of layers x heads; ``scale`` holds the colours of `plotly.graph_objects.Heatmap`."""
    rows, columns = values.shape
    return go.Heatmap(
        z=values,
        x=[str(head) for head in range(columns)],
        y=[str(layer) for layer in layers],
        hovertext=hover,
        hoverinfo="text",
        hoverongaps=False,
        **scale,
        **gaps(rows, columns),
    )


def whiskers(intervals: Sequence[Interval]) -> dict[str, Any]:
    """Return error bars; an unknown interval has none."""
    known = [each if each.known else Interval(each.value, each.value, each.value) for each in intervals]
    return {
        "type": "data",
        "symmetric": False,
        "array": [high - value for _, value, high in known],
        "arrayminus": [value - low for low, value, _ in known],
        "thickness": 1.2,
        "width": 3,
    }


def round_ticks(highest: float) -> list[float]:
    """Return three to six round numbers from 0 to about ``highest``."""
    if highest <= 0:
        return [0.0, 0.5, 1.0]
    power = 10.0 ** math.floor(math.log10(highest / 3))
    step = power * max(m for m in (1, 2, 2.5, 5) if m * power <= highest / 3)
    return [i * step for i in range(math.ceil(highest / step - 1e-9) + 1)]


def colorbar(ticks: Sequence[float]) -> dict[str, Any]:
    """Return the colour scale of a heatmap."""
    return {
        "thickness": 14,
        "outlinewidth": 0,
        "tickvals": list(ticks),
        "ticktext": [f"{tick:.4g}" for tick in ticks],
        "x": 1.02,
        "len": 1.0,
        "ypad": 0,
    }


def grid_figure(heatmap: go.Heatmap, rows: int, columns: int, title: str, across: str) -> go.Figure:
    """Return a heatmap figure, sized by its cells. Layers run down, heads across."""
    height, width = cell_height(rows), min(max(880 / columns, 9), 64)
    figure = go.Figure(heatmap)
    # Categories leave no gaps for layers without attention; dtick thins the labels, which plotly would rotate.
    every = max(1, math.ceil(14 / height))
    figure.update_yaxes(type="category", autorange="reversed", title_text="layer", dtick=every)
    figure.update_xaxes(type="category", title_text=across, dtick=max(1, math.ceil(columns / 32)), tickangle=0)
    figure.update_xaxes(showgrid=False, zeroline=False).update_yaxes(showgrid=False, zeroline=False)
    figure.update_layout(title={"text": escape(title), "x": 0, "xanchor": "left", "xref": "paper"})
    return styled(figure, max(columns * width, 260) + 190, rows * height + 110)


def styled(figure: go.Figure, width: float, height: float) -> go.Figure:
    """Apply the report's fonts and a size in pixels."""
    return figure.update_layout(
        template="plotly_white",
        font=FONT,
        width=round(width),
        height=round(height),
        margin={"l": 60, "r": 110, "t": 50, "b": 55},
        # The toolbar is above the plot, where it hides no heads.
        modebar={"orientation": "h", "bgcolor": "rgba(0,0,0,0)"},
        hoverlabel={"font": {"family": FONT["family"]}},
    )


def shortened(name: str, longest: int = 42) -> str:
    """Return an escaped label, shortened if it is too long."""
    return escape(name if len(name) <= longest else f"{name[: longest - 1]}…")
