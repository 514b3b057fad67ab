"""Plotly figures of what a store holds. Text from a store is escaped: plotly reads a few HTML tags in labels."""

from __future__ import annotations

import math
from collections.abc import Sequence
from html import escape
from typing import Any, NamedTuple

import numpy as np
import plotly.graph_objects as go
from plotly.subplots import make_subplots

from analysis.head_plan import HeadPlan
from analysis.selection import RankedHead, rank_heads
from analysis.store import Store
from analysis.verdicts import MARGIN, ArmVerdict, Verdict
from headscan.catalog import SCORES

#: Values above this quantile share the last colour: one huge head would leave the others in one shade.
_BRIGHTEST = 0.99

#: Up to this many rows and columns a cell has room for its number.
_MOST_LABELLED = 16

_KIND_COLOURS = {"mask": "#1f5fa8", "rule": "#7b3fa0", "random": "#9a9a9a"}
_CLASS_COLOURS = {"streaming": "#f0b45c", "retrieval": "#1f5fa8", "protected": "#c9ced6"}

#: A legend above the plot, where no point can be.
_ABOVE = {"orientation": "h", "x": 0, "xanchor": "left", "y": 1.0, "yanchor": "bottom", "yref": "paper"}

_INK, _FAINT = "#222222", "#8a8a8a"
_FONT = {"family": "system-ui, 'Segoe UI', 'Liberation Sans', sans-serif", "size": 13, "color": _INK}


class _Size(NamedTuple):
    """Of a heatmap's cells and of the whole figure, in pixels."""

    cell_height: float
    width: float
    height: float


def head_heatmap(store: Store, run_id: str, name: str, *, site: str = "self") -> go.Figure:
    """Mean of a score or statistic per head: layers downward, query heads across, the numbers on hover.

    Normalised scores have a diverging scale around 1 from 0 to 2, whose red end is the inactive one; the others a
    sequential scale from 0 to their 99 % quantile. Layers without attention are left out.

    Raises:
        SelectionError: Unknown name, or nothing was measured.
    """
    ranked = rank_heads(store, run_id, name, site=site)
    layers = sorted({head.layer for head in ranked})
    width = 1 + max(head.head for head in ranked)
    values = np.full((len(layers), width), np.nan)
    hover = np.full((len(layers), width), "", dtype=object)
    row_of = {layer: row for row, layer in enumerate(layers)}
    for head in ranked:
        values[row_of[head.layer], head.head] = head.value
        hover[row_of[head.layer], head.head] = _head_text(name, head)
    score = SCORES.get(name)
    normalised = score is not None and score.normaliser is not None
    finite = values[np.isfinite(values)]
    ticks = [0.0, 0.5, 1.0, 1.5, 2.0] if normalised else _ticks(float(np.quantile(finite, _BRIGHTEST)))
    red_end_low = score is not None and score.inactive == "low"
    heatmap = go.Heatmap(
        z=values,
        x=[str(head) for head in range(width)],
        y=[str(layer) for layer in layers],
        hovertext=hover,
        hoverinfo="text",
        hoverongaps=False,
        zmin=0,
        zmax=ticks[-1],
        colorscale=("RdBu" if red_end_low else "RdBu_r") if normalised else "Viridis",
        colorbar=_colorbar(ticks, above=bool(finite.max() > ticks[-1])),
        **_gaps(len(layers), width),
    )
    if max(len(layers), width) <= _MOST_LABELLED:
        heatmap.update(texttemplate="%{z:.2f}" if finite.max() < 100 else "%{z:.3g}", textfont={"size": 11})
    return _grid_figure(heatmap, len(layers), width, name, "query head")


