"""Measurements for a plan: the damage of a window on each KV head, and the loss under window masks.

The first half of the prompts ranks the KV heads, the second half is held out.

Shapes: L layers, K KV heads of the widest layer, C candidate KV heads.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from headscan.analysis.plans import (
    DamageCalibration,
    DamageTexts,
    KeepScores,
    PlanError,
    PlannedModel,
    damage_scores,
    planned_model,
)
from headscan.kv.kept_keys import KeptKeys, Window
from headscan.kv.kv_damage import checked_window
from headscan.pipelines.corpora import CorpusSpec
from headscan.pipelines.kv.damage.calibration_prompts import Prompts, recall_prompts, text_prompts
from headscan.pipelines.kv.damage.masked_losses import ALL_KEYS, masked_losses
from headscan.pipelines.kv.damage.measured_damages import pool_damages, pool_needs
from headscan.pipelines.runs.identity import ModelIdentity
from headscan.pipelines.runs.progress import Progress
from headscan.pipelines.runs.run_context import RunContext
from headscan.pipelines.runs.software import code_version
from headscan.pipelines.runs.text_lengths import longest_text
from headscan.sizing.window_candidates import KvHead, candidates_of

#: Smallest share of answer tokens that the full cache gets right. Below it, a task says nothing about the heads.
ABLE = 0.1


@dataclass(frozen=True)
class MeasureConfig:
    """Settings of a damage measurement.

    Attributes:
        corpus: Ordinary text.
        sink: First tokens of a window.
        recents: Widths of recent tokens; each KV head gets the narrowest that costs hardly more than the widest.
        max_tokens: Longest text and length of the recall prompts; None uses the model's context, at most 2,048 tokens.
        sequences: Number of texts; one half ranks the heads, the other is held out.
        recall_prompts: Number of prompts of each recall task, a multiple of 8; 0 measures no recall.
        gates: Values of the gates of `kv_damages`.
        confirm: Search for better windows near the budget's edge with real window masks.
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
        """Return the length of the longest text and of the recall prompts.

        Raises:
            SequenceError: It exceeds the model's context.
        """
        return longest_text(identity, self.max_tokens)


@dataclass(frozen=True)
class Measurement:
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
    def of(cls, context: RunContext, config: MeasureConfig, say: Callable[[str], None]) -> Measurement:
        identity, facts = context.identity, context.facts
        model, _ = planned_model(
            {
                **identity.columns(),
                "run_id": "of the loaded model",
                "grid": facts.sites,
                "num_layers": facts.grid.num_layers,
                "dtype": facts.dtype,
            },
            equal_groups=False,
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

    def _able(self, say: Callable[[str], None]) -> Measurement:
        """Leave out recall tasks that the model cannot do with its full cache."""
        able, notes = [0], []
        for index, prompts in enumerate(self.ranking[1:], 1):
            share = self._losses(prompts, [ALL_KEYS])[1]
            if share >= ABLE:
                able.append(index)
                continue
            notes.append(
                f"{prompts.name} is left out: with its full cache the model gets {share:.0%} of the answer tokens"
                f" right (at least {ABLE:.0%})"
            )
            say(notes[-1])
        ranking, held_out = (tuple(each[index] for index in able) for each in (self.ranking, self.held_out))
        return Measurement(self.context, self.config, self.model, self.heads, ranking, held_out, tuple(notes))

    def damages(self, window: Window) -> dict[str, np.ndarray]:
        """Return the mean damage (C,) of a window on text and on recall prompts."""
        pool = self.context.pool
        passes = 1 + len(self.heads) if pool.staged else 1
        total = passes * sum(len(prompts.requests) for prompts in self.ranking)
        with Progress(f"damage of {window.recent} recent tokens", total, "prompts") as progress:
            found = [
                pool_damages(
                    pool,
                    prompts.requests,
                    window,
                    self.heads,
                    gates=self.config.gates,
                    batch_tokens=self.config.batch_tokens,
                    rope=self.context.identity.rope_lengths,
                    progress=progress.update,
                ).mean(0, dtype=np.float64)
                for prompts in self.ranking
            ]
        return text_and_recall(found)

    def distant_order(self, window: Window) -> list[KvHead] | None:
        """Return the candidates in the order of method ``distant_mass`` on the ranking texts.

        None stands for pools that run range by range of the layers, and for heads without a number of their own.
        """
        if self.context.pool.staged:
            return None
        needs = pool_needs(self.context.pool, self.ranking[0].requests, window, self.heads)
        if not np.isfinite(needs).all():
            return None
        return [head for _, head in sorted(zip(needs.tolist(), self.heads, strict=True))]

    def losses(self, prompts: Sequence[Prompts], sets: Sequence[KeptKeys]) -> dict[str, np.ndarray]:
        """Return the mean loss under each set of windows by task."""
        return {task: nats.mean(1) for task, nats in self.nats(prompts, sets).items()}

    def nats(self, prompts: Sequence[Prompts], sets: Sequence[KeptKeys]) -> dict[str, np.ndarray]:
        """Return the loss of each prompt under each set of windows (sets, prompts) by task."""
        return {each.task: self._losses(each, sets)[0] for each in prompts}

    def _losses(self, prompts: Prompts, sets: Sequence[KeptKeys]) -> tuple[np.ndarray, float]:
        with Progress(f"windows on {prompts.name}", len(sets) * len(prompts.requests), "prompts") as progress:
            found = masked_losses(
                self.context.pool,
                prompts.requests,
                sets,
                batch_tokens=self.config.batch_tokens,
                rope=self.context.identity.rope_lengths,
                progress=progress.update,
            )
        return found.nats, float(found.greedy[0].mean())

    def scores(
        self,
        damage: Mapping[str, np.ndarray],
        windows: Mapping[KvHead, Window],
        confirmed: Mapping[str, np.ndarray] | None = None,
        chosen: Collection[KvHead] = (),
    ) -> KeepScores:
        """Return keep-scores from damages (C,).

        Args:
            windows: Window with which each head's damage was measured.
            confirmed: Damages with all other heads as planned; None if no head was confirmed.
            chosen: Heads that get a window before all others.
        """
        tables = {kind: self._table(values) for kind, values in damage.items()}
        for kind, values in (confirmed or {}).items():
            tables[f"confirmed_{kind}"] = self._table(values)
        return damage_scores(
            self.model,
            tables.pop("text"),
            tables.pop("recall", None),
            calibration=self._calibration(),
            recents={head: window.recent for head, window in windows.items()},
            confirmed_text=tables.get("confirmed_text"),
            confirmed_recall=tables.get("confirmed_recall"),
            chosen=chosen,
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


def text_and_recall(found: Sequence[np.ndarray]) -> dict[str, np.ndarray]:
    """Return the values on text, and the mean over recall tasks if there are any.

    Args:
        found: Values on text, then on each recall task.
    """
    text, *recall = found
    return {"text": text, "recall": np.mean(recall, 0)} if recall else {"text": text}
