"""Plans by measured damage: damage of each KV head or layer -> budget -> search with real window masks -> plan.

The loss of the plan is measured on held-out prompts. Windows are in whole blocks if the plan has them, but without its
chunks, which only widen them; the loss of the finished plan is that of both.

Shapes: C candidate KV heads, or layers.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from functools import partial
from math import inf, sqrt
from typing import Any

import numpy as np

from headscan.catalog import RECALL_FAMILIES
from headscan.engine.prompt_losses import ALL_KEYS
from headscan.long_work import hash_of
from headscan.plans import (
    BudgetRequest,
    DamageCalibration,
    DamageTexts,
    HeadPlan,
    KeepScores,
    LossLimit,
    PlannedModel,
    WindowHeads,
    allocate,
    damage_scores,
    planned_model,
)
from headscan.plans.window_search import SCREENING_PARTS, Heads, Increases, WindowSearch, edge, smallest_windows
from headscan.runs.code_version import code_version
from headscan.runs.run_context import ModelContext
from headscan.steps.damage_measurement import Measurement, read_prompts
from headscan.steps.plan import Plan
from headscan.store.verdict_limits import MIN_RETAINED, TAIL
from headscan.text_tables import counted, percent
from headscan.verdicts.paired import Interval, t_quantile
from headscan.windows import KeptKeys, KvHead, Window


def run_plan(config: Plan, model: ModelContext, budget: BudgetRequest | LossLimit) -> HeadPlan:
    """Make a plan whose keep-scores are the measured damage of a window on each KV head or layer. The same call with a
    `Run` resumes.
    """
    return measured_plans(config, model, [budget])[0]


def measured_plans(config: Plan, model: ModelContext, budgets: Sequence[BudgetRequest | LossLimit]) -> list[HeadPlan]:
    """Make a plan for each budget from one measurement; see `run_plan`. A `Run` keeps what is measured in its
    store, so that the same call resumes, and another budget measures only what it needs in addition.
    """
    config, corpus = config.with_widths(model.identity), config.corpus
    assert corpus is not None
    prompts = read_prompts(config, model.identity)
    facts = {"batch_tokens": model.batch_tokens, "prompts": [(each.name, hash_of(each.requests)) for each in prompts]}
    stored = {"model": asdict(model.model), "corpus": asdict(corpus), "batch_tokens": model.batch_tokens}
    record = model.record(
        "plan", model.fingerprint(facts), config=stored, corpus=corpus.name, corpus_hash=prompts[0].content_hash
    )
    with model.resumable_numbers(record) as known:
        measurement = Measurement.of(config, model, prompts, known)
        widths = counted(len(config.windows), "width")
        model.say(f"damage of a window on {len(measurement.units)} {config.unit_names}, {widths}")
        estimates = {window: measurement.damages(window) for window in config.windows}
        chosen = smallest_windows({window: list(of_heads.values()) for window, of_heads in estimates.items()})
        windows = dict(zip(measurement.units, chosen, strict=True))
        damage = {
            kind: np.array([estimates[window][kind][index] for index, window in enumerate(chosen)])
            for kind in estimates[chosen[0]]
        }
        return [_plan(measurement, windows, damage, budget) for budget in budgets]


def model_to_plan(context: ModelContext) -> PlannedModel:
    """Return the model of plans for a loaded model."""
    run = {
        **context.identity.columns(),
        "run_id": "of the loaded model",
        "grid": context.facts.sites,
        "num_layers": context.facts.grid.num_layers,
        "dtype": context.facts.dtype,
    }
    return planned_model(run, equal_groups=False)[0]


def _plan(
    measurement: Measurement,
    windows: Mapping[KvHead, Window],
    damage: Mapping[str, np.ndarray],
    budget: BudgetRequest | LossLimit,
) -> HeadPlan:
    """Return a plan from the damage (C,) of each unit's window by kind of prompt."""
    config, units = measurement.config, measurement.units
    model, calibration = model_to_plan(measurement.context), _calibration(measurement)

    def scored(
        confirmed: Mapping[str, Mapping[KvHead, float]] | None = None, chosen: Heads = frozenset()
    ) -> KeepScores:
        by_unit = {kind: dict(zip(units, values.tolist(), strict=True)) for kind, values in damage.items()}
        return damage_scores(
            model,
            by_unit["text"],
            by_unit.get("recall"),
            calibration=calibration,
            confirmed=confirmed or {},
            chosen=chosen,
            recents={unit: window.recent for unit, window in windows.items()},
            notes=measurement.notes,
            granularity=config.granularity,
        )

    def planned(scores: KeepScores, request: BudgetRequest) -> HeadPlan:
        widest = config.windows[-1]
        # A plan states its blocks once.
        widths = {head: window.sized(1, 1) for unit, window in windows.items() for head in units[unit]}
        return allocate(
            scores,
            request,
            sink=widest.sink,
            recent=widest.recent,
            windows=widths,
            block=config.block,
            chunk=config.chunk,
        )

    def keeps(kept: KeptKeys) -> bool:
        return not isinstance(budget, LossLimit) or budget.allows(measurement.increases(measurement.ranking, kept))

    scores = scored()
    order = [head for head in scores.order if head in units]

    def first(count: int) -> KeptKeys:
        return measurement.kept({unit: windows[unit] for unit in order[:count]})

    request: BudgetRequest
    if isinstance(budget, LossLimit):
        # Bisection assumes that more windows lose more.
        count = bisect_left(range(len(order) + 1), True, lo=1, key=lambda count: not keeps(first(count))) - 1
        request = WindowHeads(len(first(count).windows))
    else:
        request = budget
    plan = planned(scores, request)
    count = len(units.keys() & set(plan.window_heads))
    if config.search and count > 0:
        measurement.context.say(f"choosing the {config.unit_names} near the budget's edge with window masks")
        search = _search(measurement, model, windows, damage, count)
        chosen = search.best(order, count)
        doubtful = edge(order, chosen)
        flips = zip(*search.flips(chosen, doubtful), strict=True)
        confirmed = {kind: dict(zip(doubtful, each, strict=True)) for kind, each in zip(damage, flips, strict=False)}
        if isinstance(budget, LossLimit):
            request = WindowHeads(sum(len(units[unit]) for unit in chosen))
        better = planned(scored(confirmed, chosen), request)
        # Another choice of doubtful heads may exceed a limit that the first one keeps.
        if keeps(better.kept):
            note = (
                f"{search.measured} sets of windows were measured with window masks, and {search.screened} on a part"
                f" of the prompts; {len(chosen - set(order[:count]))} of {count} {config.unit_names} with windows are"
                " not among the lowest estimates"
            )
            plan = replace(better, notes=(note, *better.notes))
    return _with_loss(measurement, plan, budget)


