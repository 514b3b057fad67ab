"""Plans by measured damage: damage of each KV head -> budget -> real window masks.

A search with real window masks chooses heads near the edge of the budget; it never ends with a set that loses more
on a task than that of ``distant_mass``, on the prompts that rank the heads. The loss of the plan is measured on
held-out prompts.

Shapes: C candidate KV heads.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from headscan.analysis.plans import BudgetRequest, HeadPlan, KeepScores, PlanError, WindowHeads, allocate
from headscan.kv.kept_keys import KeptKeys, Window
from headscan.pipelines.kv.damage.calibration_prompts import Prompts
from headscan.pipelines.kv.damage.damage_measurement import MeasureConfig, Measurement
from headscan.pipelines.kv.damage.masked_losses import ALL_KEYS
from headscan.pipelines.kv.damage.window_search import WindowSearch, edge
from headscan.pipelines.kv.damage.window_widths import smallest_windows
from headscan.pipelines.runs.run_context import RunContext
from headscan.sizing.window_candidates import KvHead


@dataclass(frozen=True)
class LossLimit:
    """Budget: the most windows whose real loss stays within a limit.

    Attributes:
        max_loss: Largest increase in nats per scored token, on text and on each recall task. The prompts are those that
            rank the heads; on held-out prompts the increase may be larger.

    Raises:
        PlanError: It is not above 0.
    """

    max_loss: float

    def __post_init__(self) -> None:
        if not self.max_loss > 0:
            raise PlanError(f"max_loss out of range: {self.max_loss:g} (limit above 0). Raise `max_loss`")

    def allows(self, increases: Mapping[str, float]) -> bool:
        """Return True if no loss increase exceeds the limit."""
        return max(increases.values()) <= self.max_loss


def measured_plan(
    context: RunContext,
    config: MeasureConfig,
    budget: BudgetRequest | LossLimit,
    *,
    say: Callable[[str], None] = lambda line: None,
) -> HeadPlan:
    """Make a plan whose keep-scores are the measured damage of a window on each KV head.

    Args:
        context: The model and a pool of its replicas.
        say: Called with lines for the user.

    Raises:
        PlanError: A budget out of reach, or texts longer than the model's context.
        UnsupportedModelError: No KV head can keep a window, or the model computes its own attention weights.
        SequenceError: Texts are not longer than the window.
        NotFiniteError: A loss or damage is NaN or infinite.
    """
    measurement = Measurement.of(context, config, say)
    widths = f"{len(config.windows)} width{'s' * (len(config.windows) > 1)}"
    say(f"damage of a window on {len(measurement.heads)} KV heads, {widths}")
    estimates = {window: measurement.damages(window) for window in config.windows}
    chosen = smallest_windows({window: list(found.values()) for window, found in estimates.items()})
    windows = dict(zip(measurement.heads, chosen, strict=True))
    damage = {
        kind: np.array([estimates[window][kind][index] for index, window in enumerate(chosen)])
        for kind in estimates[chosen[0]]
    }
    scores = measurement.scores(damage, windows)
    count, plan = _within(measurement, scores, windows, budget)
    if config.confirm and count > 0:
        say("choosing the KV heads near the budget's edge with window masks")
        scores, note = _searched(measurement, scores, windows, damage, count)
        wanted = WindowHeads(count) if isinstance(budget, LossLimit) else budget
        better = _allocated(scores, wanted, config, windows)
        # Another choice of doubtful heads may exceed a limit that the first one keeps.
        if not isinstance(budget, LossLimit) or _keeps(budget, measurement, KeptKeys.of_plan(better)):
            plan = replace(better, notes=(note, *better.notes))
    return _with_loss(measurement, plan, budget)


def _allocated(
    scores: KeepScores, budget: BudgetRequest, config: MeasureConfig, windows: dict[KvHead, Window]
) -> HeadPlan:
    widest = config.windows[-1]
    widths = {head: (window.sink, window.recent) for head, window in windows.items()}
    return allocate(scores, budget, sink=widest.sink, recent=widest.recent, windows=widths)


def _within(
    measurement: Measurement, scores: KeepScores, windows: dict[KvHead, Window], budget: BudgetRequest | LossLimit
) -> tuple[int, HeadPlan]:
    """Return the number of windows within a budget, and the plan."""
    if not isinstance(budget, LossLimit):
        plan = _allocated(scores, budget, measurement.config, windows)
        return len(plan.window_heads), plan
    # Bisection assumes that more windows lose more.
    least, most = 0, len(scores.order)
    while least < most:
        middle = (least + most + 1) // 2
        kept = KeptKeys.of([(*head, windows[head]) for head in scores.order[:middle]])
        if _keeps(budget, measurement, kept):
            least = middle
        else:
            most = middle - 1
    return least, _allocated(scores, WindowHeads(least), measurement.config, windows)


def _keeps(limit: LossLimit, measurement: Measurement, kept: KeptKeys) -> bool:
    """Return True if windows keep a limit on the prompts that rank the heads."""
    return limit.allows(_increases(measurement, measurement.ranking, kept))


def _increases(measurement: Measurement, prompts: Sequence[Prompts], kept: KeptKeys) -> dict[str, float]:
    """Return the loss increase of windows by task, in nats per scored token."""
    losses = measurement.losses(prompts, [ALL_KEYS, kept])
    return {task: float(values[1] - values[0]) for task, values in losses.items()}


def _searched(
    measurement: Measurement,
    scores: KeepScores,
    windows: dict[KvHead, Window],
    damage: Mapping[str, np.ndarray],
    count: int,
) -> tuple[KeepScores, str]:
    """Return scores in whose order the best set of windows comes first, and a note about the search."""
    full = measurement.nats(measurement.ranking, [ALL_KEYS])

    def increases(sets: Sequence[KeptKeys]) -> list[dict[str, np.ndarray]]:
        nats = measurement.nats(measurement.ranking, sets)
        return [{task: nats[task][at] - full[task][0] for task in nats} for at in range(len(sets))]

    totals = [float(np.clip(values, 0, None).sum()) or 1.0 for values in damage.values()]
    bytes_of = {layer.layer: layer.kv_bytes for layer in measurement.model.layers}
    distant = measurement.distant_order(measurement.config.windows[0])
    search = WindowSearch(
        increases,
        windows,
        (totals[0], totals[-1]),
        {head: (bytes_of[head[0]], windows[head]) for head in windows},
        None if distant is None else frozenset(distant[:count]),
    )
    chosen = search.best(scores.order, count)
    doubtful = edge(scores.order, chosen)
    flips = np.array(search.flips(chosen, doubtful))
    confirmed = {kind: np.full(len(measurement.heads), np.nan) for kind in damage}
    for values, flipped in zip(confirmed.values(), flips.T, strict=True):
        values[[measurement.heads.index(head) for head in doubtful]] = flipped
    moved = len(chosen - set(scores.order[:count]))
    note = (
        f"{search.measured} sets of windows were measured with window masks; {moved} of {count} windows are not among"
        " the lowest estimates"
    )
    return measurement.scores(damage, windows, confirmed, chosen), note


def _with_loss(measurement: Measurement, plan: HeadPlan, budget: BudgetRequest | LossLimit) -> HeadPlan:
    """Return the plan with its loss on held-out prompts."""
    kept = KeptKeys.of_plan(plan)
    found: dict[str, float] = {each.task: 0.0 for each in measurement.held_out}
    if kept.windows:
        found = _increases(measurement, measurement.held_out, kept)
    listed = ", ".join(f"{value:+.4f} on {task}" for task, value in found.items())
    note = f"loss with the plan's windows, on held-out prompts: {listed} nats per token"
    if isinstance(budget, LossLimit) and not budget.allows(found):
        note += f"; this exceeds the limit of {budget.max_loss:g}, which holds on the prompts that rank the heads"
    return replace(
        plan,
        validation={
            "mode": "forward",
            "held_out": [{"name": each.name, "prompts": len(each.requests)} for each in measurement.held_out],
            "loss_increase": found,
            "max_loss": budget.max_loss if isinstance(budget, LossLimit) else None,
        },
        notes=(note, *plan.notes),
    )
