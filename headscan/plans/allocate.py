"""Allocation of a cache budget to KV heads, and plans from a store."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from headscan.catalog import DEFAULT_RECENT, DEFAULT_SINK
from headscan.errors import check_type
from headscan.plans.head_plan import HeadPlan, check_chunk, check_is_plan, layer_bytes
from headscan.plans.keep_scores import (
    RANDOM_SCORE,
    KeepScores,
    by_layer,
    full_heads,
    imported_scores,
    own_budget,
    random_scores,
)
from headscan.plans.pattern_files import HeadPattern
from headscan.plans.plan_budgets import Budget, BudgetRequest, LengthBudget, WindowShare, budget_lengths
from headscan.plans.plan_records import (
    DERIVED_NOTE,
    Granularity,
    PlanError,
    PlanMethod,
    PlannedHead,
    PlannedModel,
    RandomCalibration,
    planned_model,
)
from headscan.plans.scan_scores import distant_mass_scores, retrieval_scores
from headscan.store.store import Store
from headscan.windows import DROPPED, KvHead, Window

#: Models attend to their first tokens, of any text, so a window that has room for them never evicts them.
_FIRST_TOKENS = 4


def allocate(
    scores: KeepScores,
    budget: BudgetRequest,
    *,
    sink: int = DEFAULT_SINK,
    recent: int = DEFAULT_RECENT,
    windows: Mapping[KvHead, Window] | None = None,
    dropped: Mapping[KvHead, str] | None = None,
    block: int | None = None,
    chunk: int | None = None,
    validation: Mapping[str, Any] | None = None,
    notes: Sequence[str] = (),
) -> HeadPlan:
    """Make a plan: the candidates with the lowest keep-scores get a window until the budget is met.

    ``allocate(scores, WindowHeads(n))`` windows the n lowest ones, without reading anything.

    Args:
        sink: Number of first tokens in a window.
        recent: Number of last tokens in a window.
        windows: Other windows by (layer, KV head), for heads that get one; None uses one width.
        dropped: Verdict by (layer, KV head) for heads to drop, whose query heads can all be removed safely; the budget
            distributes windows among the others. None drops no head.
        block: Tokens of a block of the engine that serves the plan, as in `HeadPlan`; None keeps single tokens.
        chunk: Tokens that see the same window, as in `HeadPlan`; None gives each token its own.
        validation: Benchmark result of this plan, which JSON can hold; None if not validated.
        notes: More notes for the plan.

    Raises:
        PlanError: A budget out of reach, a window that keeps no token or is narrower than the evidence, or a dropped
            head that has no cache of its own.
    """
    model = scores.model
    dropped = dict(dropped or {})
    if dropped and scores.granularity == "layer":
        raise PlanError(
            f"a plan by layer drops no KV heads: {len(dropped)} in `dropped` (limit 0). Prune the model instead"
        )
    for place in dropped:
        if place not in full_heads(model):
            raise PlanError(
                f"layer {place[0]}, KV head {place[1]} of {model.name} has no unbounded cache of its own, so it cannot"
                " be dropped. Leave it out of `dropped`"
            )
        if not dropped[place].strip():
            raise PlanError(
                f"layer {place[0]}, KV head {place[1]} is dropped without a verdict. Name the verdict in `dropped`"
            )
    for name, size in (("block", block), ("chunk", chunk)):
        if size is not None and (not isinstance(size, int) or isinstance(size, bool) or size < 1):
            raise PlanError(f"`{name}={size!r}` (limit a whole number from 1 on, or None). Change `{name}`")
    check_chunk(chunk, block)
    _check_width(scores, sink, recent)
    for window in set((windows or {}).values()):
        _check_width(scores, window.sink, window.recent)
        if window.sink < min(sink, _FIRST_TOKENS):
            raise PlanError(
                f"a window keeps {window.sink} first tokens (limit {min(sink, _FIRST_TOKENS)}, which every kept head"
                f" keeps with sink {sink}). Widen it in `windows`"
            )
    order = [place for place in scores.order if place not in dropped]
    widths = dict.fromkeys(order, Window(sink, recent)) | dict(windows or {})
    places = [(layer.layer, k) for layer in model.layers for k in range(layer.num_key_value_heads)]
    least: dict[KvHead, Window | None] = dict.fromkeys(places) | dict.fromkeys(dropped, DROPPED)

    def windows_with(count: int, block: int | None = None, chunk: int | None = None) -> dict[KvHead, Window | None]:
        return least | {place: widths[place].sized(block, chunk) for place in order[:count]}

    def bytes_with(count: int, tokens: int) -> int:
        return sum(layer_bytes(model, windows_with(count, block, chunk), tokens, block).values())

    # Numbers of windows that the plan can have: up to that of the candidates, or those of whole layers.
    ends = [at for at, place in enumerate(order, 1) if at == len(order) or order[at][0] != place[0]]
    counts = range(len(order) + 1) if scores.granularity == "kv_head" else [0, *ends]
    count = budget.window_count(counts, bytes_with)
    ranked = dict.fromkeys(dropped, 0.0) | dict(scores.scores)
    damages, patterns = scores.damages, scores.patterns
    heads = tuple(
        PlannedHead(*at, ranked.get(at), window, damages.get(at), patterns.get(at), dropped.get(at))
        for at, window in windows_with(count).items()
    )
    more = () if count or dropped else ("no head gets a window: the full cache fits the budget",)
    return HeadPlan(
        model=model,
        method=scores.method,
        calibration=scores.calibration,
        granularity=scores.granularity,
        group_reduction="max",
        score=scores.score,
        heads=heads,
        query_heads=scores.query_heads,
        budget=savings(model, windows_with(count, block, chunk), budget, block),
        validation=validation,
        notes=(*more, *notes, *scores.notes),
        block=block,
        chunk=chunk,
    )


def savings(
    model: PlannedModel, windows: Mapping[KvHead, Window | None], request: BudgetRequest, block: int | None = None
) -> Budget:
    """Return the savings of windows at `budget_lengths`, and at the lengths of the request."""

    def at(tokens: int) -> LengthBudget:
        whole = model.cache_bytes(tokens, block)
        planned = sum(layer_bytes(model, windows, tokens, block).values())
        return LengthBudget(tokens, whole, planned, whole - planned, (whole - planned) / whole)

    dropped = sum(window == DROPPED for window in windows.values())
    windowed = sum(window is not None for window in windows.values()) - dropped
    lengths = sorted({*budget_lengths(model.max_tokens), *request.lengths})
    return Budget(request, len(windows), windowed, windowed / len(windows), dropped, tuple(map(at, lengths)))


def _check_width(scores: KeepScores, sink: int, recent: int) -> None:
    if sink < 0 or recent < 1:
        name, width, least = ("recent", recent, 1) if recent < 1 else ("sink", sink, 0)
        raise PlanError(f"{name} of the window is {width} (limit at least {least}). Raise `{name}`")
    for name, width, covered in (("sink", sink, scores.sink), ("recent", recent, scores.recent)):
        if covered is not None and width < covered:
            raise PlanError(
                f"{name} of the window is too narrow: {width} (limit {covered}, {name} of the evidence). Raise"
                f" `{name}`, or measure again with {name} {max(width, 1)}"
            )


def random_plan(plan: HeadPlan, seed: int) -> HeadPlan:
    """Return a plan that deals a plan's actions out to its candidates at random, the same for the same seed.

    Actions and widths change places only among heads of the same bytes per token, or in a plan by layer among such
    layers, so the cache has the same size at every length. Protected heads keep their full cache, as in ``plan``.
    """
    check_is_plan(plan)
    by_unit: dict[KvHead, list[PlannedHead]] = defaultdict(list)
    for head in plan.heads:
        if head.score is not None:
            by_unit[head.layer, 0 if plan.granularity == "layer" else head.kv_head].append(head)
    draws = dict(zip(by_unit, np.random.default_rng(seed).random(len(by_unit)).tolist(), strict=True))
    bytes_of = {layer.layer: layer.kv_bytes for layer in plan.model.layers}
    alike: dict[tuple[int | None, int], list[KvHead]] = defaultdict(list)
    for unit, heads in by_unit.items():
        alike[bytes_of[unit[0]], len(heads)].append(unit)
    dealt: dict[KvHead, PlannedHead] = {}
    for units in alike.values():
        # The narrowest caches go to the lowest numbers, as if the numbers were keep-scores.
        caches = sorted(
            (by_unit[unit][0] for unit in units),
            key=lambda head: (head.window is None, head.window.width if head.window else 0),
        )
        for unit, cache in zip(sorted(units, key=lambda unit: draws[unit]), caches, strict=True):
            for head in by_unit[unit]:
                dealt[head.layer, head.kv_head] = replace(
                    cache,
                    layer=head.layer,
                    kv_head=head.kv_head,
                    score=draws[unit],
                    damage=None,
                    pattern=None,
                    verdict="random control" if cache.window == DROPPED else None,
                )
    protected = [note for note in plan.notes if "KV heads are protected: " in note]
    return replace(
        plan,
        method="random",
        score=RANDOM_SCORE,
        calibration=RandomCalibration(seed, None),
        heads=tuple(dealt.get((head.layer, head.kv_head), head) for head in plan.heads),
        query_heads=(),
        validation=None,
        notes=(f"control: the actions of a {plan.method} plan, dealt out at random", *protected),
    )


#: Methods whose scores follow from a store; ``measured`` needs the model instead.
STORE_METHODS: tuple[PlanMethod, ...] = ("distant_mass", "retrieval_score", "imported", "random")


def store_scores(
    store: Store,
    run_id: str | None,
    method: PlanMethod,
    *,
    pattern: HeadPattern | None = None,
    seed: int = 0,
    granularity: Granularity = "kv_head",
) -> KeepScores:
    """Return the keep-scores of a method that reads a store; see `make_plan`."""
    if method not in STORE_METHODS:
        raise PlanError(f"method {method} does not follow from a store. Choose one of {', '.join(STORE_METHODS)}")
    if method == "distant_mass":
        scores = distant_mass_scores(store, run_id)
    elif method == "retrieval_score":
        scores = retrieval_scores(store, run_id)
    else:  # only the model's shape is read
        run = store.resolve_run(run_id, "scan")
        model, recorded = planned_model(run, equal_groups=method == "imported")
        if method == "random":
            scores = random_scores(model, seed, run_id=run["run_id"], granularity=granularity)
        elif pattern is None:
            raise PlanError("method imported needs a pattern. Give `pattern`")
        else:
            scores = imported_scores(model, pattern, run_id=run["run_id"])
        scores = replace(scores, notes=(*(() if recorded else (DERIVED_NOTE,)), *scores.notes))
    return scores if scores.granularity == granularity else by_layer(scores)


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
    granularity: Granularity = "kv_head",
    dropped: Mapping[KvHead, str] | None = None,
    block: int | None = None,
    chunk: int | None = None,
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
        granularity: ``layer`` gives windows to whole layers, by the largest keep-score of their KV heads; method
            ``random`` draws one number for each layer.
        dropped: KV heads to drop, with the verdict; see `allocate`. None drops no head.
        block: Tokens of a block of the serving engine, as in `HeadPlan`; None keeps single tokens.
        chunk: Tokens that see the same window, as in `HeadPlan`; None gives each token its own.
        validation: Benchmark result of this plan, which JSON can hold; None if not validated.

    Raises:
        PlanError: A value out of range, no or two budgets, a budget out of reach, or evidence that the method lacks.
        StoreError: No such run.
    """
    check_type("store", store, Store, "a Store, such as `Store(path)`", PlanError)
    if budget is not None and window_share is not None:
        raise PlanError("two budgets are given. Give `budget` or `window_share`")
    if pattern is not None and method != "imported":
        raise PlanError(f"method {method} reads no pattern. Use method imported, or leave out `pattern`")
    if window_share is not None:
        budget = WindowShare(window_share)
    if budget is None and pattern is None:
        raise PlanError("no budget is given. Give `window_share` or `budget`")
    scores = store_scores(store, run_id, method, pattern=pattern, seed=seed, granularity=granularity)
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
        dropped=dropped,
        block=block,
        chunk=chunk,
        validation=validation,
    )