def _search(
    measurement: Measurement,
    model: PlannedModel,
    windows: Mapping[KvHead, Window],
    damage: Mapping[str, np.ndarray],
    count: int,
) -> WindowSearch:
    """Return the search among sets of ``count`` units with their windows, on the ranking prompts."""
    full = measurement.nats(measurement.ranking, [ALL_KEYS])

    def increases(sets: Sequence[Heads], base: Heads, parts: int = 1) -> list[Increases]:
        kept = [measurement.kept({unit: windows[unit] for unit in heads}) for heads in (*sets, base)]
        nats = measurement.nats([prompts.first_of(parts) for prompts in measurement.ranking], kept[:-1], kept[-1])
        more = {task: of_sets - full[task][0, : of_sets.shape[1]] for task, of_sets in nats.items()}
        return [{task: of_sets[at] for task, of_sets in more.items()} for at in range(len(sets))]

    totals = [float(np.clip(values, 0, None).sum()) or 1.0 for values in damage.values()]
    bytes_of = {layer.layer: layer.kv_bytes for layer in model.layers}
    distant = measurement.distant_order(measurement.config.windows[0])
    return WindowSearch(
        increases,
        partial(increases, parts=SCREENING_PARTS),
        (totals[0], totals[-1]),
        {unit: (bytes_of[unit[0]], len(measurement.units[unit]), window) for unit, window in windows.items()},
        None if distant is None else frozenset(distant[:count]),
    )


