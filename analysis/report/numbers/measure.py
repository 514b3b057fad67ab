"""One selectable measure of the head map: numbers of every head, with its scale and definition."""

from __future__ import annotations

import base64
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np

from headscan.analysis.report.numbers.head_spread import Spread
from headscan.catalog import BEHAVIOURS, IMPORTANCES, SCORES, STATISTICS

#: ``share``: from 0 to 1. ``ratio``: diverging around 1. ``signed``: diverging around 0. ``plain``: from the smallest
#: to the largest value. ``classes``: names.
ScaleKind = Literal["share", "ratio", "signed", "plain", "classes"]


@dataclass(frozen=True)
class Measure:
    """Numbers of all heads (H,) of a site under one name.

    Attributes:
        group: Heading in the selector.
        values: One number per head, NaN where there is none; of classes, the index of the name.
        formula: Definition.
        unit: Unit of the values; empty for none.
        direction: ``low`` or ``high`` if that end is the inactive one.
        scale: How colours are chosen.
        classes: Names of the classes.
        std: Standard deviation over sequences; None if unknown.
        spread: Distribution over sequences; None if unknown.
        other: The same measure in the compared run; None without one.
        limit: Heads above it show the measure; None without a limit.
    """

    name: str
    group: str
    values: np.ndarray
    formula: str
    unit: str = ""
    direction: Literal["low", "high"] | None = None
    scale: ScaleKind = "plain"
    classes: Sequence[str] = ()
    std: np.ndarray | None = None
    spread: Spread | None = None
    other: np.ndarray | None = None
    limit: float | None = None

    def payload(self) -> dict[str, Any]:
        """Return the measure for the page's script: numbers as base64 of little-endian float32."""
        found: dict[str, Any] = {
            "name": self.name,
            "group": self.group,
            "formula": self.formula,
            "unit": self.unit,
            "direction": self.direction,
            "scale": self.scale,
            "classes": list(self.classes),
            "limit": self.limit,
            "values": packed(self.values),
            "std": None if self.std is None else packed(self.std),
            "other": None if self.other is None else packed(self.other),
        }
        if self.spread is not None:
            spread = self.spread
            found |= {
                "quantiles": [packed(row) for row in spread.quantiles],
                "inactive": None if spread.inactive is None else packed(spread.inactive),
                "histogram": base64.b64encode(spread.histogram.tobytes()).decode(),
                "pool": [int(count) for count in spread.pool],
                "low": spread.low,
                "high": spread.high,
                "thresholds": [[share, value] for share, value in spread.thresholds.items()],
            }
        return found


def packed(values: np.ndarray) -> str:
    """Return base64 of little-endian float32."""
    return base64.b64encode(np.asarray(values, dtype="<f4").tobytes()).decode()


def scanned_measure(name: str, spread: Spread, other: np.ndarray | None = None) -> Measure:
    """Return a score or statistic of a scan."""
    score = SCORES.get(name)
    statistic = STATISTICS[name if score is None else score.statistic]
    normalised = score is not None and score.normaliser is not None
    formula = (
        statistic.formula if score is None or score.normaliser is None else f"{score.formula}; {statistic.formula}"
    )
    scale: ScaleKind = "ratio" if normalised else "share" if statistic.unit == "share" else "plain"
    return Measure(
        name,
        "Statistics" if score is None else f"Scores ({'normalised' if normalised else 'plain'})",
        spread.mean,
        f"{formula} ({statistic.source}); mean over sequences",
        "ratio" if normalised else statistic.unit,
        None if score is None else score.inactive,
        scale,
        std=spread.std,
        spread=spread,
        other=other,
    )


@dataclass(frozen=True)
class Definition:
    """Definition of a measure that does not come from a scan."""

    formula: str
    unit: str = ""
    scale: ScaleKind = "plain"
    limit: float | None = None


def behaviour_definition(name: str) -> Definition:
    """Return the definition of a behaviour."""
    known = BEHAVIOURS.get(name)
    if known is None:
        return Definition(name, "share", "share")
    return Definition(f"{known.formula} ({known.source})", "share", "share", known.threshold)


def importance_definition(name: str) -> Definition:
    """Return the definition of an importance."""
    known = IMPORTANCES.get(name)
    if known is None:
        return Definition("mean over sequences of dL/dg, with its sign", "nats", "signed")
    return Definition(
        f"{known.formula} ({known.source})", "nats" if name in ("importance", "sequence_importance") else ""
    )


def effect_definition(name: str) -> Definition:
    """Return the definition of the effect of ablating one head, by replacement and metric."""
    _, replacement, metric = name.split("_", 2)
    return Definition(
        f"how much worse {metric} becomes if this head alone is replaced by {replacement}; positive is worse",
        "accuracy, 0 to 1" if metric == "accuracy" else "nats per token" if metric == "loss" else metric,
        "signed",
    )


def gate_definition(name: str) -> Definition:
    """Return the definition of a number of a fitted gate."""
    what = "probability that the gate is above 0" if name.startswith("p_open") else "expected value of the gate"
    fit = "opens" if name.endswith("_up") else "closes"
    return Definition(f"{what} in the fit that {fit} gates (arXiv 1905.09418)", "share", "share")


@dataclass(frozen=True)
class SiteMeasures:
    """All measures of one site, and sets of heads (rows) by name, such as the heads of each arm."""

    measures: tuple[Measure, ...]
    sets: dict[str, list[int]] = field(default_factory=dict)
