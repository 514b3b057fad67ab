"""Chart of the cost of a smaller KV cache."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from html import escape
from typing import Any

import plotly.graph_objects as go
from plotly.subplots import make_subplots

from headscan.analysis.report.figures.curve_chart import BEST_COLOURS
from headscan.analysis.report.figures.style import FAINT, LEGEND_ABOVE, styled
from headscan.analysis.verdict_limits import LEAST_RETAINED, MARGIN
from headscan.analysis.verdicts.judge import ArmVerdict


@dataclass(frozen=True)
class PlanPoint:
    """One plan in one mode.

    Attributes:
        arm: Its verdict.
        method: Method that ordered the KV heads.
        kv_share: Share of the KV cache that is left, 0 to 1.
    """

    arm: ArmVerdict
    method: str
    kv_share: float


def cache_figure(points: Sequence[PlanPoint], tokens: int) -> go.Figure:
    """Draw accuracy and recall over the share of the cache that is left, by method and mode.

    Whiskers are 95 % intervals; random plans of the same bytes are pale.

    Args:
        tokens: Length at which the cache is counted.
    """
    families = list(dict.fromkeys(recall.family for point in points for recall in point.arm.recall))
    figure = make_subplots(1, 1 + len(families), horizontal_spacing=0.08)
    for curve in _curves(points):
        figure.add_trace(_trace(curve, _accuracy, shown=True), row=1, col=1)
        for column, family in enumerate(families, 2):
            figure.add_trace(_trace(curve, partial(_recall, family=family), shown=False), row=1, col=column)
    _add_axis(figure, 1, "accuracy, points to the baseline", -MARGIN)
    for column, family in enumerate(families, 2):
        _add_axis(figure, column, f"{escape(family)} left, %", LEAST_RETAINED)
    figure.update_yaxes(zeroline=True, row=1, col=1)
    figure.update_xaxes(title_text=f"KV cache left at {tokens:,} tokens, %", zeroline=False)
    return styled(figure, 420 + 330 * len(families), 420).update_layout(legend=LEGEND_ABOVE, margin_r=40, margin_t=70)


@dataclass(frozen=True)
class _Curve:
    """Plans of one method in one mode, by growing cache; ``is_random``: controls."""

    method: str
    mode: str
    is_random: bool
    colour: str
    points: tuple[PlanPoint, ...]

    @property
    def name(self) -> str:
        """Name in the legend; not escaped."""
        return f"{'random' if self.is_random else self.method}, {self.mode}"


def _curves(points: Sequence[PlanPoint]) -> list[_Curve]:
    """Return the curves, controls last; those of one mode are one curve."""
    members: dict[tuple[bool, str, str], list[PlanPoint]] = defaultdict(list)
    for point in points:
        method = "random" if point.arm.is_random else point.method
        members[point.arm.is_random, method, point.arm.selection or ""].append(point)
    methods = sorted({method for is_random, method, _ in members if not is_random})
    colours = {method: BEST_COLOURS[index % len(BEST_COLOURS)] for index, method in enumerate(methods)}
    return [
        _Curve(
            method,
            mode,
            is_random,
            FAINT if is_random else colours[method],
            tuple(sorted(members[is_random, method, mode], key=lambda point: point.kv_share)),
        )
        for is_random, method, mode in sorted(members)
    ]


#: Lower end, value and upper end.
_Interval = tuple[float, float, float]


def _accuracy(point: PlanPoint) -> _Interval:
    paired = point.arm.paired
    return paired.low, paired.difference, paired.high


def _recall(point: PlanPoint, family: str) -> _Interval | None:
    """Return the share of recall that is left, in percent; None if the baseline has too little to lose."""
    for recall in point.arm.recall:
        kept = recall.paired.retained
        if recall.family == family and kept is not None:
            return kept.low, kept.share, kept.high
    return None


def _trace(curve: _Curve, read: Callable[[PlanPoint], _Interval | None], *, shown: bool) -> go.Scatter:
    """Draw one number of a curve's plans; ``shown``: the legend names the curve."""
    found = [(point, interval) for point in curve.points if (interval := read(point)) is not None]
    decode = curve.mode == "decode"
    return go.Scatter(
        x=[100 * point.kv_share for point, _ in found],
        y=[value for _, (_, value, _) in found],
        error_y=_whiskers([interval for _, interval in found]),
        hovertext=[_text(point) for point, _ in found],
        hoverinfo="text",
        mode="markers" if curve.is_random else "lines+markers",
        name=escape(curve.name),
        legendgroup=curve.name,
        showlegend=shown,
        line={"color": curve.colour, "dash": "dot" if decode else "solid"},
        marker={"color": curve.colour, "size": 5 if curve.is_random else 8, "symbol": "x" if decode else "circle"},
    )


def _add_axis(figure: go.Figure, column: int, title: str, limit: float) -> None:
    """Name the vertical axis of a column, and draw its limit as a dashed line."""
    figure.add_hline(y=limit, line={"color": FAINT, "width": 1, "dash": "dash"}, row=1, col=column)
    figure.update_yaxes(title_text=title, zeroline=False, row=1, col=column)


def _whiskers(intervals: Sequence[_Interval]) -> dict[str, Any]:
    return {
        "type": "data",
        "symmetric": False,
        "array": [high - value for _, value, high in intervals],
        "arrayminus": [value - low for low, value, _ in intervals],
        "thickness": 1,
        "width": 3,
    }


def _text(point: PlanPoint) -> str:
    p = point.arm.paired
    recall = "".join(f"<br>{escape(each.points())}" for each in point.arm.recall if each.informative)
    return (
        f"{escape(point.arm.name)}<br>{point.kv_share:.1%} of the KV cache"
        f"<br>{p.difference:+.2f} points [{p.low:+.2f}, {p.high:+.2f}]{recall}"
    )