def _calibration(measurement: Measurement) -> DamageCalibration:
    config, facts = measurement.config, measurement.context.facts
    points = () if measurement.one_by_one else config.gates
    return DamageCalibration(
        texts=tuple(
            DamageTexts(each.task, each.name, each.content_hash, len(each.requests), each.tokens, points)
            for each in measurement.ranking
        ),
        sink=config.windows[0].sink,
        recent=config.windows[0].recent,
        dtype=facts.dtype,
        attention_path=facts.attention_path,
        code_version=code_version(),
        seed=config.seed,
    )


def _with_loss(measurement: Measurement, plan: HeadPlan, budget: BudgetRequest | LossLimit) -> HeadPlan:
    kept = plan.kept
    increases: dict[str, float] = {each.task: 0.0 for each in measurement.held_out}
    intervals: dict[str, list[float]] = {}
    left: dict[str, float] = {}
    for task, changes, answers_left in measurement.held_out_changes(kept) if kept.windows else ():
        mean = increases[task] = float(changes.mean())
        if len(changes) > 1:
            reach = t_quantile(TAIL, len(changes) - 1) * float(changes.std(ddof=1)) / sqrt(len(changes))
            intervals[task] = [mean - reach, mean + reach]
        if answers_left is not None:
            left[task] = answers_left
    measured = {"loss_increase": increases, "interval": intervals, "answers_left": left}
    words = ", ".join(_loss_words(measured, task) for task in increases)
    note = f"loss with the plan's windows, on held-out prompts, in nats per token: {words}"
    if isinstance(budget, LossLimit) and not budget.allows(increases):
        note += f"; this exceeds the limit of {budget.max_loss:g}, which holds on the prompts that rank the heads"
    unknown = [family for family in RECALL_FAMILIES if family not in increases]
    if unknown:
        why = "their prompts were left out" if measurement.config.recall_prompts else "no recall prompts were asked"
        note += f". Recall is unknown ({', '.join(unknown)}): {why}, so the windows may cost it"
    return replace(
        plan,
        validation={
            "mode": "forward",
            "recall_unknown": unknown,
            "held_out": [{"name": each.name, "prompts": len(each.requests)} for each in measurement.held_out],
            **measured,
            "max_loss": budget.max_loss if isinstance(budget, LossLimit) else None,
        },
        notes=(note, *plan.notes),
    )


def _loss_words(measured: Mapping[str, Any], task: str, unit: str = "") -> str:
    """Return the loss on the held-out prompts of a task in words, in nats per token."""
    low, high = measured["interval"].get(task, (-inf, inf))
    words = f"{task} {Interval(low, measured['loss_increase'][task], high).words(4, unit)}"
    left = measured["answers_left"].get(task)
    return words if left is None else f"{words} with {percent(round(left, 2))} of the right answer tokens left"


def own_loss(plan: HeadPlan) -> str:
    """Return the loss of a measured plan on its own held-out prompts in words, in nats per token."""
    measured = plan.validation or {}
    return ", ".join(_loss_words(measured, task) for task in measured.get("loss_increase", ()))


def shown_loss(plan: HeadPlan, max_loss: float) -> str:
    """Return what a measured plan is shown to lose on its own held-out prompts, which no choice of the plan has read,
    in words; empty if nothing.

    The 95 % interval of the loss of text lies above ``max_loss`` nats per token, or that of a recall task lies above 0
    and fewer than 90 % of the right answer tokens are left. Without an interval the mean counts.
    """
    found, measured = [], plan.validation or {}
    for task, increase in measured.get("loss_increase", {}).items():
        low, _ = measured["interval"].get(task, (increase, increase))
        left = measured["answers_left"].get(task, 1.0)
        lost = low > max_loss if task == "text" else low > 0 and 100 * left < MIN_RETAINED
        if lost:
            found.append(_loss_words(measured, task, " nats per token"))
    return ", ".join(found)
