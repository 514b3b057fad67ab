"""Charts of a measure over the share of heads, or of the KV cache: sweeps, plans, pruned models, criteria and sites."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from html import escape
from typing import Literal, NamedTuple

import plotly.graph_objects as go
from plotly.subplots import make_subplots

from headscan.catalog import RANDOM
from headscan.report.chart_style import FAINT, INK, LEGEND_ABOVE, styled, whiskers
from headscan.store.records import ArmKind
from headscan.store.tables import ACCURACY, LOSS
from headscan.store.verdict_limits import MARGIN, MIN_RETAINED
from headscan.text_tables import percent
from headscan.verdicts.arm_verdict import ArmVerdict
from headscan.verdicts.controls import loss_increase
from headscan.verdicts.criterion_points import ALL_SITES, SitePoint, by_curve
from headscan.verdicts.curves import Curve, SweepPoint
from headscan.verdicts.metrics import METRICS
from headscan.verdicts.paired import Interval

#: Colour-blind safe (Okabe and Ito); further lines repeat them with other markers.
_COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9")
_SYMBOLS = ("circle", "square", "triangle-up", "star")

#: Colours of the scores with the largest safe shares. The others are pale lines with their name on hover.
BEST_COLOURS = _COLOURS[:4]

_PALE = "#c9ced6"

#: Legend rank of the pale lines: after all others, whose rank is 1000.
_LAST = 1001


class Mark(NamedTuple):
    """A point of a line; ``share`` is 0 to 1, and ``hover`` is escaped."""

    share: float
    value: Interval
    hover: str
    symbol: str


@dataclass(frozen=True)
class Line:
    """A line of a panel. Lines of one ``name``, which is not escaped, stand once in the legend; without ``joined``
    points are drawn alone.
    """

    name: str
    colour: str
    dash: str = "solid"
    symbol: str = "circle"
    width: float = 2.0
    interval: Literal["whiskers", "band", "none"] = "whiskers"
    joined: bool = True
    rank: int = 1000
    marks: tuple[Mark, ...] = ()

    def traces(self, in_legend: bool) -> list[go.Scatter]:
        """Return the line, after its band if it has one."""
        x, y = [100 * mark.share for mark in self.marks], [mark.value.value for mark in self.marks]
        line = go.Scatter(
            x=x,
            y=y,
            error_y=whiskers([mark.value for mark in self.marks]) if self.interval == "whiskers" else None,
            mode="lines+markers" if self.joined else "markers",
            name=escape(self.name),
            legendgroup=escape(self.name),
            legendrank=self.rank,
            showlegend=in_legend,
            hovertext=[mark.hover for mark in self.marks],
            hoverinfo="text",
            line={"color": self.colour, "width": self.width, "dash": self.dash},
            marker={
                "color": self.colour,
                "size": 3.5 * self.width if self.joined else 5,
                "symbol": [mark.symbol for mark in self.marks],
            },
        )
        if self.interval != "band":
            return [line]
        # The band is another trace; tables of the figure read the ends of the intervals here.
        line.customdata = [[100 * mark.share, mark.value.value, mark.value.low, mark.value.high] for mark in self.marks]
        ends = [*(mark.value.high for mark in self.marks), *(mark.value.low for mark in reversed(self.marks))]
        band = go.Scatter(
            x=[*x, *reversed(x)],
            y=ends,
            mode="lines",
            fill="toself",
            fillcolor=_transparent(self.colour),
            line={"width": 0},
            hoverinfo="skip",
            showlegend=False,
            legendgroup=escape(self.name),
        )
        return [band, line]


def _transparent(colour: str) -> str:
    red, green, blue = (int(colour[i : i + 2], 16) for i in (1, 3, 5))
    return f"rgba({red},{green},{blue},0.13)"


class ChartPanel(NamedTuple):
    """A panel with the titles of its axes, its lines in the order of drawing, and a limit as a dashed line."""

    across: str
    title: str
    lines: Sequence[Line]
    limit: float | None = None


def share_chart(panels: Sequence[ChartPanel]) -> go.Figure:
    """Draw panels side by side; more than three form rows of two."""
    columns = len(panels) if len(panels) < 4 else 2
    rows = math.ceil(len(panels) / columns)
    figure = make_subplots(rows, columns, horizontal_spacing=0.09, vertical_spacing=0.16)
    named: set[str] = set()
    for place, panel in enumerate(panels):
        cell = {"row": 1 + place // columns, "col": 1 + place % columns}
        for line in panel.lines:
            for trace in line.traces(line.name not in named):
                figure.add_trace(trace, **cell)
            named.add(line.name)
        if panel.limit is not None:
            figure.add_hline(y=panel.limit, line={"color": FAINT, "width": 1, "dash": "dash"}, **cell)
        figure.update_xaxes(title_text=escape(panel.across), rangemode="tozero", zeroline=False, **cell)
        figure.update_yaxes(title_text=escape(panel.title), **cell)
    width = 40 + (340 if rows == 1 else 480) * columns
    return styled(figure, max(560, width), 90 + 350 * rows).update_layout(legend=LEGEND_ABOVE, margin_r=40, margin_t=80)


@dataclass(frozen=True)
class ArmPoint:
    """An arm at a share of removed heads, or of the KV cache that is left, 0 to 1, with the removed ``(layer, head)``;
    ``selection`` is the unit and repair of a pruned model.
    """

    verdict: ArmVerdict
    method: str
    share: float
    removed: Collection[tuple[int, int]] = ()
    selection: str = ""


def cache_figure(points: Sequence[ArmPoint], tokens: int) -> go.Figure:
    """Draw the costs of plans over the share of the cache that is left, by method and mode; random ones are pale
    points.
    """
    members: dict[tuple[bool, str, str], list[ArmPoint]] = defaultdict(list)
    for point in points:
        method = "random" if point.verdict.kind.is_random else point.method
        members[point.verdict.kind.is_random, method, point.verdict.arm.selection or ""].append(point)
    methods = sorted({method for is_random, method, _ in members if not is_random})
    lines = {}
    for is_random, method, mode in sorted(members):
        colour = FAINT if is_random else _COLOURS[methods.index(method) % len(_COLOURS)]
        decode = mode == "decode"
        line = Line(
            f"{method}, {mode}", colour, "dot" if decode else "solid", "x" if decode else "circle", joined=not is_random
        )
        lines[line] = members[is_random, method, mode]
    panels = _arm_panels(lines, f"KV cache left at {tokens:,} tokens, %", "of the KV cache", start=False)
    return share_chart(panels).update_xaxes(rangemode="normal")


def pruning_figure(points: Sequence[ArmPoint]) -> go.Figure:
    """Draw the costs of pruned models or masks over the share of removed heads, by method; another unit or repair is
    another line. Controls have broken lines; the seeds of random heads are points.
    """
    differ = len({point.selection for point in points}) > 1
    members: dict[str, list[ArmPoint]] = defaultdict(list)
    for point in sorted(points, key=lambda point: point.verdict.kind.is_control):
        members[f"{_curve_name(point)}, {point.selection}" if differ else _curve_name(point)].append(point)
    lines = {}
    for place, (name, own) in enumerate(members.items()):  # the controls are last
        kind = own[0].verdict.kind
        if kind.is_control:
            line = Line(name, FAINT if kind.is_random else INK, "dash", "diamond", joined=not kind.is_random)
        else:
            line = Line(name, _COLOURS[place % len(_COLOURS)], symbol=_symbol(place))
        lines[line] = own
    return share_chart(_arm_panels(lines, "heads removed, %", "of heads removed", start=True))


def _curve_name(point: ArmPoint) -> str:
    if point.verdict.kind is ArmKind.LAYERS_DROPPED:
        return "whole attention layers dropped (control)"
    return "random heads (control)" if point.verdict.kind.is_random else point.method


def _symbol(place: int) -> str:
    return _SYMBOLS[place // len(_COLOURS) % len(_SYMBOLS)]


def _arm_panels(lines: Mapping[Line, Sequence[ArmPoint]], across: str, what: str, *, start: bool) -> list[ChartPanel]:
    """Return a panel for each measure that an arm has: loss, accuracy, and families of recall that the baseline solves.
    ``across`` is the title of the axis; ``what`` follows the share in the label of a point. ``start`` begins joined
    lines at the baseline, with the share 0.
    """
    arms = [point.verdict for members in lines.values() for point in members]
    units = {increase.unit for arm in arms if (increase := loss_increase(arm.metrics)) is not None}
    measures = [
        (LOSS, f"loss increase, {' or '.join(sorted(units))}", 0.0, None),
        (ACCURACY, "accuracy, points to the baseline", 0.0, -MARGIN),
        *(
            (family, f"{family} left, %", 100.0, MIN_RETAINED)
            for family in dict.fromkeys(recall.family for arm in arms for recall in arm.judged_recall)
        ),
    ]
    panels = []
    for measure, title, baseline, limit in measures:
        drawn = []
        for line, members in lines.items():
            marks = [
                Mark(point.share, value, _hover(point, what, value), line.symbol)
                for point in sorted(members, key=lambda point: point.share)
                if (value := point.verdict.value(measure)) is not None
            ]
            if start and line.joined:
                marks.insert(0, Mark(0.0, Interval(baseline, baseline, baseline), "baseline", line.symbol))
            drawn.append(replace(line, marks=tuple(marks)))
        if any(arm.value(measure) is not None for arm in arms):
            panels.append(ChartPanel(across, title, drawn, limit))
    return panels


def _hover(point: ArmPoint, what: str, value: Interval) -> str:
    ends = f" [{value.low:+.4g}, {value.high:+.4g}]" if value.known else ""
    return f"{escape(point.verdict.name)}<br>{percent(point.share)} {what}<br>{value.value:+.4g}{ends}"


def site_figure(points: Sequence[SitePoint]) -> go.Figure:
    """Draw one metric of labelled examples, with the 95 % interval of its change, over the share of removed heads by
    criterion, a panel for each site.
    """
    title, scale, digits, _ = METRICS[points[0].metric]
    names = list(dict.fromkeys(point.criterion for point in points if point.criterion != RANDOM))
    panels = []
    for site in dict.fromkeys(point.site for point in points):
        lines = []
        for (criterion, _), members in by_curve([point for point in points if point.site == site]).items():
            if criterion == RANDOM:
                line = Line("random heads", FAINT, "dash", width=1.5)
            else:
                place = names.index(criterion)
                line = Line(criterion, _COLOURS[place % len(_COLOURS)], symbol=_symbol(place))
            baseline = scale * members[0].effect.baseline
            marks = [Mark(0.0, Interval(baseline, baseline, baseline), "without ablation", line.symbol)]
            for point in members:
                value = point.effect.interval.scaled(scale, baseline)
                heads = f"{percent(point.share)} of heads, {len(point.heads)}"
                text = f"{escape(line.name)}<br>{heads}<br>{value.value:.{digits}f}"
                marks.append(Mark(point.share, value, text, line.symbol))
            lines.append(replace(line, marks=tuple(marks)))
        where = "all sites" if site == ALL_SITES else f"{site} attention"
        panels.append(ChartPanel(f"heads of {where} removed, %", title, lines))
    return share_chart(panels)


def curves_figure(curves: Sequence[Curve]) -> go.Figure:
    """Draw accuracy over the measured share of ablated heads, in percent, of curves of one kind and its random
    controls, the best first. The first four scores have colours, bands for the 95 % interval of the difference to the
    baseline, and a place in the legend, like the random controls. Points that lose recall are crosses.
    """
    scored = [curve for curve in curves if not curve.is_random]
    # Pale lines first, because later traces are drawn on top.
    lines = [
        Line("other scores", _PALE, width=1.5, interval="none", rank=_LAST, marks=_sweep_marks(curve))
        for curve in scored[len(BEST_COLOURS) :]
    ]
    for colour, curve in [*zip(BEST_COLOURS, scored, strict=False), *((INK, c) for c in curves if c.is_random)]:
        dash = "dot" if curve.is_random else "solid"
        lines.append(Line(curve.name, colour, dash, width=2.5, interval="band", marks=_sweep_marks(curve)))
    figure = share_chart([ChartPanel("ablated heads (measured), %", "accuracy, %", lines)])
    baseline = 100 * curves[0].points[0].baseline
    line = {"color": FAINT, "width": 1}
    figure.add_hline(y=baseline, line=line, name=f"baseline, {baseline:.1f} %", showlegend=True)
    below = line | {"dash": "dash"}
    figure.add_hline(y=baseline - MARGIN, line=below, name=f"{MARGIN:g} point below", showlegend=True)
    return figure.update_layout(
        width=1000, height=480, legend={"orientation": "v", "x": 1.02, "y": 1, "yanchor": "top"}, margin_r=230
    )


def _sweep_marks(curve: Curve) -> tuple[Mark, ...]:
    """Return the points of a curve. The interval is of the difference, so the baseline adds no error of its own."""
    return tuple(
        Mark(
            point.ablated_share,
            Interval(100 * (point.baseline + point.low), 100 * point.accuracy, 100 * (point.baseline + point.high)),
            point_text(curve, point),
            "x" if point.recall_lost else "circle",
        )
        for point in curve.points
    )


def point_text(curve: Curve, point: SweepPoint) -> str:
    """Return the hover text of a point of a sweep."""
    if not point.arms:
        return f"baseline<br>{100 * point.accuracy:.2f} % of {point.questions:,} questions"
    difference = Interval(point.low, point.difference, point.high).scaled(100)
    text = (
        f"{escape(curve.name)}, {curve.kind.label} of {point.share:.3g}"
        f"<br>{percent(point.ablated_share)} of heads ablated<br>{100 * point.accuracy:.2f} % correct,"
        f" {difference.words(unit=' points')}"
    )
    if point.arms > 1:
        text += f"<br>mean of {point.arms} seeds, {100 * point.lowest:+.2f} to {100 * point.highest:+.2f}"
    if point.recall_lost:
        text += "<br>loses recall"
    return text
