"""Chart of what a smaller KV cache costs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
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
    curves = list(dict.fromkeys((point.arm.is_random, point.method, point.arm.selection or "") for point in points))
    colours: dict[str, str] = {}
    for is_random, method, mode in sorted(curves):
        members = sorted(
            (p for p in points if (p.arm.is_random, p.method, p.arm.selection or "") == (is_random, method, mode)),
            key=lambda p: p.kv_share,
        )
        colour = FAINT if is_random else colours.setdefault(method, BEST_COLOURS[len(colours) % len(BEST_COLOURS)])
        name = f"random, {mode}" if is_random else f"{method}, {mode}"
        style: dict[str, Any] = {
            "mode": "markers" if is_random else "lines+markers",
            "name": escape(name),
            "legendgroup": name,
            "line": {"color": colour, "dash": "dot" if mode == "decode" else "solid"},
            "marker": {"color": colour, "size": 5 if is_random else 8, "symbol": "x" if mode == "decode" else "circle"},
            "hoverinfo": "text",
        }
        shown = not any(trace.legendgroup == name for trace in figure.data)
        figure.add_trace(
            go.Scatter(
                x=[100 * p.kv_share for p in members],
                y=[p.arm.paired.difference for p in members],
                error_y=_whiskers([(p.arm.paired.low, p.arm.paired.difference, p.arm.paired.high) for p in members]),
                hovertext=[_text(p) for p in members],
                showlegend=shown,
                **style,
            ),
            row=1,
            col=1,
        )
        for column, family in enumerate(families, 2):
            known = [
                (p, recall.paired.retained)
                for p in members
                for recall in p.arm.recall
                if recall.family == family and recall.paired.retained is not None
            ]
            figure.add_trace(
                go.Scatter(
                    x=[100 * p.kv_share for p, _ in known],
                    y=[kept.share for _, kept in known if kept is not None],
                    error_y=_whiskers([(k.low, k.share, k.high) for _, k in known if k is not None]),
                    hovertext=[_text(p) for p, _ in known],
                    showlegend=False,
                    **style,
                ),
                row=1,
                col=column,
            )
    dashed = {"color": FAINT, "width": 1, "dash": "dash"}
    figure.add_hline(y=-MARGIN, line=dashed, row=1, col=1)
    figure.update_yaxes(title_text="accuracy, points to the baseline", zeroline=True, row=1, col=1)
    for column, family in enumerate(families, 2):
        figure.add_hline(y=LEAST_RETAINED, line=dashed, row=1, col=column)
        figure.update_yaxes(title_text=f"{escape(family)} left, %", zeroline=False, row=1, col=column)
    figure.update_xaxes(title_text=f"KV cache left at {tokens:,} tokens, %", zeroline=False)
    return styled(figure, 420 + 330 * len(families), 420).update_layout(legend=LEGEND_ABOVE, margin_r=40, margin_t=70)


def _whiskers(intervals: Sequence[tuple[float, float, float]]) -> dict[str, Any]:
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
