"""The orders of heads that the runs of a store give, by criteria, statistics and behaviours."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from headscan.catalog import BEHAVIOURS, CRITERIA, EFFECT, RANKED_CRITERIA
from headscan.errors import InterventionError, PruningError, first_line
from headscan.ranking.head_ranking import OrderedHead, rank_behaviours, rank_gates, rank_heads, rank_importance
from headscan.settings.evaluation_settings import RECALL_PROMPTS
from headscan.store.provenance import same_model
from headscan.store.records import RunKind
from headscan.store.store import Store
from headscan.verdicts.head_effects import rank_effects

if TYPE_CHECKING:
    from headscan.runs.model_identity import ModelIdentity


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
) -> Sequence[OrderedHead]:
    """Return all heads of a site, each with ``layer``, ``head`` and its numbers. ``descending`` puts the highest number
    first; None puts the heads first that a criterion removes first, or those with the strongest behaviour.
    """
    return RUN_ORDERS[run_kind(name)](store, run_id, name, site=site, descending=descending)


#: How the runs of each kind order heads by the name of a criterion; runs of gates and of effects have one criterion.
RUN_ORDERS: Mapping[str, Callable[..., Sequence[OrderedHead]]] = {
    "scan": rank_heads,
    "probe": rank_behaviours,
    "importance": rank_importance,
    "gates": lambda store, run_id, _, **order: rank_gates(store, run_id, **order),
    "ablate": lambda store, run_id, _, **order: rank_effects(store, run_id, **order),
}


#: Options of the verb that measures a criterion, where the verb alone does not.
_MEASURED_BY = {"ablate": "ablate --each"}


def find_run(store: Store, identity: ModelIdentity, criterion: str, prefix: str | None) -> str:
    """Return the id of the run whose numbers order heads by a criterion: the newest finished one of this model, or the
    one whose id begins with ``prefix``.
    """
    kind = run_kind(criterion)
    if prefix:
        run = store.resolve_run(prefix, kind)
        if not same_model(identity.columns(), run):
            raise InterventionError(
                f"run {run['run_id']} measured {run['model']}, another model than {identity.name}. Choose a run of it"
            )
        if run["status"] != "finished":
            # The numbers of an unfinished run select other heads and thresholds than those of the finished one.
            raise InterventionError(f"run {run['run_id']} is {run['status']}. Run its command again to finish it")
        return str(run["run_id"])
    for run in finished_runs(store, criterion):
        if same_model(identity.columns(), run):
            return str(run["run_id"])
    verb = _MEASURED_BY.get(kind, kind)
    if CRITERIA[criterion].on_recall:
        verb = f"{verb} --recall-prompts {RECALL_PROMPTS}"
    raise InterventionError(
        f"{store.path} has no finished {kind} of {identity.name} for {criterion}. Run `headscan {verb}` on it first"
    )


def stored_orders(
    store: Store, identity: ModelIdentity, methods: Sequence[str], prefix: str | None
) -> dict[str, list[tuple[int, int]]]:
    """Return the heads in the order in which they are removed, for the methods that are in `RANKED_CRITERIA`. The ids
    of the runs start with ``prefix``; None uses the newest runs of the model.
    """
    runs = {name: find_run(store, identity, name, prefix) for name in methods if name in RANKED_CRITERIA}
    return {
        name: [(head.layer, head.head) for head in head_order(store, run_id, name)] for name, run_id in runs.items()
    }


def imported_heads(path: str | Path) -> list[tuple[int, int]]:
    """Return the heads of a JSON file in order: ``[layer, head]`` pairs in a list, alone or under ``heads``."""
    try:
        content = json.loads(Path(path).read_bytes())
    except (OSError, ValueError) as problem:
        raise PruningError(
            f"cannot read the heads of {path}: {first_line(problem)}. Give a JSON list of [layer, head]"
        ) from None
    pairs = content.get("heads") if isinstance(content, dict) else content
    if not isinstance(pairs, list) or not pairs:
        raise PruningError(f"{path} names 0 heads (limit 1). Give a JSON list of [layer, head]")
    for pair in pairs:
        if not (isinstance(pair, list) and len(pair) == 2 and all(type(n) is int and n >= 0 for n in pair)):
            raise PruningError(f"{path}: {json.dumps(pair)[:60]} is no head. Give a JSON list of [layer, head]")
    return [(layer, head) for layer, head in pairs]
