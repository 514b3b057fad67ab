"""Head plans from a store: scores by a named method, then a budget."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from headscan.analysis.plans.allocate import DEFAULT_RECENT, DEFAULT_SINK, allocate
from headscan.analysis.plans.format.budget_records import BudgetRequest, WindowShare
from headscan.analysis.plans.format.head_plan import HeadPlan
from headscan.analysis.plans.format.plan_records import PlanError, PlanMethod
from headscan.analysis.plans.format.planned_model import DERIVED_NOTE, planned_model
from headscan.analysis.plans.interchange.head_pattern import HeadPattern
from headscan.analysis.plans.methods.imported_scores import imported_scores, own_budget
from headscan.analysis.plans.methods.keep_scores import KeepScores
from headscan.analysis.plans.methods.random_scores import random_scores
from headscan.analysis.plans.methods.scan_scores import distant_mass_scores, retrieval_scores
from headscan.analysis.store.store import Store


@dataclass(frozen=True)
class _Inputs:
    """Inputs of a method in addition to the run."""

    pattern: HeadPattern | None
    seed: int


def _imported(store: Store, run_id: str | None, inputs: _Inputs) -> KeepScores:
    if inputs.pattern is None:
        raise PlanError("method imported needs a pattern. Give `pattern`")
    run = store.resolve_run(run_id, "scan")
    model, recorded = planned_model(run)
    return _with_note(imported_scores(model, inputs.pattern, run_id=run["run_id"]), recorded)


def _random(store: Store, run_id: str | None, inputs: _Inputs) -> KeepScores:
    run = store.resolve_run(run_id, "scan")
    model, recorded = planned_model(run, equal_groups=False)
    return _with_note(random_scores(model, inputs.seed, run_id=run["run_id"]), recorded)


def _with_note(scores: KeepScores, recorded: bool) -> KeepScores:
    return scores if recorded else replace(scores, notes=(DERIVED_NOTE, *scores.notes))


#: Methods whose scores follow from a store; ``measured`` needs the model instead.
STORE_METHODS: dict[PlanMethod, Callable[[Store, str | None, _Inputs], KeepScores]] = {
    "distant_mass": lambda store, run_id, _: distant_mass_scores(store, run_id),
    "retrieval_score": lambda store, run_id, _: retrieval_scores(store, run_id),
    "imported": _imported,
    "random": _random,
}


def store_scores(
    store: Store, run_id: str | None, method: PlanMethod, *, pattern: HeadPattern | None = None, seed: int = 0
) -> KeepScores:
    """Return the keep-scores of a method that reads a store; see `make_plan`."""
    if method not in STORE_METHODS:
        raise PlanError(f"method {method} does not follow from a store. Choose one of {', '.join(STORE_METHODS)}")
    return STORE_METHODS[method](store, run_id, _Inputs(pattern, seed))


def make_plan(
    store: Store,
    run_id: str | None,
    *,
    method: PlanMethod = "distant_mass",
    budget: BudgetRequest | None = None,
    window_share: float | None = None,
    sink: int | None = None,
    recent: int | None = None,
    pattern: HeadPattern | None = None,
    seed: int = 0,
    removable: Mapping[tuple[int, int], str] | None = None,
    validation: Mapping[str, Any] | None = None,
) -> HeadPlan:
    """Make a plan from a run in a store.

    Args:
        run_id: First characters of the id of a scan, for ``retrieval_score`` of a probe; None uses the newest finished
            one. Methods ``imported`` and ``random`` read only the model's shape from it.
        method: ``distant_mass``, ``retrieval_score``, ``imported`` or ``random``.
        budget: Windows to give; None uses ``window_share``.
        window_share: The budget ``WindowShare(window_share)``; None uses ``budget``, and without either the pattern's
            own number of window heads.
        sink: Number of first tokens in a window; None uses the pattern's if it states one, and 4 otherwise.
        recent: Number of last tokens in a window; None uses the pattern's if it states one, and 256 otherwise.
        pattern: Pattern of method ``imported``; None for other methods.
        seed: Seed of method ``random``.
        removable: KV heads to drop, with the verdict; see `allocate`. None drops no head.
        validation: Benchmark result of this plan, which JSON can hold; None if not validated.

    Raises:
        PlanError: A value out of range, no or two budgets, a budget out of reach, or evidence that the method lacks.
        StoreError: No such run.
    """
    if budget is not None and window_share is not None:
        raise PlanError("two budgets are given. Give `budget` or `window_share`")
    if pattern is not None and method != "imported":
        raise PlanError(f"method {method} reads no pattern. Use method imported, or leave out `pattern`")
    if window_share is not None:
        budget = WindowShare(window_share)
    if budget is None and pattern is None:
        raise PlanError("no budget is given. Give `window_share` or `budget`")
    scores = store_scores(store, run_id, method, pattern=pattern, seed=seed)
    if budget is None:
        assert pattern is not None
        budget = own_budget(pattern, scores)
    if pattern is not None:
        sink = pattern.sink_size if sink is None else sink
        recent = pattern.recent_size if recent is None else recent
    return allocate(
        scores,
        budget,
        sink=DEFAULT_SINK if sink is None else sink,
        recent=DEFAULT_RECENT if recent is None else recent,
        removable=removable,
        validation=validation,
    )
