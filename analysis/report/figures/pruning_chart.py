"""Charts of pruned models: losses over the share of removed heads, and a map of these heads."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from typing import Any, NamedTuple

import numpy as np
import plotly.graph_objects as go
from plotly.subplots import make_subplots

from headscan.analysis.arm_kinds import ArmKind
from headscan.analysis.report.figures.curve_chart import BEST_COLOURS
from headscan.analysis.report.figures.style import FAINT, INK, LEGEND_ABOVE, grid_figure, layer_heatmap, styled
from headscan.analysis.verdict_limits import LEAST_RETAINED, MARGIN
from headscan.analysis.verdicts.controls import loss_increase
from headscan.analysis.verdicts.judge import ArmOutcome, ArmVerdict


@dataclass(frozen=True)
class PrunedPoint:
    """One pruned model.

    Attributes:
        arm: Its verdict.
        method: Method that chose the heads.
        share: Share of the heads that are removed, 0 to 1.
        removed: ``(layer, head)`` of the removed heads.
        selection: Unit and repair.
    """

    arm: ArmOutcome
    method: str
    share: float
    removed: tuple[tuple[int, int], ...]
    selection: str = ""


class _Value(NamedTuple):
    """A difference with its 95 % interval."""

    value: float
    low: float
    high: float


class _Panel(NamedTuple):
    """A panel: title, value of an arm, value of the baseline, and the limit of a removable arm; None without one."""

    title: str
    value: Callable[[ArmOutcome], _Value | None]
    baseline: float
    limit: float | None


def pruning_figure(points: Sequence[PrunedPoint]) -> go.Figure:
    """Draw loss increase, accuracy and recall over the share of removed heads, by method.

    Whiskers are 95 % intervals; controls have broken lines.
    """
    panels = [panel for panel in _panels(points) if any(panel.value(point.arm) for point in points)]
    columns = len(panels) if len(panels) < 4 else 2  # more than three do not fit next to each other
    rows = math.ceil(len(panels) / columns)
    figure = make_subplots(rows, columns, horizontal_spacing=0.09, vertical_spacing=0.14)
    curves = _curves(points)
    colours = _colours(curves)
    for place, panel in enumerate(panels):
        cell = {"row": 1 + place // columns, "col": 1 + place % columns}
        for name, members in curves.items():
            figure.add_trace(_trace(name, members, panel, colours[name]).update(showlegend=place == 0), **cell)
        if panel.limit is not None:
            figure.add_hline(y=panel.limit, line={"color": FAINT, "width": 1, "dash": "dash"}, **cell)
        figure.update_yaxes(title_text=escape(panel.title), **cell)
    figure.update_xaxes(title_text="heads removed, %", rangemode="tozero", zeroline=False)
    width = 40 + (340 if rows == 1 else 480) * columns
    return styled(figure, max(520, width), 80 + 350 * rows).update_layout(legend=LEGEND_ABOVE, margin_r=40, margin_t=70)


def _panels(points: Sequence[PrunedPoint]) -> list[_Panel]:
    units = {increase.unit for point in points if (increase := loss_increase(point.arm.measures)) is not None}
    found = [_Panel(f"loss increase, {' or '.join(sorted(units))}", _loss, 0.0, None)]
    found.append(_Panel("accuracy, points to the baseline", _accuracy, 0.0, -MARGIN))
    for family in dict.fromkeys(recall.family for point in points for recall in point.arm.recall):
        found.append(_Panel(f"{family} left, %", _recall_of(family), 100.0, LEAST_RETAINED))
    return found


def _loss(arm: ArmOutcome) -> _Value | None:
    found = loss_increase(arm.measures)
    return None if found is None else _Value(found.difference, found.low, found.high)


def _accuracy(arm: ArmOutcome) -> _Value | None:
    return _Value(arm.paired.difference, arm.paired.low, arm.paired.high) if isinstance(arm, ArmVerdict) else None


def _recall_of(family: str) -> Callable[[ArmOutcome], _Value | None]:
    def value(arm: ArmOutcome) -> _Value | None:
        for each in arm.recall:
            kept = each.paired.retained
            if each.family == family and each.informative and kept is not None:
                return _Value(kept.share, kept.low, kept.high)
        return None

    return value


def _curves(points: Sequence[PrunedPoint]) -> Mapping[str, list[PrunedPoint]]:
    """Return the points by name of their curve, controls last, by growing share.

    Models of another unit or repair have curves of their own.
    """
    found: dict[str, list[PrunedPoint]] = defaultdict(list)
    differ = len({point.selection for point in points}) > 1
    for point in sorted(points, key=lambda point: (point.arm.is_control, point.share)):
        found[f"{_name(point)}, {point.selection}" if differ else _name(point)].append(point)
    return found


def _name(point: PrunedPoint) -> str:
    if point.arm.kind is ArmKind.LAYERS_DROPPED:
        return "whole attention layers dropped (control)"
    return "random heads (control)" if point.arm.is_random else point.method


def _trace(name: str, members: Sequence[PrunedPoint], panel: _Panel, colour: str) -> go.Scatter:
    measured = [(point, value) for point in members if (value := panel.value(point.arm)) is not None]
    control = members[0].arm.is_control
    # Only curves of chosen heads begin at the baseline; the seeds of random heads are points.
    start = [] if members[0].arm.is_random else [(0.0, panel.baseline, 0.0, 0.0, "baseline")]
    rows = start + [
        (100 * point.share, value.value, value.high - value.value, value.value - value.low, _hover(point, value))
        for point, value in measured
    ]
    x, y, above, below, hover = zip(*rows, strict=True) if rows else ((),) * 5
    return go.Scatter(
        x=x,
        y=y,
        error_y={"type": "data", "symmetric": False, "array": above, "arrayminus": below, "thickness": 1.2, "width": 3},
        mode="markers" if members[0].arm.is_random else "lines+markers",
        name=escape(name),
        legendgroup=escape(name),
        hovertext=hover,
        hoverinfo="text",
        line={"color": colour, "width": 2, "dash": "dash" if control else "solid"},
        marker={"color": colour, "size": 7, "symbol": "diamond" if control else "circle"},
    )


def _colours(curves: Mapping[str, Sequence[PrunedPoint]]) -> dict[str, str]:
    """Return the colour of each curve: one for each method, and dark or pale ones for controls."""
    found, methods = {}, 0
    for name, members in curves.items():
        if members[0].arm.is_control:
            found[name] = FAINT if members[0].arm.is_random else INK
        else:
            found[name] = BEST_COLOURS[methods % len(BEST_COLOURS)]
            methods += 1
    return found


def _hover(point: PrunedPoint, value: _Value) -> str:
    return (
        f"{escape(point.arm.name)}<br>{point.share:.1%} of heads removed"
        f"<br>{value.value:+.4g} [{value.low:+.4g}, {value.high:+.4g}]"
    )


def removed_map(points: Sequence[PrunedPoint], heads_of: Mapping[int, int], title: str) -> go.Figure:
    """Draw the smallest share of removed heads at which each head goes, in percent.

    Args:
        points: Models of one method, unit and repair.
        heads_of: Query heads by layer.
    """
    layers, width = sorted(heads_of), max(heads_of.values())
    shares = sorted({round(point.share, 4) for point in points})
    values = np.full((len(layers), width), np.nan)
    hover = np.full((len(layers), width), "", dtype=object)
    for row, layer in enumerate(layers):
        for head in range(heads_of[layer]):
            gone = [round(point.share, 4) for point in points if (layer, head) in point.removed]
            values[row, head] = shares.index(min(gone)) if gone else len(shares)
            when = f"removed from {min(gone):.1%}" if gone else "stays"
            hover[row, head] = f"layer {layer}, head {head}<br>{when}"
    colours = [*_shades(len(shares)), "#eceef1"]
    steps = [[(i + d) / len(colours), colour] for i, colour in enumerate(colours) for d in (0, 1)]
    heatmap = layer_heatmap(
        values, hover, layers, zmin=-0.5, zmax=len(colours) - 0.5, colorscale=steps, showscale=False
    )
    figure = grid_figure(heatmap, len(layers), width, title, "query head")
    for name, colour in zip([*(f"removed from {share:.1%}" for share in shares), "stays"], colours, strict=True):
        # A heatmap has no legend, so traces without points show the colours.
        marker: dict[str, Any] = {"symbol": "square", "size": 12, "color": colour}
        figure.add_trace(go.Scatter(x=[None], y=[None], mode="markers", name=name, marker=marker))
    return figure.update_layout(showlegend=True, legend={"x": 1.02, "y": 1, "xanchor": "left"}, margin_r=190)


def _shades(count: int) -> list[str]:
    """Return reds from dark to pale."""
    dark, pale = np.array([139, 26, 26]), np.array([240, 180, 92])
    parts = np.linspace(0, 1, count) if count > 1 else [0.0]
    return ["#" + "".join(f"{round(c):02x}" for c in dark + part * (pale - dark)) for part in parts]
