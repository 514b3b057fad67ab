"""Heatmap of the overlap of all pairs of scores."""

from __future__ import annotations

import numpy as np
import plotly.graph_objects as go
import pyarrow as pa

from headscan.analysis.report.figures.style import colorbar, gaps, styled

_CELL = 36


def overlap_figure(pairs: pa.Table) -> go.Figure:
    """Draw the intersection over union of all pairs, in percent.

    Columns show the numbers of the scores.

    Args:
        pairs: The rows of ``comparisons.score_overlap`` or ``mask_overlap``.
    """
    rows = pairs.to_pylist()
    names = list(dict.fromkeys(row[side] for side in ("score_a", "score_b") for row in rows))
    places = {name: place for place, name in enumerate(names)}
    values = np.full((len(names), len(names)), np.nan)
    hover = np.full(values.shape, "", dtype=object)
    for row in rows:
        a, b = places[row["score_a"]], places[row["score_b"]]
        values[a, b] = values[b, a] = 100 * row["overlap"]
        hover[a, b] = hover[b, a] = (
            f"{row['score_a']} picks {row['picked_a']:,}<br>{row['score_b']} picks {row['picked_b']:,}"
            f"<br>both {row['both']:,}: {row['overlap']:.1%} of what either picks"
        )
    figure = go.Figure(
        go.Heatmap(
            z=values,
            x=[str(place + 1) for place in range(len(names))],
            y=[f"{name}  {place + 1}" for place, name in enumerate(names)],
            zmin=0,
            zmax=100,
            colorscale="Blues",
            colorbar=colorbar([0, 25, 50, 75, 100], above=False),
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
