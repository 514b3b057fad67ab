"""Charts of arms compared with their baseline, in the benchmark and in recall, and of the shares that sweeps find."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from html import escape
from typing import Any, NamedTuple

import plotly.graph_objects as go
from plotly.subplots import make_subplots

from headscan.report.chart_style import FAINT, INK, KIND_COLOURS, LEGEND_ABOVE, shortened, styled, whiskers
from headscan.report.share_chart import ChartPanel, Line, Mark, share_chart
from headscan.store.records import ArmKind
from headscan.store.verdict_limits import MARGIN
from headscan.text_tables import percent
from headscan.verdicts.arm_verdict import ArmVerdict
from headscan.verdicts.curves import Curve
from headscan.verdicts.judge import Verdict
from headscan.verdicts.scope_verdicts import RecallVerdict


def arms_figure(verdict: Verdict) -> go.Figure:
    """Draw each arm's difference with its 95 % interval, in percentage points; random controls are pale."""
    arms = verdict.arms
    rows = {arm.name: len(arms) - 1 - i for i, arm in enumerate(arms)}
    figure = go.Figure()
    for kind, members in _by_kind(arms):
        figure.add_trace(
            go.Scatter(
                x=[arm.paired.difference for arm in members],
                y=[rows[arm.name] for arm in members],
                error_x=whiskers([arm.paired.interval for arm in members]),
                mode="markers",
                name=escape(kind.label),
                marker={"color": KIND_COLOURS[kind], "size": 9},
                hovertext=[_arm_text(arm) for arm in members],
                hoverinfo="text",
            )
        )
    _reference_lines(figure.add_vline, "x", arms)
    labels = [
        shortened(name) + ("" if share is None else f"  ({percent(share)})")
        for name, share in ((each.name, each.arm.ablated_share) for each in arms)
    ]
    figure.update_yaxes(
        tickvals=[rows[arm.name] for arm in arms],
        ticktext=labels,
        range=[-0.7, len(arms) - 0.3],
        showgrid=False,
        zeroline=False,
        automargin=True,
    )
    figure.update_xaxes(title_text="difference to the baseline, percentage points", zeroline=False)
    return styled(figure, 940, 140 + 26 * len(arms)).update_layout(legend=LEGEND_ABOVE)


def share_figure(verdict: Verdict) -> go.Figure:
    """Draw the difference over the measured share of ablated heads. Arms without a share are left out."""
    lines = [
        Line(
            kind.label,
            KIND_COLOURS[kind],
            joined=False,
            marks=tuple(
                Mark(each.arm.ablated_share or 0.0, each.paired.interval, _arm_text(each), "circle") for each in members
            ),
        )
        for kind, members in _by_kind([each for each in verdict.arms if each.arm.ablated_share is not None])
    ]
    figure = share_chart([ChartPanel("heads ablated, %", "difference to the baseline, percentage points", lines)])
    _reference_lines(figure.add_hline, "y", verdict.arms)
    return figure.update_yaxes(zeroline=False).update_layout(width=940, height=420)


def _by_kind(arms: Sequence[ArmVerdict]) -> list[tuple[ArmKind, list[ArmVerdict]]]:
    kinds = list(dict.fromkeys(arm.kind for arm in arms))
    return [(kind, [arm for arm in arms if arm.kind == kind]) for kind in kinds]


def _arm_text(verdict: ArmVerdict) -> str:
    p, ablated = verdict.paired, verdict.arm.ablated_share
    share = "" if ablated is None else f"<br>{percent(ablated)} of heads ablated"
    return (
        f"{escape(verdict.name)}{share}<br>{p.arm:.2f} % (baseline {p.baseline:.2f} %)"
        f"<br>{p.interval.words(unit=' points')}"
    )


def _reference_lines(add_line: Any, axis: str, arms: Sequence[ArmVerdict]) -> None:
    baseline = f"baseline {arms[0].paired.baseline:.1f} %" if arms else "baseline"
    # The legend is above the plot, so the label is inside.
    place = "bottom right" if axis == "x" else "top right"
    font = {"size": 11, "color": FAINT}
    add_line(**{axis: 0.0}, line={"color": INK, "width": 1.5}, annotation_text=baseline, annotation_font=font,
             annotation_position=place)  # fmt: skip
    add_line(**{axis: -MARGIN}, line={"color": FAINT, "width": 1, "dash": "dash"})


#: Arms that lose more points in the benchmark lie at the edge of the frame.
FRAME = 10.0


class _Frame(NamedTuple):
    """Ends of the axes of a panel, in percentage points."""

    left: float
    right: float
    bottom: float
    top: float


