"""Charts of a sweep: accuracy over the ablated share, and removable shares by two rules."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from html import escape

import plotly.graph_objects as go

from headscan.analysis.report.figures.style import FAINT, INK, LEGEND_ABOVE, styled
from headscan.analysis.verdict_limits import MARGIN
from headscan.analysis.verdicts.curves import Curve, SweepPoint

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


#: Colours of the scores with the largest removable shares. The others are pale lines with their name on hover.
BEST_COLOURS = ("#1f5fa8", "#d9730d", "#2a8f57", "#7b3fa0")

_PALE = "#c9ced6"

#: Legend rank of the pale lines: after all others, whose rank is 1000.
_LAST = 1001


def curves_figure(curves: Sequence[Curve]) -> go.Figure:
    """Draw accuracy over the measured share of ablated heads, in percent.

    Args:
        curves: Of one kind and its random controls, the best first. The first four scores have colours, bands for the
            95 % interval of the difference to the baseline, and a place in the legend, like the random controls.
            Points that lose recall are crosses.
    """
    scored = [curve for curve in curves if not curve.is_random]
    best, others = scored[: len(BEST_COLOURS)], scored[len(BEST_COLOURS) :]
    figure = go.Figure()
    # Pale lines first, because later traces are drawn on top.
    for place, curve in enumerate(others):
        line = _line(curve, _PALE, width=1.5)
        figure.add_trace(
            line.update(name="other scores", legendgroup="others", showlegend=place == 0, legendrank=_LAST)
        )
    for colour, curve in [*zip(BEST_COLOURS, best, strict=False), *((INK, c) for c in curves if c.is_random)]:
        figure.add_traces(list(_line_with_band(curve, colour)))
    points = [point for curve in curves for point in curve.points]
    _baseline(figure, points)
    figure.update_xaxes(title_text="ablated heads (measured), %", rangemode="tozero", zeroline=False)
    figure.update_yaxes(title_text="accuracy, %", zeroline=False)
    return styled(figure, 1000, 480).update_layout(legend={"x": 1.02, "y": 1, "xanchor": "left"}, margin_r=230)


def _line_with_band(curve: Curve, colour: str) -> Iterator[go.Scatter]:
    x = [100 * point.zeroed_share for point in curve.points]
    # The interval is of the difference, so the baseline adds no error of its own.
    high = [100 * (point.baseline + point.high) for point in curve.points]
    low = [100 * (point.baseline + point.low) for point in curve.points]
    yield go.Scatter(
        x=[*x, *reversed(x)],
        y=[*high, *reversed(low)],
        mode="lines",
        fill="toself",
        fillcolor=_transparent(colour),
        line={"width": 0},
        hoverinfo="skip",
        showlegend=False,
        legendgroup=curve.name,
    )
    yield _line(curve, colour, width=2.5).update(name=escape(curve.name), legendgroup=curve.name)


def _line(curve: Curve, colour: str, width: float) -> go.Scatter:
    return go.Scatter(
        x=[100 * point.zeroed_share for point in curve.points],
        y=[100 * point.accuracy for point in curve.points],
        mode="lines+markers",
        line={"color": colour, "width": width, "dash": "dot" if curve.is_random else "solid"},
        marker={
            "size": 2.5 * width,
            "color": colour,
            "symbol": ["x" if point.recall_lost else "circle" for point in curve.points],
        },
        hovertext=[point_text(curve, point) for point in curve.points],
        hoverinfo="text",
    )


def point_text(curve: Curve, point: SweepPoint) -> str:
    """Return the hover text of a point."""
    if not point.arms:
        return f"baseline<br>{point.accuracy:.2%} of {point.questions:,} questions"
    text = (
        f"{escape(curve.name)}, {curve.kind.label} of {point.share:.3g}"
        f"<br>{point.zeroed_share:.1%} of heads ablated<br>{point.accuracy:.2%} correct,"
        f" {100 * point.difference:+.2f} points [{100 * point.low:+.2f}, {100 * point.high:+.2f}]"
    )
    if point.arms > 1:
        text += f"<br>mean of {point.arms} seeds, {100 * point.lowest:+.2f} to {100 * point.highest:+.2f}"
    if point.recall_lost:
        text += "<br>loses recall"
    return text


def _baseline(figure: go.Figure, points: Sequence[SweepPoint]) -> None:
    baseline = 100 * points[0].baseline
    line = {"color": FAINT, "width": 1}
    figure.add_hline(y=baseline, line=line, name=f"baseline, {baseline:.1f} %", showlegend=True)
    below = line | {"dash": "dash"}
    figure.add_hline(y=baseline - MARGIN, line=below, name=f"{MARGIN:g} point below", showlegend=True)


def _transparent(colour: str, opacity: float = 0.13) -> str:
    red, green, blue = (int(colour[i : i + 2], 16) for i in (1, 3, 5))
    return f"rgba({red},{green},{blue},{opacity})"
