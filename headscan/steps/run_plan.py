"""Plans by measured damage: damage of each KV head or layer -> budget -> real window masks.

An estimate at one head at a time may rank neighbours wrongly, and the losses of several windows do not add up. So
each head near the budget's edge is flipped, with all others as they are, and exchanges are tried, on a few of the
prompts. The best exchanges are measured on all prompts, and the best one is made, as long as that lowers the loss by
more than its standard error. The loss of the plan is measured on held-out prompts. In a plan by layer, a "head" below
is a layer, named by its first KV head. Windows are in whole blocks if the plan has them, but
without its chunks, which only widen them; the loss of the finished plan is that of both.

Shapes: C candidate KV heads, or layers.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial

import numpy as np

from headscan.catalog import RECALL_FAMILIES
from headscan.engine.prompt_losses import ALL_KEYS, Prompts
from headscan.kv.kept_keys import KeptKeys, Window
from headscan.kv.kv_damage import KvHead
from headscan.long_work import hash_of
from headscan.plans import BudgetRequest, HeadPlan, KeepScores, WindowHeads, allocate
from headscan.runs.model_identity import fingerprint
from headscan.runs.run_context import ModelContext
from headscan.settings.saving_settings import LossLimit, PlanConfig
from headscan.steps.damage_measurement import Measurement, read_prompts

#: Largest loss of a narrower window, over the mean share of damage of a KV head.
_MARGIN = 0.1


def smallest_windows(damages: Mapping[Window, Sequence[np.ndarray]]) -> list[Window]:
    """Return the narrowest window w of each KV head that costs hardly more than the widest one.

    D(w) - D(widest) <= 0.1 T / C, where D(w) = sum over the T parts (text, recall) of max(d(w), 0) / sum over heads of
    max(d(narrowest), 0). The damage of window w on a part is d(w) (C,).
    """
    windows = sorted(damages, key=lambda window: window.width)
    totals = [np.clip(part, 0, None).sum() or 1.0 for part in damages[windows[0]]]
    shares = {
        window: sum(np.clip(part, 0, None) / total for part, total in zip(damages[window], totals, strict=True))
        for window in windows
    }
    widest = shares[windows[-1]]
    margin = _MARGIN * len(totals) / len(widest)
    return [
        next(window for window in windows if shares[window][index] - widest[index] <= margin)
        for index in range(len(widest))
    ]


#: Share of the candidates on each side of the edge, and the fewest and the most heads on each side.
_SHARE, _FEWEST, _MOST = 0.1, 4, 16
#: Most exchanges that are made one after another, most that are tried for each on a few prompts, and how many of these
#: are measured on all.
_ROUNDS, _TRIES, _MEASURED = 3, 6, 2
#: Heads are flipped, and exchanges tried, on one in so many prompts of a task.
_SCREENING_PARTS = 4

#: KV heads with a window, or layers by their first KV head.
Heads = frozenset[KvHead]
#: Loss increase of each prompt by task, text first.
Increases = dict[str, np.ndarray]
#: Returns the increases under each set of windows; passes under them go on from those of a set that is alike.
MeasureSets = Callable[[Sequence[KeptKeys], KeptKeys], list[Increases]]


@dataclass
class WindowSearch:
    """A search among sets of windows; each set is measured once on the same prompts.

    Attributes:
        measure: Measures on all prompts.
        screen: Measures on a few of them.
        totals: Sums of all candidates' damage on text and on recall prompts; increases count as shares of them.
        kept: Windows of a set's heads; in a plan by layer, of all KV heads of its layers.
        kinds: What a candidate's cache costs; only heads of one kind are exchanged, so bytes stay the same.
        reference: A set by another method. The search ends with it, unless a set loses clearly less, and no more on any
            task. None sets no such limit.
    """

    measure: MeasureSets
    screen: MeasureSets
    kept: Callable[[Heads], KeptKeys]
    totals: tuple[float, float]
    kinds: Mapping[KvHead, object]
    reference: Heads | None = None
    _known: dict[Heads, Increases] = field(default_factory=dict)
    _screened: dict[Heads, Increases] = field(default_factory=dict)

    @property
    def measured(self) -> int:
        return len(self._known)

    @property
    def screened(self) -> int:
        return len(self._screened)

    def best(self, order: Sequence[KvHead], count: int) -> Heads:
        """Return the best set of ``count`` heads found, with the candidates in the order of their estimates."""
        starts = [frozenset(order[:count])]
        if self.reference is not None and self._same_bytes(starts[0], self.reference):
            starts.append(self.reference)
        else:
            self.reference = None
        self._losses(starts, starts[0])
        chosen = min(starts, key=self.value)
        for _ in range(_ROUNDS):
            exchanged = self._exchanges(chosen, edge(order, chosen))
            self._losses(exchanged, chosen)
            better = [heads for heads in exchanged if self._clearly_better(heads, chosen)]
            if not better:
                break
            chosen = min(better, key=lambda heads: (self.excess(heads), self.value(heads)))
        if self.reference is None or self._beats_reference(chosen):
            return chosen
        sets = [heads for heads in self._known if self._same_bytes(heads, chosen) and self._beats_reference(heads)]
        return min(sets, key=self.value, default=self.reference)

    def flips(self, chosen: Heads, heads: Sequence[KvHead]) -> list[tuple[float, ...]]:
        """Return the damage of each head by kind of prompt, with all others as in ``chosen``, on the prompts of
        ``screen``.
        """
        before, *after = map(means, self._tried([chosen, *(chosen ^ {head} for head in heads)], chosen))
        return [
            tuple((b - a) if head in chosen else (a - b) for b, a in zip(before, each, strict=True))
            for head, each in zip(heads, after, strict=True)
        ]

    def value(self, heads: Heads) -> float:
        """Return the loss increase of a measured set, as a share of all damage, text and recall prompts together."""
        return self._share(self._known[heads])

    def _share(self, increases: Increases) -> float:
        return sum(each / total for each, total in zip(means(increases), self.totals, strict=False))

    def excess(self, heads: Heads) -> float:
        """Return by how much a measured set loses more than the reference on single tasks, in the same shares."""
        if self.reference is None:
            return 0.0
        ours, theirs = self._known[heads], self._known[self.reference]
        more = [max(0.0, float((ours[task] - theirs[task]).mean())) for task in ours]
        return more[0] / self.totals[0] + sum(more[1:]) / self.totals[1]

    def _beats_reference(self, heads: Heads) -> bool:
        assert self.reference is not None
        return not self.excess(heads) and self._clearly_better(heads, self.reference)

    def _losses(self, sets: Sequence[Heads], base: Heads) -> None:
        """Measure those sets that are not known."""
        self._measure_new(self.measure, self._known, sets, base)

    def _tried(self, sets: Sequence[Heads], base: Heads) -> list[Increases]:
        """Return the increases on the prompts of ``screen``."""
        self._measure_new(self.screen, self._screened, sets, base)
        return [self._screened[heads] for heads in sets]

    def _measure_new(
        self, measure: MeasureSets, known: dict[Heads, Increases], sets: Sequence[Heads], base: Heads
    ) -> None:
        new = [heads for heads in dict.fromkeys(sets) if heads not in known]
        if new:
            known |= dict(zip(new, measure([self.kept(heads) for heads in new], self.kept(base)), strict=True))

    def _exchanges(self, chosen: Heads, doubtful: Sequence[KvHead]) -> list[Heads]:
        """Return sets with exchanged heads: of those that promise most by flips of single heads, the best on few
        prompts.
        """
        flipped = self._tried([chosen, *(chosen ^ {head} for head in doubtful)], chosen)[1:]
        value = dict(zip(doubtful, map(self._share, flipped), strict=True))
        pairs = sorted(
            (value[out] + value[new], out, new)
            for out in doubtful
            for new in doubtful
            if out in chosen and new not in chosen and self.kinds[out] == self.kinds[new]
        )
        apart: list[tuple[KvHead, KvHead]] = []
        for _, out, new in pairs:
            if not any(out == other[0] or new == other[1] for other in apart):
                apart.append((out, new))
        # The best pairs together, then single pairs.
        sets = [chosen.symmetric_difference(head for pair in apart[:n] for head in pair) for n in (1, 2, 3)]
        sets += [chosen ^ {out, new} for _, out, new in pairs]
        tried = list(dict.fromkeys(sets))[:_TRIES] if pairs else []
        shares = dict(zip(tried, map(self._share, self._tried(tried, chosen)), strict=True))
        return sorted(tried, key=shares.__getitem__)[:_MEASURED]

    def _clearly_better(self, heads: Heads, chosen: Heads) -> bool:
        """Return True if a set's loss is lower by more than the standard error over the prompts, which needs two
        prompts of each task.
        """
        now, before = self._known[heads], self._known[chosen]
        text, *recall = ((before[task] - now[task]) for task in now)
        parts = [(text, self.totals[0]), *((each, self.totals[1] * len(recall)) for each in recall)]
        gain = sum(float(each.mean()) / total for each, total in parts)
        if any(len(each) < 2 for each, _ in parts):
            return False
        variance = sum(float(each.var(ddof=1)) / len(each) / total**2 for each, total in parts)
        return gain > math.sqrt(variance)

    def _same_bytes(self, first: Collection[KvHead], second: Collection[KvHead]) -> bool:
        ours, theirs = (sorted(map(repr, (self.kinds[head] for head in heads))) for heads in (first, second))
        return ours == theirs


def edge(order: Sequence[KvHead], chosen: Heads) -> tuple[KvHead, ...]:
    """Return the heads around the edge of a set: its last ones in the order, and the first ones outside."""
    side = min(_MOST, max(_FEWEST, round(_SHARE * len(order))))
    inside, outside = ([head for head in order if (head in chosen) == within] for within in (True, False))
    return (*inside[-side:], *outside[:side])


def means(increases: Increases) -> tuple[float, ...]:
    """Return the mean loss increase on text, and over the recall tasks if there are any."""
    text, *recall = (float(values.mean()) for values in increases.values())
    return (text, sum(recall) / len(recall)) if recall else (text,)


def run_plan(config: PlanConfig, model: ModelContext, budget: BudgetRequest | LossLimit) -> HeadPlan:
    """Make a plan whose keep-scores are the measured damage of a window on each KV head or layer. The same call with a
    `Run` resumes.
    """
    return measured_plans(config, model, [budget])[0]


def measured_plans(
    config: PlanConfig, model: ModelContext, budgets: Sequence[BudgetRequest | LossLimit]
) -> list[HeadPlan]:
    """Make a plan for each budget from one measurement; see `run_plan`. A `Run` keeps what is measured in its
    store, so that the same call resumes, and another budget measures only what it needs in addition.
    """
    prompts = read_prompts(config, model.identity)
    facts = {
        "model": model.identity.fingerprint(),
        "dtype": model.model.dtype,
        "batch_tokens": config.batch_tokens,
        "prompts": [(each.name, hash_of(each.requests)) for each in prompts],
    }
    stored = {"model": asdict(model.model), "corpus": asdict(config.corpus), "batch_tokens": config.batch_tokens}
    record = model.record(
        "plan", fingerprint(facts), config=stored, corpus=config.corpus.name, corpus_hash=prompts[0].content_hash
    )
    with model.resumable_numbers(record) as known:
        return _plans(Measurement.of(config, model, prompts, known), budgets)


def _plans(measurement: Measurement, budgets: Sequence[BudgetRequest | LossLimit]) -> list[HeadPlan]:
    config, model = measurement.config, measurement.context
    widths = f"{len(config.windows)} width{'s' * (len(config.windows) > 1)}"
    model.say(f"damage of a window on {len(measurement.units)} {config.unit_names}, {widths}")
    estimates = {window: measurement.damages(window) for window in config.windows}
    chosen = smallest_windows({window: list(of_heads.values()) for window, of_heads in estimates.items()})
    windows = dict(zip(measurement.heads, chosen, strict=True))
    damage = {
        kind: np.array([estimates[window][kind][index] for index, window in enumerate(chosen)])
        for kind in estimates[chosen[0]]
    }
    return [_plan(measurement, windows, damage, budget) for budget in budgets]


def _plan(
    measurement: Measurement,
    windows: dict[KvHead, Window],
    damage: Mapping[str, np.ndarray],
    budget: BudgetRequest | LossLimit,
) -> HeadPlan:
    config = measurement.config
    scores = measurement.scores(damage, windows)
    count, plan = _within(measurement, scores, windows, budget)
    if config.confirm and count > 0:
        measurement.context.say(f"choosing the {config.unit_names} near the budget's edge with window masks")
        scores, note = _searched(measurement, scores, windows, damage, count)
        wanted = _heads_of(measurement, scores, count) if isinstance(budget, LossLimit) else budget
        better = _allocated(measurement, scores, wanted, windows)
        # Another choice of doubtful heads may exceed a limit that the first one keeps.
        if not isinstance(budget, LossLimit) or _keeps(budget, measurement, KeptKeys.of_plan(better)):
            plan = replace(better, notes=(note, *better.notes))
    return _with_loss(measurement, plan, budget)


def _allocated(
    measurement: Measurement, scores: KeepScores, budget: BudgetRequest, windows: dict[KvHead, Window]
) -> HeadPlan:
    widest = measurement.config.windows[-1]
    widths = {
        head: (window.sink, window.recent) for unit, window in windows.items() for head in measurement.units[unit]
    }
    return allocate(
        scores,
        budget,
        sink=widest.sink,
        recent=widest.recent,
        windows=widths,
        block=measurement.config.block,
        chunk=measurement.config.chunk,
    )


def _order(measurement: Measurement, scores: KeepScores) -> list[KvHead]:
    return [head for head in scores.order if head in measurement.units]


def _heads_of(measurement: Measurement, scores: KeepScores, count: int) -> WindowHeads:
    return WindowHeads(sum(len(measurement.units[unit]) for unit in _order(measurement, scores)[:count]))


def _within(
    measurement: Measurement, scores: KeepScores, windows: dict[KvHead, Window], budget: BudgetRequest | LossLimit
) -> tuple[int, HeadPlan]:
    """Return the number of units that get a window, and the plan."""
    if not isinstance(budget, LossLimit):
        plan = _allocated(measurement, scores, budget, windows)
        return len(measurement.units.keys() & set(plan.window_heads)), plan
    # Bisection assumes that more windows lose more.
    order = _order(measurement, scores)
    least, most = 0, len(order)
    while least < most:
        middle = (least + most + 1) // 2
        kept = measurement.kept({unit: windows[unit] for unit in order[:middle]})
        if _keeps(budget, measurement, kept):
            least = middle
        else:
            most = middle - 1
    return least, _allocated(measurement, scores, _heads_of(measurement, scores, least), windows)


def _keeps(limit: LossLimit, measurement: Measurement, kept: KeptKeys) -> bool:
    return limit.allows(_increases(measurement, measurement.ranking, kept))


def _increases(measurement: Measurement, prompts: Sequence[Prompts], kept: KeptKeys) -> dict[str, float]:
    """Return the loss increase of windows by task, in nats per scored token."""
    nats = measurement.nats(prompts, [ALL_KEYS, kept])
    return {task: np.diff(of_sets.mean(1)).item() for task, of_sets in nats.items()}


def _searched(
    measurement: Measurement,
    scores: KeepScores,
    windows: dict[KvHead, Window],
    damage: Mapping[str, np.ndarray],
    count: int,
) -> tuple[KeepScores, str]:
    """Return scores in whose order the best set of windows comes first, and a note about the search."""
    full = measurement.nats(measurement.ranking, [ALL_KEYS])

    def increases(sets: Sequence[KeptKeys], base: KeptKeys, parts: int = 1) -> list[Increases]:
        nats = measurement.nats([prompts.first_of(parts) for prompts in measurement.ranking], sets, base)
        more = {task: of_sets - full[task][0, : of_sets.shape[1]] for task, of_sets in nats.items()}
        return [{task: of_sets[at] for task, of_sets in more.items()} for at in range(len(sets))]

    totals = [float(np.clip(values, 0, None).sum()) or 1.0 for values in damage.values()]
    bytes_of = {layer.layer: layer.kv_bytes for layer in measurement.model.layers}
    distant = measurement.distant_order(measurement.config.windows[0])
    search = WindowSearch(
        increases,
        partial(increases, parts=_SCREENING_PARTS),
        lambda heads: measurement.kept({head: windows[head] for head in heads}),
        (totals[0], totals[-1]),
        {head: (bytes_of[head[0]], len(measurement.units[head]), windows[head]) for head in windows},
        None if distant is None else frozenset(distant[:count]),
    )
    order = _order(measurement, scores)
    chosen = search.best(order, count)
    doubtful = edge(order, chosen)
    flips = np.array(search.flips(chosen, doubtful))
    confirmed = {kind: np.full(len(measurement.heads), np.nan) for kind in damage}
    for values, flipped in zip(confirmed.values(), flips.T, strict=True):
        values[[measurement.heads.index(head) for head in doubtful]] = flipped
    moved = len(chosen - set(order[:count]))
    note = (
        f"{search.measured} sets of windows were measured with window masks, and {search.screened} on a part of the"
        f" prompts; {moved} of {count} {measurement.config.unit_names} with windows are not among the lowest estimates"
    )
    return measurement.scores(damage, windows, confirmed, chosen), note


def _with_loss(measurement: Measurement, plan: HeadPlan, budget: BudgetRequest | LossLimit) -> HeadPlan:
    kept = KeptKeys.of_plan(plan)
    increases: dict[str, float] = {each.task: 0.0 for each in measurement.held_out}
    if kept.windows:
        increases = _increases(measurement, measurement.held_out, kept)
    listed = ", ".join(f"{value:+.4f} on {task}" for task, value in increases.items())
    note = f"loss with the plan's windows, on held-out prompts: {listed} nats per token"
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
            "loss_increase": increases,
            "max_loss": budget.max_loss if isinstance(budget, LossLimit) else None,
        },
        notes=(note, *plan.notes),
    )