def recall_figure(verdict: Verdict) -> go.Figure | None:
    """Draw recall over benchmark differences, in percentage points, in a panel for each family that the baseline
    solves; None without such a family.
    """
    families = list(dict.fromkeys(recall.family for arm in verdict.arms for recall in arm.judged_recall))
    if not families:
        return None
    rows, columns = math.ceil(len(families) / 2), min(len(families), 2)
    figure = make_subplots(rows, columns, horizontal_spacing=0.09)
    for place, family in enumerate(families):
        cell = {"row": 1 + place // 2, "col": 1 + place % 2}
        answered = [(arm, recall) for arm in verdict.arms for recall in arm.judged_recall if recall.family == family]
        frame = _frame(answered)
        for kind in dict.fromkeys(arm.kind for arm in verdict.arms):
            members = [(arm, recall) for arm, recall in answered if arm.kind == kind]
            figure.add_trace(_recall_points(kind, members, frame, in_legend=place == 0), **cell)
        for level, dash in ((0.0, "solid"), (-MARGIN, "dash")):
            line = {"color": FAINT, "width": 1, "dash": dash}
            figure.add_vline(x=level, line=line, **cell)
            figure.add_hline(y=level, line=line, **cell)
        x, y = [frame.left, frame.right], [frame.bottom, frame.top]
        figure.update_xaxes(title_text="benchmark, points", zeroline=False, range=x, **cell)
        figure.update_yaxes(title_text=f"{escape(family)}, points", zeroline=False, range=y, **cell)
    return styled(figure, 120 + 440 * columns, 80 + 350 * rows).update_layout(legend=LEGEND_ABOVE, margin_r=40)


def _frame(arms: Sequence[tuple[ArmVerdict, RecallVerdict]]) -> _Frame:
    """Return the frame of the arms that lose at most `FRAME` points; of all arms if none does."""
    near = [pair for pair in arms if pair[0].paired.difference >= -FRAME] or list(arms)
    losses = [recall.paired.difference for _, recall in near]
    room = 0.06 * (max(losses) - min(losses) + MARGIN)
    highest = max(1.0, *(arm.paired.difference for arm, _ in near))
    lowest = min(-MARGIN, *(arm.paired.difference for arm, _ in near))
    if len(near) < len(arms):
        lowest = -FRAME
    return _Frame(lowest - 0.4, highest + 0.4, min(*losses, -MARGIN) - room, max(*losses, 0.0) + room)


def _recall_points(
    kind: ArmKind, members: list[tuple[ArmVerdict, RecallVerdict]], frame: _Frame, in_legend: bool
) -> go.Scatter:
    """Draw the arms of a kind; those outside the frame are at its edge."""
    x = [arm.paired.difference for arm, _ in members]
    y = [recall.paired.difference for _, recall in members]
    return go.Scatter(
        x=[max(value, frame.left) for value in x],
        y=[max(value, frame.bottom) for value in y],
        customdata=[[a, b] for a, b in zip(x, y, strict=True)],
        mode="markers",
        name=escape(kind.label),
        legendgroup=kind,
        showlegend=in_legend,
        cliponaxis=False,
        marker={
            "color": KIND_COLOURS[kind],
            "size": 8,
            "opacity": 0.8,
            "symbol": [
                "triangle-left" if a < frame.left else "triangle-down" if b < frame.bottom else "circle"
                for a, b in zip(x, y, strict=True)
            ],
        },
        hovertext=[_hover_text(arm, recall) for arm, recall in members],
        hoverinfo="text",
    )


def _hover_text(arm: ArmVerdict, recall: RecallVerdict) -> str:
    p, r = arm.paired, recall.paired
    return (
        f"{escape(arm.name)}<br>benchmark {p.interval.words(unit=' points')}"
        f"<br>{escape(recall.family)} {r.interval.words(unit=' points')},"
        f" {r.arm:.1f} % of {r.questions}, {recall.share_words()} of the ability left"
    )


_PAPER, _SAFE = "#8fb3d9", "#1f5fa8"


def shares_figure(curves: Sequence[Curve]) -> go.Figure:
    """Draw two shares of each curve as bars, for curves of one kind and its random controls in the order of the
    rows: the share at which accuracy last falls one point below the baseline (arXiv 2504.03889), and the largest
    tested share that is safe together with every smaller tested one.
    """
    figure = go.Figure()
    figure.add_trace(
        _bars(curves, "accuracy within one point", _PAPER, lambda c: c.share_within_point, within_point_text)
    )
    figure.add_trace(
        _bars(curves, "safe: this tested share and all smaller ones", _SAFE, lambda c: c.safe_share or 0.0, safe_text)
    )
    figure.update_xaxes(title_text="heads ablated, %", rangemode="tozero", zeroline=False)
    figure.update_yaxes(autorange="reversed", showgrid=False, zeroline=False, automargin=True, ticksuffix=" ")
    # Plotly puts the first trace of a group at the far end of the reversed axis; the legend reads in the bars' order.
    figure.update_layout(barmode="group", bargap=0.3, bargroupgap=0.05)
    return styled(figure, 940, 130 + 34 * len(curves)).update_layout(legend=LEGEND_ABOVE)


def within_point_text(curve: Curve) -> str:
    """Return the share within one point in percent, by the rule of the paper."""
    return _share_text(curve, curve.share_within_point)


def safe_text(curve: Curve) -> str:
    """Return the safe share in percent, or why it is missing."""
    if curve.safe_share is None:
        return "too few questions or correct answers"
    text = _share_text(curve, curve.safe_share)
    return f"{text}, then recall is lost" if curve.stopped_by_recall else text


def _share_text(curve: Curve, share: float) -> str:
    """Return a share in percent, with ``≥`` for the largest tested."""
    return f"{'≥ ' if 0 < share >= curve.reach else ''}{percent(share)}"


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
