"""Plans by measured damage: calibration prompts -> damage of each KV head -> budget -> real window masks.

The first half of the prompts ranks the KV heads. Heads near the edge of the budget are ranked again with real window
masks. The loss of the plan is measured on the second half.

Shapes: L layers, K KV heads of the widest layer, C candidate KV heads.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from headscan.analysis.plans import (
    BudgetRequest,
    DamageCalibration,
    DamageTexts,
    HeadPlan,
    KeepScores,
    PlanError,
    PlannedModel,
    WindowHeads,
    allocate,
    damage_scores,
    planned_model,
)
from headscan.kv.kept_keys import KeptKeys, Window
from headscan.kv.kv_damage import checked_window
from headscan.pipelines.corpora import CorpusSpec
from headscan.pipelines.kv.calibration_prompts import Prompts, recall_prompts, text_prompts
from headscan.pipelines.kv.doubtful_heads import doubtful_heads, flipped_windows
from headscan.pipelines.kv.masked_losses import ALL_KEYS, masked_losses
from headscan.pipelines.kv.measured_damages import pool_damages
from headscan.pipelines.kv.window_widths import smallest_windows
from headscan.pipelines.runs.identity import ModelIdentity
from headscan.pipelines.runs.run_context import RunContext
from headscan.pipelines.runs.software import code_version
from headscan.sizing.window_candidates import KvHead, candidates_of

#: Smallest share of answer tokens that the full cache gets right. Below it, a task says nothing about the heads.
_ABLE = 0.1


@dataclass(frozen=True)
class LossLimit:
    """Budget: the most windows whose real loss stays within a limit.

    Attributes:
        max_loss: Largest increase in nats per scored token, on text and on recall prompts, on held-out prompts.

    Raises:
        PlanError: It is not above 0.
    """

    max_loss: float

    def __post_init__(self) -> None:
        if not self.max_loss > 0:
            raise PlanError(f"max_loss out of range: {self.max_loss:g} (limit above 0). Raise `max_loss`")


@dataclass(frozen=True)
class MeasureConfig:
    """Settings of a damage measurement.

    Attributes:
        corpus: Ordinary text.
        sink: First tokens of a window.
        recents: Widths of recent tokens; each KV head gets the narrowest that costs hardly more than the widest.
        max_tokens: Longest text and length of the recall prompts; None uses the model's context, at most 2,048.
        sequences: Number of texts; one half ranks the heads, the other is held out.
        recall_prompts: Number of prompts of each recall task, a multiple of 8; 0 measures no recall.
        gates: Values of the gates of `kv_damages`.
        confirm: Rank the heads near the budget's edge by real window masks.
        seed: Seed of the recall prompts.
        batch_tokens: Tokens of one pass, padding included.

    Raises:
        PlanError: A number is out of range.
        PlanMismatchError: A window is out of range.
    """

    corpus: CorpusSpec = field(default_factory=lambda: CorpusSpec("python-stdlib"))
    sink: int = 4
    recents: tuple[int, ...] = (256,)
    max_tokens: int | None = None
    sequences: int = 64
    recall_prompts: int = 32
    gates: tuple[float, ...] = (0.5,)
    confirm: bool = True
    seed: int = 0
    batch_tokens: int = 8192

    def __post_init__(self) -> None:
        if not self.recents:
            raise PlanError("recent names no width. Give at least one")
        for recent in self.recents:
            checked_window(self.sink, recent)
        if self.sequences < 2:
            raise PlanError(f"sequences={self.sequences} (limit 2, one to measure and one held out). Raise `sequences`")
        if self.recall_prompts < 0 or self.recall_prompts % 8:
            raise PlanError(f"recall_prompts={self.recall_prompts} (limit 0 or a multiple of 8). Change it")

    @property
    def windows(self) -> tuple[Window, ...]:
        """Windows, narrowest first."""
        return tuple(Window(self.sink, recent) for recent in sorted(set(self.recents)))

    def tokens(self, identity: ModelIdentity) -> int:
        """Return the length of the longest text and of the recall prompts."""
        return min(self.max_tokens or 2048, identity.max_tokens or 2048)


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
        PlanError: A budget out of reach.
        UnsupportedModelError: No KV head can keep a window, or the model computes its own attention weights.
        SequenceError: Texts are not longer than the window.
    """
    measurement = _Measurement.of(context, config, say)
    say(f"damage of a window on {len(measurement.heads)} KV heads, {len(config.windows)} widths")
    estimates = {window: measurement.damages(window) for window in config.windows}
    chosen = smallest_windows({window: list(found.values()) for window, found in estimates.items()})
    windows = dict(zip(measurement.heads, chosen, strict=True))
    damage = {
        kind: np.array([estimates[window][kind][index] for index, window in enumerate(chosen)])
        for kind in estimates[chosen[0]]
    }
    scores = measurement.scores(damage)
    count, plan = _within(measurement, scores, windows, budget)
    if config.confirm and count > 0:
        say("confirming the KV heads near the budget's edge with window masks")
        confirmed = _confirmed(measurement, scores, windows, count)
        scores = measurement.scores(damage, confirmed)
        plan = _allocated(scores, WindowHeads(count) if isinstance(budget, LossLimit) else budget, config, windows)
    return _with_loss(measurement, plan, budget)