def profiles_figure(store: Store, run_id: str, *, site: str = "self") -> go.Figure | None:
    """Layers downward: the share of positional heads, and the weight by distance, mean over the layer's heads.

    Of the two what was measured; None where neither was.
    """
    charts = [c for c in (_positional_bars(store, run_id, site), _distance_heatmap(store, run_id, site)) if c]
    if not charts:
        return None
    layers = charts[0].trace.y
    figure = make_subplots(
        cols=len(charts), shared_yaxes=True, column_widths=[c.width for c in charts], horizontal_spacing=0.04
    )
    for column, chart in enumerate(charts, 1):
        figure.add_trace(chart.trace, row=1, col=column)
        figure.update_xaxes(title_text=chart.title, row=1, col=column, **chart.axis)
    cell_height = _size(len(layers), 1).cell_height
    figure.update_yaxes(type="category", categoryorder="array", categoryarray=layers, autorange="reversed")
    figure.update_yaxes(showgrid=False, zeroline=False, dtick=max(1, math.ceil(14 / cell_height)))
    figure.update_yaxes(title_text="layer", row=1, col=1)
    width = sum(chart.width for chart in charts) + 190
    return _styled(figure, width, max(len(layers) * cell_height, 60) + 110)


class _Chart(NamedTuple):
    """One of the charts beside each other: its trace by layer, its width in pixels, its horizontal axis."""

    trace: Any
    width: int
    title: str
    axis: dict[str, Any]


def _positional_bars(store: Store, run_id: str, site: str) -> _Chart | None:
    heads = store.query(
        "SELECT layer, count(DISTINCT head) AS heads FROM head_profiles"
        " WHERE run_id = ? AND site = ? AND profile = 'argmax_offsets' GROUP BY layer ORDER BY layer",
        [run_id, site],
    ).to_pylist()
    if not heads:
        return None
    positional: dict[int, list[str]] = {row["layer"]: [] for row in heads}
    for row in store.query(
        "SELECT layer, head, key_offset, share FROM positional_heads WHERE run_id = ? AND site = ?"
        " ORDER BY layer, head",
        [run_id, site],
    ).to_pylist():
        positional[row["layer"]].append(
            f"head {row['head']}: offset {row['key_offset']} in {row['share']:.0%} of queries"
        )
    trace = go.Bar(
        x=[len(positional[row["layer"]]) / row["heads"] for row in heads],
        y=[str(row["layer"]) for row in heads],
        orientation="h",
        marker={"color": _KIND_COLOURS["mask"]},
        hovertext=[
            "<br>".join(
                [f"layer {row['layer']}: {len(positional[row['layer']])} of {row['heads']}", *positional[row["layer"]]]
            )
            for row in heads
        ],
        hoverinfo="text",
        showlegend=False,
    )
    axis = {"range": [0, 1], "tickvals": [0, 0.5, 1], "tickformat": ".0%", "zeroline": False}
    return _Chart(trace, 220, "positional heads", axis)


def _distance_heatmap(store: Store, run_id: str, site: str) -> _Chart | None:
    rows = store.query(
        "SELECT layer, bin, label, avg(share) AS share FROM head_profiles"
        " WHERE run_id = ? AND site = ? AND profile = 'mass_by_distance'"
        " GROUP BY layer, bin, label ORDER BY layer, bin",
        [run_id, site],
    ).to_pylist()
    if not rows:
        return None
    # No sequence is long enough for the last bins.
    used = 1 + max(row["bin"] for row in rows if row["share"] > 0)
    layers = sorted({row["layer"] for row in rows})
    labels = [row["label"] for row in rows[:used]]
    values = np.array([row["share"] for row in rows]).reshape(len(layers), -1)[:, :used]
    ticks = _ticks(float(values.max()))
    trace = go.Heatmap(
        z=values,
        x=labels,
        y=[str(layer) for layer in layers],
        hovertemplate="layer %{y}, distance %{x}: %{z:.1%}<extra></extra>",
        zmin=0,
        zmax=ticks[-1],
        colorscale="Viridis",
        colorbar=_colorbar(ticks, above=False),
        **_gaps(len(layers), used),
    )
    every = slice(None, None, 1 if used <= 12 else 2)
    axis = {
        "type": "category",
        "tickvals": labels[every],
        "ticktext": [label.partition("-")[0] for label in labels][every],
        "tickangle": 0,
    }
    return _Chart(trace, 530, "weight by distance |q - k|, tokens (from … to the next)", axis)


