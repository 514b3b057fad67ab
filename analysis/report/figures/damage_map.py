"""Heatmap of the loss that a window on each KV head adds."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import plotly.graph_objects as go

from headscan.analysis.plans import HeadPlan
from headscan.analysis.plans.format.plan_records import HeadDamage
from headscan.analysis.report.figures.style import colorbar, grid_figure, layer_heatmap, round_ticks

#: By name of a kind of text, the number in the plan's evidence.
DAMAGES: dict[str, Callable[[HeadDamage], float | None]] = {
    "text": lambda damage: damage.text,
    "recall": lambda damage: damage.recall,
}


def damage_heatmap(plan: HeadPlan, kind: str) -> go.Figure | None:
    """Draw the damage of each KV head in nats per token; None if the plan has none of this kind.

    Negative values, which are a gain, are drawn as 0 and show on hover.

    Args:
        kind: A key of `DAMAGES`.
    """
    layers = [layer.layer for layer in plan.model.layers]
    width = max(layer.num_key_value_heads for layer in plan.model.layers)
    values = np.full((len(layers), width), np.nan)
    hover = np.full((len(layers), width), "", dtype=object)
    row_of = {layer: row for row, layer in enumerate(layers)}
    for head in plan.heads:
        damage = None if head.evidence.damage is None else DAMAGES[kind](head.evidence.damage)
        if damage is not None:
            values[row_of[head.layer], head.kv_head] = max(damage, 0.0)
            hover[row_of[head.layer], head.kv_head] = (
                f"layer {head.layer}, KV head {head.kv_head}<br>{damage:+.4g} nats per token<br>{head.action}"
            )
    if np.isnan(values).all():
        return None
    ticks = round_ticks(float(np.nanmax(values)))
    colours = {"zmin": 0, "zmax": ticks[-1], "colorscale": "Oranges", "colorbar": colorbar(ticks, above=False)}
    heatmap = layer_heatmap(values, hover, layers, **colours)
    return grid_figure(heatmap, len(layers), width, f"damage on {kind}, nats per token", "KV head")