@dataclass(frozen=True)
class _Measurement:
    """Model, prompts and settings of a measurement.

    Attributes:
        ranking, held_out: Prompts that rank the heads, and prompts on which plans are measured.
        notes: Limitations of the measurement.
    """

    context: RunContext
    config: MeasureConfig
    model: PlannedModel
    heads: tuple[KvHead, ...]
    ranking: tuple[Prompts, ...]
    held_out: tuple[Prompts, ...]
    notes: tuple[str, ...]

    @classmethod
    def of(cls, context: RunContext, config: MeasureConfig, say: Callable[[str], None]) -> _Measurement:
        identity, facts = context.identity, context.facts
        model, _ = planned_model(
            {
                **identity.columns(),
                "run_id": "of the loaded model",
                "grid": facts.sites,
                "num_layers": facts.grid.num_layers,
                "dtype": facts.dtype,
            }
        )
        heads = candidates_of(facts.grid, (facts.caches or {}).get("self", ()), identity.name)
        tokens = config.tokens(identity)
        prompts = [text_prompts(config.corpus, identity, tokens, config.sequences, config.windows[-1].width)]
        if config.recall_prompts:
            prompts += recall_prompts(identity, tokens, config.recall_prompts, config.seed)
        halves = [each.halves() for each in prompts]
        found = cls(
            context, config, model, heads, tuple(half for half, _ in halves), tuple(half for _, half in halves), ()
        )
        return found._able(say)

    def _able(self, say: Callable[[str], None]) -> _Measurement:
        """Leave out recall tasks that the model cannot do with its full cache."""
        able, notes = [0], []
        for index, prompts in enumerate(self.ranking[1:], 1):
            share = self._losses(prompts, [ALL_KEYS])[1]
            if share >= _ABLE:
                able.append(index)
                continue
            notes.append(
                f"{prompts.name} is left out: with its full cache the model gets {share:.0%} of the answer tokens"
                f" right (at least {_ABLE:.0%})"
            )
            say(notes[-1])
        ranking, held_out = (tuple(each[index] for index in able) for each in (self.ranking, self.held_out))
        return _Measurement(self.context, self.config, self.model, self.heads, ranking, held_out, tuple(notes))

    def damages(self, window: Window) -> dict[str, np.ndarray]:
        """Return the mean damage (C,) of a window on text and on recall prompts."""
        found = [
            pool_damages(
                self.context.pool,
                prompts.requests,
                window,
                self.heads,
                gates=self.config.gates,
                batch_tokens=self.config.batch_tokens,
                rope=self.context.identity.rope_lengths,
            ).mean(0, dtype=np.float64)
            for prompts in self.ranking
        ]
        return _parts(found)

    def losses(self, prompts: Sequence[Prompts], sets: Sequence[KeptKeys]) -> dict[str, np.ndarray]:
        """Return the mean loss under each set of windows, on text and on recall prompts."""
        return _parts([self._losses(each, sets)[0] for each in prompts])

    def _losses(self, prompts: Prompts, sets: Sequence[KeptKeys]) -> tuple[np.ndarray, float]:
        found = masked_losses(
            self.context.pool,
            prompts.requests,
            sets,
            batch_tokens=self.config.batch_tokens,
            rope=self.context.identity.rope_lengths,
        )
        return found.nats.mean(1), float(found.greedy[0].mean())

    def scores(self, damage: dict[str, np.ndarray], confirmed: dict[str, np.ndarray] | None = None) -> KeepScores:
        """Return keep-scores from damages (C,) and, where they are known, confirmed damages."""
        tables = {kind: self._table(values) for kind, values in damage.items()}
        for kind, values in (confirmed or {}).items():
            tables[f"confirmed_{kind}"] = self._table(values)
        return damage_scores(
            self.model,
            tables.pop("text"),
            tables.pop("recall", None),
            calibration=self._calibration(),
            confirmed_text=tables.get("confirmed_text"),
            confirmed_recall=tables.get("confirmed_recall"),
            notes=self.notes,
        )

    def _table(self, values_C: np.ndarray) -> np.ndarray:
        widest = max(layer.num_key_value_heads for layer in self.model.layers)
        table_LK = np.full((self.model.num_layers, widest), np.nan)
        for (layer, kv_head), value in zip(self.heads, values_C, strict=True):
            table_LK[layer, kv_head] = value
        return table_LK

    def _calibration(self) -> DamageCalibration:
        facts = self.context.facts
        points = () if self.context.pool.staged else self.config.gates
        return DamageCalibration(
            texts=tuple(
                DamageTexts(each.task, each.name, each.content_hash, len(each.requests), each.tokens, points)
                for each in self.ranking
            ),
            sink=self.config.sink,
            recent=self.config.windows[0].recent,
            dtype=facts.dtype,
            attention_path=facts.attention_path,
            code_version=code_version(),
            seed=self.config.seed,
        )


