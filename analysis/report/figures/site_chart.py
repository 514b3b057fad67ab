"""Chart of criteria on labelled examples: the metric over the share of removed heads, a panel for each site."""

from __future__ import annotations

import math
from collections.abc import Sequence
from html import escape

import plotly.graph_objects as go
from plotly.subplots import make_subplots

from headscan.analysis.effects.criterion_points import ALL_SITES, RANDOM, SitePoint, by_curve
from headscan.analysis.report.figures.style import FAINT, LEGEND_ABOVE, styled
from headscan.analysis.schema.effect_tables import ACCURACY, BLEU, LOSS

#: Name, factor and digits of a metric.
METRICS = {ACCURACY: ("accuracy in %", 100.0, 1), BLEU: ("BLEU", 1.0, 1), LOSS: ("loss in nats per token", 1.0, 3)}

#: Colour-blind safe (Okabe and Ito); further criteria repeat them with other markers.
_COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9")
_SYMBOLS = ("circle", "square", "triangle-up", "x")


def site_figure(points: Sequence[SitePoint]) -> go.Figure:
    """Draw the metric over the share of removed heads, in percent, by criterion.

    Args:
        points: Of one metric. Whiskers are the 95 % intervals of the change.
    """
    sites = list(dict.fromkeys(point.site for point in points))
    columns = min(len(sites), 2)
    rows = math.ceil(len(sites) / columns)
    figure = make_subplots(rows, columns, horizontal_spacing=0.1, vertical_spacing=0.16)
    names = list(dict.fromkeys(point.criterion for point in points if point.criterion != RANDOM))
    shown: set[str] = set()
    for place, site in enumerate(sites):
        cell = {"row": 1 + place // columns, "col": 1 + place % columns}
        for (criterion, _), members in by_curve([point for point in points if point.site == site]).items():
            line = _line(criterion, members, names).update(showlegend=criterion not in shown)
            figure.add_trace(line, **cell)
            shown.add(criterion)
        where = "all sites" if site == ALL_SITES else f"{site} attention"
        figure.update_xaxes(title_text=escape(f"heads of {where} removed, %"), rangemode="tozero", **cell)
        figure.update_yaxes(title_text=METRICS[points[0].metric][0], **cell)
    width = 560 if columns == 1 else 1000
    return styled(figure, width, 100 + 330 * rows).update_layout(legend=LEGEND_ABOVE, margin_r=40, margin_t=80)


def _line(criterion: str, members: Sequence[SitePoint], names: Sequence[str]) -> go.Scatter:
    _, scale, digits = METRICS[members[0].metric]
    place = -1 if criterion == RANDOM else names.index(criterion)
    colour = FAINT if place < 0 else _COLOURS[place % len(_COLOURS)]
    baseline = scale * members[0].effect.baseline
    y = [scale * (point.effect.baseline + point.effect.effect) for point in members]
    above = [scale * (point.effect.high - point.effect.effect) for point in members]
    below = [scale * (point.effect.effect - point.effect.low) for point in members]
    ends = [(high, low) if math.isfinite(high + low) else (0.0, 0.0) for high, low in zip(above, below, strict=True)]
    name = "random heads" if place < 0 else criterion
    return go.Scatter(
        x=[0.0, *(100 * point.share for point in members)],
        y=[baseline, *y],
        error_y={
            "type": "data",
            "symmetric": False,
            "array": [0.0, *(high for high, _ in ends)],
            "arrayminus": [0.0, *(low for _, low in ends)],
            "thickness": 1.2,
            "width": 3,
        },
        mode="lines+markers",
        name=escape(name),
        legendgroup=escape(name),
        hovertext=[
            "without ablation",
            *(_hover(point, name, value, digits) for point, value in zip(members, y, strict=True)),
        ],
        hoverinfo="text",
        line={"color": colour, "width": 1.5 if place < 0 else 2, "dash": "dash" if place < 0 else "solid"},
        marker={"color": colour, "size": 7, "symbol": _SYMBOLS[max(place, 0) // len(_COLOURS) % len(_SYMBOLS)]},
    )


def _hover(point: SitePoint, name: str, value: float, digits: int) -> str:
    return f"{escape(name)}<br>{point.share:.1%} of heads, {len(point.heads)}<br>{value:.{digits}f}"
