"""The choice of heads: everything that budgets and methods share is computed once."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from itertools import chain

from headscan.errors import PruningError
from headscan.grid import Head
from headscan.models.loaded_model import LoadedModel
from headscan.pruning.calibration import Calibration
from headscan.pruning.edited_model import NO_EDITS
from headscan.pruning.repair.repair import RepairConfig, Repaired, repaired_model
from headscan.pruning.selection.divergence import Divergence
from headscan.pruning.selection.layer_moments import LayerMoments, layer_moments
from headscan.pruning.selection.local_search import RepairedDamage, best_nearby
from headscan.pruning.selection.stage import Stage
from headscan.pruning.selection.units import Unit, find_units

METHODS = ("damage", "random", "layer-drop")


@dataclass(frozen=True)
class SelectionConfig:
    """Effort of the choice.

    Attributes:
        moment_tokens: Calibration tokens of the moments and of the repair between stages.
        curve_tokens: Calibration tokens of the measured curves.
        first_share: Largest share of units that the first stage chooses.
        next_share: Share of units that each further stage adds.
        tries: Choices near the best one that are repaired and compared with it.
        judged_tokens: Calibration tokens of this comparison; the last ones, so that others repair.
    """

    moment_tokens: int = 16384
    curve_tokens: int = 8192
    first_share: float = 0.4
    next_share: float = 0.1
    tries: int = 12
    judged_tokens: int = 8192


#: The least effort: no comparison of whole choices, and curves of fewer tokens.
QUICK = SelectionConfig(curve_tokens=4096, tries=0)


class HeadSelection:
    """Heads to remove from a model, for any budget.

    The method ``damage`` measures how much each number of removed units damages each layer, after repair, and finds the
    best numbers for the whole model. Above ``first_share`` it repairs the model and measures again.

    Args:
        lm: The model.
        calibration: The texts.
        unit: What is removed together: a query head, a group that shares a KV head, or a layer.
        config: Effort.
        say: Called with lines of progress.

    Raises:
        UnsupportedModelError: In `choose`: the model has no blocks that run one after another, or is quantised.
    """

    def __init__(
        self,
        lm: LoadedModel,
        calibration: Calibration,
        *,
        unit: Unit = "head",
        config: SelectionConfig = SelectionConfig(),
        say: Callable[[str], None] = lambda line: None,
    ) -> None:
        self._lm, self._calibration, self._config, self._say = lm, calibration, config, say
        self._unit: Unit = unit
        self.units = find_units(lm.grid, unit)
        self._stages: list[Stage] = []
        self._chosen: dict[int, tuple[Head, ...]] = {}

    @property
    def total(self) -> int:
        """Number of units of the model."""
        return sum(map(len, self.units.values()))

    def choose(self, *, method: str = "damage", count: int, seed: int = 0) -> tuple[Head, ...]:
        """Return the heads of ``count`` units, sorted.

        Args:
            method: ``damage``, ``random``, or ``layer-drop`` (damage of whole layers, the control of LLM-Drop).
            count: Number of units; of layers for ``layer-drop``.
            seed: Seed of method random.

        Raises:
            PruningError: The method is unknown, or the count out of range.
        """
        if not 0 <= count < self.total:
            raise PruningError(f"{count} units to remove (limit {self.total - 1} of {self.total}). Remove fewer")
        if count == 0:
            return ()
        if method == "random":
            every = list(chain.from_iterable(self.units.values()))
            return tuple(sorted(chain.from_iterable(random.Random(seed).sample(every, count))))
        if method == "layer-drop" and self._unit != "layer":
            return self._layers.choose(count=count)
        if method not in METHODS:
            raise PruningError(f"unknown method {method!r}. Choose one of {', '.join(METHODS)}")
        if count not in self._chosen:
            self._chosen[count] = self._least_damage(count)
        return self._chosen[count]

    def _least_damage(self, count: int) -> tuple[Head, ...]:
        while not self._stages or self._most < count:
            self._stages.append(self._next_stage())
        stage = next(each for each in self._stages if each.units + each.more >= count)
        counts = stage.choose(count - stage.units)
        if not self._config.tries:
            return stage.heads(counts)
        self._say(f"comparing up to {self._config.tries} choices of {count} {self._unit}s near the best one")
        return best_nearby(stage, counts, self._repaired_damage, self._config.tries)

    @cached_property
    def _layers(self) -> HeadSelection:
        found = HeadSelection(self._lm, self._calibration, unit="layer", config=self._config, say=self._say)
        # The original's moments and predictions are the same.
        found._divergence, found._original = self._divergence, self._original
        if self._config.tries:
            found._repaired_damage = self._repaired_damage
        return found

    @cached_property
    def _divergence(self) -> Divergence:
        return Divergence(self._lm, self._calibration.first(self._config.curve_tokens))

    @cached_property
    def _repaired_damage(self) -> RepairedDamage:
        judged = min(self._config.judged_tokens, self._calibration.tokens // 2)
        repairing, judging = self._calibration.split(judged)
        return RepairedDamage(self._lm, repairing.first(self._config.moment_tokens), judging)

    @cached_property
    def _original(self) -> dict[int, LayerMoments]:
        return layer_moments(self._lm, self._calibration.first(self._config.moment_tokens))

    @property
    def _most(self) -> int:
        """Largest number of units that the last stage can choose."""
        return self._stages[-1].units + self._stages[-1].more

    def _next_stage(self) -> Stage:
        """Measure the damage of further units on the repaired model."""
        units = self._most if self._stages else 0
        share = self._config.next_share if units else self._config.first_share
        more = min(max(1, round(share * self.total)), self.total - 1 - units)
        self._say(f"measuring the damage of {more} {self._unit}s more")
        if not units:
            before, moments = Repaired(NO_EDITS, {}), self._original
        else:
            last = self._stages[-1]
            texts = self._calibration.first(self._config.moment_tokens)
            removed = last.heads(last.choose(last.more))
            before = repaired_model(self._lm, texts, removed, RepairConfig(("o", "down")), all_layers=True)
            moments = layer_moments(self._lm, texts, before.edits)
        return Stage(self._lm, moments, self._divergence, self.units, before, more)