def _parts(found: Sequence[np.ndarray]) -> dict[str, np.ndarray]:
    """Return the values on text, and the mean over recall tasks if there are any."""
    text, *recall = found
    return {"text": text, "recall": np.mean(recall, 0)} if recall else {"text": text}


def _allocated(
    scores: KeepScores, budget: BudgetRequest, config: MeasureConfig, windows: dict[KvHead, Window]
) -> HeadPlan:
    widest = config.windows[-1]
    widths = {head: (window.sink, window.recent) for head, window in windows.items()}
    return allocate(scores, budget, sink=widest.sink, recent=widest.recent, windows=widths)


def _within(
    measurement: _Measurement, scores: KeepScores, windows: dict[KvHead, Window], budget: BudgetRequest | LossLimit
) -> tuple[int, HeadPlan]:
    """Return the number of windows within a budget, and the plan."""
    if not isinstance(budget, LossLimit):
        plan = _allocated(scores, budget, measurement.config, windows)
        return len(plan.window_heads), plan
    # The loss grows with the number of windows, so the largest number within the limit can be bisected.
    least, most = 0, len(scores.order)
    while least < most:
        middle = (least + most + 1) // 2
        kept = KeptKeys.of([(*head, windows[head]) for head in scores.order[:middle]])
        if max(_increases(measurement, kept).values()) <= budget.max_loss:
            least = middle
        else:
            most = middle - 1
    return least, _allocated(scores, WindowHeads(least), measurement.config, windows)


def _increases(measurement: _Measurement, kept: KeptKeys) -> dict[str, float]:
    """Return the loss increase of windows on held-out prompts, in nats per scored token."""
    losses = measurement.losses(measurement.held_out, [ALL_KEYS, kept])
    return {kind: float(values[1] - values[0]) for kind, values in losses.items()}


def _confirmed(
    measurement: _Measurement, scores: KeepScores, windows: dict[KvHead, Window], count: int
) -> dict[str, np.ndarray]:
    """Return the damage (C,) of the doubtful heads with all other heads as planned; NaN for the others."""
    doubtful = doubtful_heads(scores.order, count)
    planned = frozenset(scores.order[:count])
    losses = measurement.losses(measurement.ranking, flipped_windows(windows, tuple(planned), doubtful))
    found = {}
    for kind, values in losses.items():
        found[kind] = np.full(len(measurement.heads), np.nan)
        for head, flipped in zip(doubtful, values[1:], strict=True):
            change = values[0] - flipped if head in planned else flipped - values[0]
            found[kind][measurement.heads.index(head)] = change
    return found


def _with_loss(measurement: _Measurement, plan: HeadPlan, budget: BudgetRequest | LossLimit) -> HeadPlan:
    """Return the plan with its loss on held-out prompts."""
    kept = KeptKeys.of_plan(plan)
    found = dict.fromkeys(("text", "recall")[: len(measurement.held_out)], 0.0)
    if kept.windows:
        found = _increases(measurement, kept)
    note = ", ".join(f"{value:+.4f} on {kind}" for kind, value in found.items())
    return replace(
        plan,
        validation={
            "mode": "forward",
            "held_out": [{"name": each.name, "prompts": len(each.requests)} for each in measurement.held_out],
            "loss_increase": found,
            "max_loss": budget.max_loss if isinstance(budget, LossLimit) else None,
        },
        notes=(f"loss with the plan's windows, on held-out prompts: {note} nats per token", *plan.notes),
    )
