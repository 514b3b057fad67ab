"""Charts of arms compared with their baseline."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from typing import Any

import plotly.graph_objects as go

from headscan.analysis.arm_kinds import ArmKind
from headscan.analysis.report.figures.style import FAINT, INK, KIND_COLOURS, LEGEND_ABOVE, shortened, styled
from headscan.analysis.verdict_limits import MARGIN
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
