"""The orders of heads that the runs of a store give, by criteria, statistics and behaviours."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from headscan.analysis.heads.head_ranking import rank_behaviours, rank_gates, rank_heads, rank_importance
from headscan.analysis.store.records import RunKind
from headscan.analysis.store.store import Store
from headscan.analysis.verdicts.head_effects import rank_effects
from headscan.catalog import BEHAVIOURS, CRITERIA, EFFECT


def run_kind(name: str) -> RunKind:
    """Return the kind of the runs that order heads by a criterion, a statistic or a behaviour."""
    if name in CRITERIA and (kind := CRITERIA[name].run) is not None:
        return kind
    return "probe" if name in BEHAVIOURS else "scan"


def finished_runs(store: Store, name: str) -> list[dict[str, Any]]:
    """Return the finished runs that hold the numbers of a criterion, a statistic or a behaviour, newest first."""
    runs = [run for run in store.runs(run_kind(name)) if run["status"] == "finished"]
    if name == EFFECT:  # ablate runs that compare criteria have none
        holding = "SELECT DISTINCT run_id FROM head_effects"
    elif name in CRITERIA and CRITERIA[name].on_recall:
        holding = "SELECT DISTINCT run_id FROM sequences WHERE recall_task IS NOT NULL"
    else:
        return runs
    held = set(store.query(holding)["run_id"].to_pylist())
    return [run for run in runs if run["run_id"] in held]


def head_order(
    store: Store, run_id: str, name: str, *, site: str = "self", descending: bool | None = None
) -> Sequence[Any]:
    """Return all heads of a site, each with ``layer``, ``head`` and its numbers. ``descending`` puts the highest number
    first; None puts the heads first that a criterion removes first, or those with the strongest behaviour.
    """
    return RUN_ORDERS[run_kind(name)](store, run_id, name, site=site, descending=descending)


#: How the runs of each kind order heads by the name of a criterion; runs of gates and of effects have one criterion.
RUN_ORDERS: Mapping[str, Callable[..., Sequence[Any]]] = {
    "scan": rank_heads,
    "probe": rank_behaviours,
    "importance": rank_importance,
    "gates": lambda store, run_id, _, **order: rank_gates(store, run_id, **order),
    "ablate": lambda store, run_id, _, **order: rank_effects(store, run_id, **order),
}