def plan_heatmap(plan: HeadPlan) -> go.Figure:
    """What a plan does with each KV head: layers downward, KV heads across, the keep-scores on hover."""
    layers = [layer.layer for layer in plan.model.layers]
    width = max(layer.num_key_value_heads for layer in plan.model.layers)
    classes = list(_CLASS_COLOURS)
    values = np.full((len(layers), width), np.nan)
    hover = np.full((len(layers), width), "", dtype=object)
    row_of = {layer: row for row, layer in enumerate(layers)}
    for head in plan.heads:
        values[row_of[head.layer], head.kv_head] = classes.index(head.head_class)
        hover[row_of[head.layer], head.kv_head] = (
            f"layer {head.layer}, KV head {head.kv_head}<br>{head.head_class}: {head.action}"
            + (f" {head.sink} + {head.recent}" if head.action == "window" else "")
            + (f"<br>keep-score {head.score:.3g}" if head.head_class != "protected" else "")
        )
    steps = [(i + d) / len(classes) for i in range(len(classes)) for d in (0, 1)]
    colours = [colour for colour in _CLASS_COLOURS.values() for _ in (0, 1)]
    heatmap = go.Heatmap(
        z=values,
        x=[str(head) for head in range(width)],
        y=[str(layer) for layer in layers],
        hovertext=hover,
        hoverinfo="text",
        hoverongaps=False,
        zmin=-0.5,
        zmax=len(classes) - 0.5,
        colorscale=[list(pair) for pair in zip(steps, colours, strict=True)],
        showscale=False,
        **_gaps(len(layers), width),
    )
    figure = _grid_figure(heatmap, len(layers), width, "plan", "KV head")
    present = {head.head_class for head in plan.heads}
    for name in classes:
        if name in present:
            # A heatmap has no legend: empty points stand for the colours.
            marker = {"symbol": "square", "size": 12, "color": _CLASS_COLOURS[name]}
            figure.add_trace(go.Scatter(x=[None], y=[None], mode="markers", name=name, marker=marker))
    return figure.update_layout(showlegend=True, legend={"x": 1.02, "y": 1, "xanchor": "left"})


