"""Charts of arms compared with their baseline, in the benchmark and in recall."""

from __future__ import annotations

import math
from collections.abc import Sequence
from html import escape
from typing import Any, NamedTuple

import plotly.graph_objects as go
from plotly.subplots import make_subplots

from headscan.analysis.arm_kinds import ArmKind
from headscan.analysis.report.figures.style import FAINT, INK, KIND_COLOURS, LEGEND_ABOVE, shortened, styled
from headscan.analysis.verdict_limits import MARGIN
from headscan.analysis.verdicts.arm_recall import RecallVerdict
from headscan.analysis.verdicts.judge import ArmVerdict, Verdict


def arms_figure(verdict: Verdict) -> go.Figure:
    """Draw the difference of each arm with its 95 % interval.

    The unit is percentage points; random controls are pale.
    """
    arms = verdict.arms
    rows = {arm.name: len(arms) - 1 - i for i, arm in enumerate(arms)}
    figure = go.Figure()
    for kind, members in _by_kind(arms):
        figure.add_trace(
            go.Scatter(
                x=[arm.paired.difference for arm in members],
                y=[rows[arm.name] for arm in members],
                error_x=_whiskers(members),
                **_points(kind, members),
            )
        )
    _reference_lines(figure.add_vline, "x", arms)
    labels = [shortened(arm.name) + ("" if arm.zeroed_share is None else f"  ({arm.zeroed_share:.1%})") for arm in arms]
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
    """Draw the difference over the measured share of ablated heads.

    Arms without a share are left out.
    """
    figure = go.Figure()
    for kind, members in _by_kind([arm for arm in verdict.arms if arm.zeroed_share is not None]):
        figure.add_trace(
            go.Scatter(
                x=[100 * (arm.zeroed_share or 0.0) for arm in members],
                y=[arm.paired.difference for arm in members],
                error_y=_whiskers(members),
                **_points(kind, members),
            )
        )
    _reference_lines(figure.add_hline, "y", verdict.arms)
    figure.update_xaxes(title_text="heads ablated, %", rangemode="tozero", zeroline=False)
    figure.update_yaxes(title_text="difference to the baseline, percentage points", zeroline=False)
    return styled(figure, 940, 420).update_layout(legend=LEGEND_ABOVE)


def _by_kind(arms: Sequence[ArmVerdict]) -> list[tuple[ArmKind, list[ArmVerdict]]]:
    kinds = list(dict.fromkeys(arm.kind for arm in arms))
    return [(kind, [arm for arm in arms if arm.kind == kind]) for kind in kinds]


def _whiskers(arms: Sequence[ArmVerdict]) -> dict[str, Any]:
    return {
        "type": "data",
        "symmetric": False,
        "array": [arm.paired.high - arm.paired.difference for arm in arms],
        "arrayminus": [arm.paired.difference - arm.paired.low for arm in arms],
        "thickness": 1.5,
        "width": 4,
    }


def _points(kind: ArmKind, arms: Sequence[ArmVerdict]) -> dict[str, Any]:
    return {
        "mode": "markers",
        "name": escape(kind.label),
        "marker": {"color": KIND_COLOURS.get(kind, INK), "size": 9},
        "hovertext": [_arm_text(arm) for arm in arms],
        "hoverinfo": "text",
    }


def _arm_text(arm: ArmVerdict) -> str:
    p = arm.paired
    share = "" if arm.zeroed_share is None else f"<br>{arm.zeroed_share:.1%} of heads ablated"
    return (
        f"{escape(arm.name)}{share}<br>{p.arm:.2f} % (baseline {p.baseline:.2f} %)"
        f"<br>{p.difference:+.2f} points [{p.low:+.2f}, {p.high:+.2f}]"
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
    """Draw recall differences over benchmark differences, in percentage points.

    Each family is a panel and each arm a point. The result is None without recall answers.
    """
    families = list(dict.fromkeys(recall.family for arm in verdict.arms for recall in arm.recall))
    if not families:
        return None
    rows, columns = math.ceil(len(families) / 2), min(len(families), 2)
    figure = make_subplots(rows, columns, horizontal_spacing=0.09)
    for place, family in enumerate(families):
        cell = {"row": 1 + place // 2, "col": 1 + place % 2}
        answered = [(arm, recall) for arm in verdict.arms for recall in arm.recall if recall.family == family]
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
            "color": KIND_COLOURS.get(kind, INK),
            "size": 8,
            "opacity": 0.8,
            "symbol": [
                "triangle-left" if a < frame.left else "triangle-down" if b < frame.bottom else "circle"
                for a, b in zip(x, y, strict=True)
            ],
        },
        hovertext=[_text(arm, recall) for arm, recall in members],
        hoverinfo="text",
    )


def _text(arm: ArmVerdict, recall: RecallVerdict) -> str:
    p, r = arm.paired, recall.paired
    return (
        f"{escape(arm.name)}<br>benchmark {p.difference:+.2f} points [{p.low:+.2f}, {p.high:+.2f}]"
        f"<br>{escape(recall.family)} {r.difference:+.2f} points [{r.low:+.2f}, {r.high:+.2f}],"
        f" {r.arm:.1f} % of {r.questions}, {recall.share_left()} of the ability left"
    )
