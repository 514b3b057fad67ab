"""Measures of heads, and the tables of a store that hold them."""

from __future__ import annotations

import base64
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np

from headscan.catalog import BEHAVIOURS, IMPORTANCES, SCORES, STATISTICS
from headscan.store.head_spread import Spread
from headscan.store.provenance import same_model
from headscan.store.records import RunKind
from headscan.store.site_rows import SiteHeads, column_values
from headscan.store.store import Store

#: ``share``: from 0 to 1. ``ratio``: diverging around 1. ``signed``: diverging around 0. ``plain``: from the smallest
#: to the largest value. ``classes``: names.
ScaleKind = Literal["share", "ratio", "signed", "plain", "classes"]


@dataclass(frozen=True)
class HeadMeasure:
    """Numbers of all heads (H,) of a site under one name, NaN where there is none; of classes, the index of the name.

    Attributes:
        group: Heading in the selector.
        direction: The inactive end.
        std, spread: Over sequences; None if unknown.
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
        fields: dict[str, Any] = {
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
            fields |= {
                "quantiles": [packed(row) for row in spread.quantiles],
                "inactive": None if spread.inactive is None else packed(spread.inactive),
                "histogram": base64.b64encode(spread.histogram.tobytes()).decode(),
                "pool": [int(count) for count in spread.pool],
                "low": spread.low,
                "high": spread.high,
                "thresholds": [[share, value] for share, value in spread.thresholds.items()],
            }
        return fields


def packed(values: np.ndarray) -> str:
    """Return base64 of little-endian float32."""
    return base64.b64encode(np.asarray(values, dtype="<f4").tobytes()).decode()


def scanned_measure(name: str, spread: Spread, other: np.ndarray | None = None, remark: str = "") -> HeadMeasure:
    """Return a score or statistic of a scan; a ``remark`` follows its definition."""
    score = SCORES.get(name)
    statistic = STATISTICS[name if score is None else score.statistic]
    normalised = score is not None and score.normaliser is not None
    formula = (
        statistic.formula if score is None or score.normaliser is None else f"{score.formula}; {statistic.formula}"
    )
    scale: ScaleKind = "ratio" if normalised else "share" if statistic.unit == "share" else "plain"
    return HeadMeasure(
        name,
        "Statistics" if score is None else f"Scores ({'normalised' if normalised else 'plain'})",
        spread.mean,
        f"{formula} ({statistic.source}); mean over sequences" + f"; {remark}" * bool(remark),
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
    known = BEHAVIOURS.get(name)
    if known is None:
        return Definition(name, "share", "share")
    return Definition(f"{known.formula} ({known.source})", "share", "share", known.threshold)


def importance_definition(name: str) -> Definition:
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

    measures: tuple[HeadMeasure, ...]
    sets: dict[str, list[int]] = field(default_factory=dict)


@dataclass(frozen=True)
class HeadTable:
    """A table with numbers of heads.

    Attributes:
        group: Heading in the selector of the map.
        kind: Runs that have such numbers, and the verb that makes them.
        query: SQL with the columns ``site, layer, head, name, value, std``, where ``?`` is the run.
        define: Returns the definition of a name.
        options: Options of the verb.
    """

    group: str
    kind: RunKind
    query: str
    define: Callable[[str], Definition]
    options: tuple[str, ...] = ()


_IMPORTANCE_NAMES = (*IMPORTANCES, "mean_gate_gradient")

HEAD_TABLES: tuple[HeadTable, ...] = (
    HeadTable(
        "Behaviours",
        "probe",
        "SELECT site, layer, head, behaviour AS name, value, NULL::DOUBLE AS std FROM head_behaviours WHERE run_id = ?",
        behaviour_definition,
    ),
    HeadTable(
        "Importance",
        "importance",
        "SELECT site, layer, head, name, value, CASE name WHEN 'importance' THEN importance_std"
        " WHEN 'sequence_importance' THEN sequence_importance_std END AS std FROM"
        f" (UNPIVOT (FROM all_importance_summary WHERE run_id = ?) ON {', '.join(_IMPORTANCE_NAMES)}"
        " INTO NAME name VALUE value)",
        importance_definition,
    ),
    HeadTable(
        "Effects",
        "ablate",
        "SELECT site, layer, head, 'harm_' || replacement || '_' || metric AS name, harm AS value,"
        " standard_error AS std FROM all_effect_summary WHERE run_id = ? AND mode = 'each'",
        effect_definition,
        ("--each",),
    ),
    HeadTable(
        "Gates",
        "gates",
        "SELECT site, layer, head, name, value, NULL::DOUBLE AS std FROM"
        " (UNPIVOT (FROM head_gates WHERE run_id = ?) ON gate, p_open, gate_up, p_open_up INTO NAME name VALUE value)",
        gate_definition,
        ("--share", "0.4"),
    ),
)


def finished_runs(store: Store, kind: RunKind, scan: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return the finished runs of a kind on the scan's model, newest first."""
    runs = store.runs(kind)
    return [run for run in runs if run["status"] == "finished" and same_model(run, scan)]


def read_head_tables(
    store: Store, scan: Mapping[str, Any], heads: SiteHeads
) -> tuple[list[HeadMeasure], dict[str, dict[str, Any]]]:
    """Return the measures of all tables for one site, and the run of each group."""
    tables: list[HeadMeasure] = []
    runs: dict[str, dict[str, Any]] = {}
    with store.reading():
        for table in HEAD_TABLES:
            # A run may have no rows in the table: a comparison of criteria on labelled examples has no effects.
            for run in finished_runs(store, table.kind, scan):
                if measures := list(_measures(store, run, heads, table)):
                    runs[table.group] = run
                    tables += measures
                    break
    return tables, runs


def _measures(store: Store, run: Mapping[str, Any], heads: SiteHeads, table: HeadTable) -> Iterable[HeadMeasure]:
    rows = store.query(f"SELECT * FROM ({table.query}) WHERE site = ?", [run["run_id"], heads.site])
    names = np.array(rows["name"].to_pylist(), dtype=object)
    index = heads.index
    layer, head = (column_values(rows[name]).astype(int) for name in ("layer", "head"))
    known = (layer < index.shape[0]) & (head < index.shape[1])
    for name in dict.fromkeys(names.tolist()):
        of_name = known & (names == name)
        row = index[layer[of_name], head[of_name]]
        columns = {}
        for column in ("value", "std"):
            columns[column] = np.full(len(heads), np.nan)
            values = column_values(rows[column]).astype(np.float64)[of_name]
            columns[column][row[row >= 0]] = values[row >= 0]
        meaning = table.define(name)
        yield HeadMeasure(
            name,
            table.group,
            columns["value"],
            meaning.formula,
            meaning.unit,
            scale=meaning.scale,
            std=None if np.isnan(columns["std"]).all() else columns["std"],
            limit=meaning.limit,
        )
