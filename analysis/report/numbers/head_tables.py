"""Tables of the store with one number per head and name, of runs other than scans.

A further table is one more entry of `HEAD_TABLES`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, cast

import numpy as np

from headscan.analysis.provenance import same_model
from headscan.analysis.report.numbers.head_spread import SiteHeads
from headscan.analysis.report.numbers.measure import (
    Definition,
    Measure,
    behaviour_definition,
    effect_definition,
    gate_definition,
    importance_definition,
)
from headscan.analysis.schema.tables import TABLES
from headscan.analysis.store.records import RunKind
from headscan.analysis.store.store import Store
from headscan.catalog import IMPORTANCES


@dataclass(frozen=True)
class HeadTable:
    """A table with numbers of heads.

    Attributes:
        group: Heading in the selector of the map.
        kind: Kind of the runs that fill it.
        table: Its name; a store without it has no such numbers.
        query: SQL with the columns ``site, layer, head, name, value, std``; ``?`` is the run.
        define: Returns the definition of a name.
        verb: Verb that makes such runs, and its options.
        reads_texts: The verb needs a corpus.
    """

    group: str
    kind: str
    table: str
    query: str
    define: Callable[[str], Definition]
    verb: str
    options: tuple[str, ...] = ()
    reads_texts: bool = True

    @property
    def known(self) -> bool:
        """True if stores of this version have the table."""
        return self.table in TABLES


_IMPORTANCE_NAMES = (*IMPORTANCES, "mean_gate_gradient")

HEAD_TABLES: tuple[HeadTable, ...] = (
    HeadTable(
        "Behaviours",
        "probe",
        "head_behaviours",
        "SELECT site, layer, head, behaviour AS name, value, NULL::DOUBLE AS std FROM head_behaviours WHERE run_id = ?",
        behaviour_definition,
        "probe",
        reads_texts=False,
    ),
    HeadTable(
        "Importance",
        "importance",
        "head_importance",
        "SELECT site, layer, head, name, value, CASE name WHEN 'importance' THEN importance_std"
        " WHEN 'sequence_importance' THEN sequence_importance_std END AS std FROM"
        f" (UNPIVOT (FROM all_importance_summary WHERE run_id = ?) ON {', '.join(_IMPORTANCE_NAMES)}"
        " INTO NAME name VALUE value)",
        importance_definition,
        "importance",
    ),
    HeadTable(
        "Effects",
        "ablate",
        "head_effects",
        "SELECT site, layer, head, 'harm_' || replacement || '_' || metric AS name, harm AS value,"
        " standard_error AS std FROM all_effect_summary WHERE run_id = ? AND mode = 'each'",
        effect_definition,
        "ablate",
        ("--each",),
    ),
    HeadTable(
        "Gates",
        "gates",
        "head_gates",
        "SELECT site, layer, head, name, value, NULL::DOUBLE AS std FROM"
        " (UNPIVOT (FROM head_gates WHERE run_id = ?) ON gate, p_open, gate_up, p_open_up INTO NAME name VALUE value)",
        gate_definition,
        "gates",
        ("--share", "0.4"),
    ),
)


def finished_runs(store: Store, kind: str, scan: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return the finished runs of a kind on the scan's model, newest first."""
    runs = store.runs(cast(RunKind, kind))
    return [run for run in runs if run["status"] == "finished" and same_model(run, scan)]


def read_head_tables(
    store: Store, scan: Mapping[str, Any], heads: SiteHeads, tables: Iterable[HeadTable] = HEAD_TABLES
) -> tuple[list[Measure], dict[str, dict[str, Any]]]:
    """Return the measures of all tables for one site, and the run of each group."""
    found: list[Measure] = []
    runs: dict[str, dict[str, Any]] = {}
    for table in tables:
        # A run may have no rows in the table: a comparison of criteria on labelled examples has no effects.
        for run in finished_runs(store, table.kind, scan) if table.known else ():
            if measures := list(_measures(store, run, heads, table)):
                runs[table.group] = run
                found += measures
                break
    return found, runs


def _measures(store: Store, run: Mapping[str, Any], heads: SiteHeads, table: HeadTable) -> Iterable[Measure]:
    rows = store.query(f"SELECT * FROM ({table.query}) WHERE site = ?", [run["run_id"], heads.site])
    names = np.array(rows["name"].to_pylist(), dtype=object)
    index = heads.index
    layer, head = (rows[name].to_numpy().astype(int) for name in ("layer", "head"))
    known = (layer < index.shape[0]) & (head < index.shape[1])
    for name in dict.fromkeys(names.tolist()):
        of_name = known & (names == name)
        row = index[layer[of_name], head[of_name]]
        columns = {}
        for column in ("value", "std"):
            columns[column] = np.full(len(heads), np.nan)
            numbers = rows[column].to_numpy(zero_copy_only=False).astype(np.float64)[of_name]
            columns[column][row[row >= 0]] = numbers[row >= 0]
        meaning = table.define(name)
        yield Measure(
            name,
            table.group,
            columns["value"],
            meaning.formula,
            meaning.unit,
            scale=meaning.scale,
            std=None if np.isnan(columns["std"]).all() else columns["std"],
            limit=meaning.limit,
        )
