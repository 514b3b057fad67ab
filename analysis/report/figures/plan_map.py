"""Heatmap of the KV heads of a plan, coloured by class."""

from __future__ import annotations

import numpy as np
import plotly.graph_objects as go

from headscan.analysis.plans import HeadPlan
from headscan.analysis.report.figures.style import grid_figure, layer_heatmap

_CLASS_COLOURS = {"streaming": "#f0b45c", "retrieval": "#1f5fa8", "removable": "#b5473c", "protected": "#c9ced6"}


def plan_heatmap(plan: HeadPlan) -> go.Figure:
    """Draw the class of each KV head.

    Layers run down, KV heads across; keep-scores show on hover.
    """
    layers = [layer.layer for layer in plan.model.layers]
    width = max(layer.num_key_value_heads for layer in plan.model.layers)
    classes = list(_CLASS_COLOURS)
    values = np.full((len(layers), width), np.nan)
    hover = np.full((len(layers), width), "", dtype=object)
    row_of = {layer: row for row, layer in enumerate(layers)}
    for head in plan.heads:
        values[row_of[head.layer], head.kv_head] = classes.index(head.head_class)
        hover[row_of[head.layer], head.kv_head] = (
            f"layer {head.layer}, KV head {head.kv_head}<br>{head.head_class}: {head.action}"
            + (f" {head.sink} + {head.recent}" if head.action == "window" else "")
            + (f"<br>keep-score {head.score:.3g}" if head.head_class != "protected" else "")
        )
    steps = [(i + d) / len(classes) for i in range(len(classes)) for d in (0, 1)]
    colours = [colour for colour in _CLASS_COLOURS.values() for _ in (0, 1)]
    heatmap = layer_heatmap(
        values,
        hover,
        layers,
        zmin=-0.5,
        zmax=len(classes) - 0.5,
        colorscale=[list(pair) for pair in zip(steps, colours, strict=True)],
        showscale=False,
    )
    figure = grid_figure(heatmap, len(layers), width, "plan", "KV head")
    present = {head.head_class for head in plan.heads}
    for name in classes:
        if name in present:
            # A heatmap has no legend, so traces without points show the colours.
            marker = {"symbol": "square", "size": 12, "color": _CLASS_COLOURS[name]}
            figure.add_trace(go.Scatter(x=[None], y=[None], mode="markers", name=name, marker=marker))
    return figure.update_layout(showlegend=True, legend={"x": 1.02, "y": 1, "xanchor": "left"})