def arms_figure(verdict: Verdict) -> go.Figure:
    """Each arm's difference to the baseline in percentage points with its 95 % interval; random controls in grey."""
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
    labels = [
        _shortened(arm.name) + ("" if arm.zeroed_share is None else f"  ({arm.zeroed_share:.1%})") for arm in arms
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
    return _styled(figure, 940, 140 + 26 * len(arms)).update_layout(legend=_ABOVE)


def share_figure(verdict: Verdict) -> go.Figure:
    """Difference to the baseline against the share of heads really silenced; arms that do not know it are left out."""
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
    figure.update_xaxes(title_text="heads silenced, %", rangemode="tozero", zeroline=False)
    figure.update_yaxes(title_text="difference to the baseline, percentage points", zeroline=False)
    return _styled(figure, 940, 420).update_layout(legend=_ABOVE)


def _head_text(name: str, head: RankedHead) -> str:
    text = f"layer {head.layer}, head {head.head} (KV head {head.kv_head})<br>"
    if math.isnan(head.value):
        return f"{text}not measured"
    text += f"{name} {head.value:.4g}"
    if not math.isnan(head.std):
        text += f" ± {head.std:.2g} over sequences"
    if head.inactive_share is not None:
        text += f"<br>inactive in {head.inactive_share:.1%} of sequences"
    return text


def _size(rows: int, columns: int) -> _Size:
    cell_height = min(max(640 / rows, 9), 32)
    cell_width = min(max(880 / columns, 9), 64)
    return _Size(cell_height, max(columns * cell_width, 260) + 190, rows * cell_height + 110)


def _gaps(rows: int, columns: int) -> dict[str, int]:
    gap = 1 if max(rows, columns) <= 40 else 0
    return {"xgap": gap, "ygap": gap}


def _ticks(highest: float) -> list[float]:
    """Three to six round numbers from 0, the last of them at ``highest`` or a little above."""
    if highest <= 0:
        return [0.0, 0.5, 1.0]
    power = 10.0 ** math.floor(math.log10(highest / 3))
    step = power * max(m for m in (1, 2, 2.5, 5) if m * power <= highest / 3)
    return [i * step for i in range(math.ceil(highest / step - 1e-9) + 1)]


def _colorbar(ticks: Sequence[float], above: bool) -> dict[str, Any]:
    text = [f"{tick:.4g}" for tick in ticks]
    if above:
        text[-1] = f"≥ {text[-1]}"
    return {
        "thickness": 14,
        "outlinewidth": 0,
        "tickvals": list(ticks),
        "ticktext": text,
        "x": 1.02,
        "len": 1.0,
        "ypad": 0,
    }


def _grid_figure(heatmap: go.Heatmap, rows: int, columns: int, title: str, across: str) -> go.Figure:
    size = _size(rows, columns)
    figure = go.Figure(heatmap)
    # Categories, so that layers without attention leave no gap; thinned by hand, or plotly turns the labels.
    every = max(1, math.ceil(14 / size.cell_height))
    figure.update_yaxes(type="category", autorange="reversed", title_text="layer", dtick=every)
    figure.update_xaxes(type="category", title_text=across, dtick=max(1, math.ceil(columns / 32)), tickangle=0)
    figure.update_xaxes(showgrid=False, zeroline=False).update_yaxes(showgrid=False, zeroline=False)
    figure.update_layout(title={"text": escape(title), "x": 0, "xanchor": "left", "xref": "paper"})
    return _styled(figure, size.width, size.height)


def _styled(figure: go.Figure, width: float, height: float) -> go.Figure:
    return figure.update_layout(
        template="plotly_white",
        font=_FONT,
        width=round(width),
        height=round(height),
        margin={"l": 60, "r": 110, "t": 50, "b": 55},
        # Beside the title, above the plot: over the plot it would hide heads.
        modebar={"orientation": "h", "bgcolor": "rgba(0,0,0,0)"},
        hoverlabel={"font": {"family": _FONT["family"]}},
    )


def _by_kind(arms: Sequence[ArmVerdict]) -> list[tuple[str, list[ArmVerdict]]]:
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


def _points(kind: str, arms: Sequence[ArmVerdict]) -> dict[str, Any]:
    return {
        "mode": "markers",
        "name": "random control" if kind == "random" else escape(kind),
        "marker": {"color": _KIND_COLOURS.get(kind, _INK), "size": 9},
        "hovertext": [_arm_text(arm) for arm in arms],
        "hoverinfo": "text",
    }


def _arm_text(arm: ArmVerdict) -> str:
    p = arm.paired
    share = "" if arm.zeroed_share is None else f"<br>{arm.zeroed_share:.1%} of heads silenced"
    return (
        f"{escape(arm.name)}{share}<br>{p.arm:.2f} % (baseline {p.baseline:.2f} %)"
        f"<br>{p.difference:+.2f} points [{p.low:+.2f}, {p.high:+.2f}]"
    )


def _reference_lines(add_line: Any, axis: str, arms: Sequence[ArmVerdict]) -> None:
    baseline = f"baseline {arms[0].paired.baseline:.1f} %" if arms else "baseline"
    place = "top" if axis == "x" else "top right"
    font = {"size": 11, "color": _FAINT}
    add_line(**{axis: 0.0}, line={"color": _INK, "width": 1.5}, annotation_text=baseline, annotation_font=font,
             annotation_position=place)  # fmt: skip
    add_line(**{axis: -MARGIN}, line={"color": _FAINT, "width": 1, "dash": "dash"})


def _shortened(name: str, longest: int = 42) -> str:
    return escape(name if len(name) <= longest else f"{name[: longest - 1]}…")
