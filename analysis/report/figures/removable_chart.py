"""Chart of removable shares, by two rules."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from html import escape

import plotly.graph_objects as go

from headscan.analysis.report.figures.style import INK, LEGEND_ABOVE, styled
from headscan.analysis.verdicts.curves import Curve

_PAPER, _STRICT = "#8fb3d9", "#1f5fa8"


def removable_figure(curves: Sequence[Curve]) -> go.Figure:
    """Draw two removable shares of each curve as bars.

    The first is where accuracy last falls one point below the baseline (arXiv 2504.03889). The second is the largest
    tested share that passes together with every smaller tested one.

    Args:
        curves: Of one kind and its random controls, in the order of the rows.
    """
    figure = go.Figure()
    figure.add_trace(_bars(curves, "accuracy within one point", _PAPER, lambda c: c.removable_share, removable_text))
    figure.add_trace(
        _bars(
            curves,
            "strict: this tested share and all smaller ones pass",
            _STRICT,
            lambda c: c.removable_share_strict or 0.0,
            strict_text,
        )
    )
    figure.update_xaxes(title_text="heads ablated, %", rangemode="tozero", zeroline=False)
    figure.update_yaxes(autorange="reversed", showgrid=False, zeroline=False, automargin=True, ticksuffix=" ")
    # Plotly puts the first trace of a group at the far end of the reversed axis; the legend reads in the bars' order.
    figure.update_layout(barmode="group", bargap=0.3, bargroupgap=0.05)
    return styled(figure, 940, 130 + 34 * len(curves)).update_layout(legend=LEGEND_ABOVE)


def removable_text(curve: Curve) -> str:
    """Return the removable share in percent, by the rule of the paper."""
    return _share_text(curve, curve.removable_share)


def strict_text(curve: Curve) -> str:
    """Return the strict removable share, or why it is missing."""
    if curve.removable_share_strict is None:
        return "too few questions or correct answers"
    text = _share_text(curve, curve.removable_share_strict)
    return f"{text}, then recall is lost" if curve.stopped_by_recall else text


def _share_text(curve: Curve, share: float) -> str:
    """Return a share in percent, with ``≥`` for the largest tested."""
    return f"{'≥ ' if 0 < share >= curve.reach else ''}{share:.1%}"


def _bars(
    curves: Sequence[Curve], name: str, colour: str, share: Callable[[Curve], float], words: Callable[[Curve], str]
) -> go.Bar:
    text = [words(curve) for curve in curves]
    return go.Bar(
        x=[100 * share(curve) for curve in curves],
        y=[escape(curve.name) for curve in curves],
        orientation="h",
        name=name,
        marker={"color": colour},
        text=text,
        textposition="outside",
        textfont={"size": 11, "color": INK},
        cliponaxis=False,
        hovertext=[f"{escape(c.name)}: {t}<br>share of heads, {name}" for c, t in zip(curves, text, strict=True)],
        hoverinfo="text",
    )
