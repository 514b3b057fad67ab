"""Heatmap of the heads of a scan, coloured by a score."""

from __future__ import annotations

import math

import numpy as np
import plotly.graph_objects as go

from headscan.analysis.heads.selection import RankedHead, rank_heads
from headscan.analysis.report.figures.style import colorbar, grid_figure, layer_heatmap, round_ticks
from headscan.analysis.store.store import Store
from headscan.catalog import SCORES

#: Values above this quantile share the last colour, because one very large value would hide all other differences.
_BRIGHTEST = 0.99

#: Maximum number of rows and columns at which a number fits into a cell.
_MOST_LABELLED = 16


def head_heatmap(store: Store, run_id: str, name: str, *, site: str = "self") -> go.Figure:
    """Draw the mean of a score or statistic per head.

    Layers run down, query heads across; numbers show on hover.

    Normalised scores have a diverging scale around 1 from 0 to 2, whose red end is the inactive one; the others a
    sequential scale from 0 to their 99 % quantile. Layers without attention are left out.

    Raises:
        SelectionError: Unknown name, or nothing was measured.
    """
    ranked = rank_heads(store, run_id, name, site=site)
    layers = sorted({head.layer for head in ranked})
    width = 1 + max(head.head for head in ranked)
    values = np.full((len(layers), width), np.nan)
    hover = np.full((len(layers), width), "", dtype=object)
    row_of = {layer: row for row, layer in enumerate(layers)}
    for head in ranked:
        values[row_of[head.layer], head.head] = head.value
        hover[row_of[head.layer], head.head] = _head_text(name, head)
    score = SCORES.get(name)
    normalised = score is not None and score.normaliser is not None
    finite = values[np.isfinite(values)]
    ticks = [0.0, 0.5, 1.0, 1.5, 2.0] if normalised else round_ticks(float(np.quantile(finite, _BRIGHTEST)))
    red_end_low = score is not None and score.inactive == "low"
    heatmap = layer_heatmap(
        values,
        hover,
        layers,
        zmin=0,
        zmax=ticks[-1],
        colorscale=("RdBu" if red_end_low else "RdBu_r") if normalised else "Viridis",
        colorbar=colorbar(ticks, above=bool(finite.max() > ticks[-1])),
    )
    if max(len(layers), width) <= _MOST_LABELLED:
        heatmap.update(texttemplate="%{z:.2f}" if finite.max() < 100 else "%{z:.3g}", textfont={"size": 11})
    return grid_figure(heatmap, len(layers), width, name, "query head")


def _head_text(name: str, head: RankedHead) -> str:
    text = f"layer {head.layer}, head {head.head} (KV head {head.kv_head})<br>"
    if math.isnan(head.value):
        return f"{text}not measured"
    text += f"{name} {head.value:.4g}"
    if not math.isnan(head.std):
        text += f" ± {head.std:.2g} over sequences"
    if head.inactive_share is not None:
        text += f"<br>inactive in {head.inactive_share:.1%} of sequences"
    return text
