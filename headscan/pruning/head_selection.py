"""The choice of heads, groups that share a KV head, or whole layers: budgets and methods share what is computed once.

A stage finds the best numbers of units by layer, given the heads that other layers lack. Damages of layers do not
quite add up, so choices near the best one are repaired and compared.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import cached_property
from itertools import chain, pairwise, permutations
from math import isfinite

from headscan.catalog import DAMAGE, LAYER_DROP, RANDOM
from headscan.errors import PruningError
from headscan.grid import Head, Unit, find_units
from headscan.long_work import LongWork
from headscan.models.loaded_model import LoadedModel
from headscan.pruning.calibration import Calibration
from headscan.pruning.damage_curve import DamageCurve, LayerMoments, layer_moments
from headscan.pruning.edited_model import NO_EDITS, Divergence
from headscan.pruning.repair import RepairConfig, Repaired, repaired_model
from headscan.pruning.selection_settings import SelectionConfig
from headscan.text_tables import counted

#: Numbers of removed units that each layer may have; a layer without an entry may have any.
Allowed = Mapping[int, Collection[int]]


def allocate_units(
    curves: Mapping[int, Sequence[float]], most: int, allowed: Allowed | None = None
) -> list[dict[int, int]]:
    """Return the numbers of removed units by layer with the least summed damage, for every budget from 0 to ``most``
    units. Dynamic programming over layers: exact for damages (of removing 0, 1, 2, ... units of a layer) that add up.
    ``allowed`` numbers include 0. If they cannot add up to a budget, its choice is that of the next smaller budget.
    """
    units = sum(len(curve) - 1 for curve in curves.values())
    if most > units:
        raise PruningError(f"{most} units to remove (limit {units}, all of the curves). Remove fewer")
    if wrong := [layer for layer, curve in curves.items() if not all(isfinite(damage) for damage in curve)]:
        raise PruningError(f"layer {wrong[0]} has a damage of NaN or infinity. Load the model in another `dtype`")
    infinite = float("inf")
    best = [0.0] + [infinite] * most
    choice: list[dict[int, int]] = [{} for _ in range(most + 1)]
    for layer, curve in curves.items():
        extended = [infinite] * (most + 1)
        chosen: list[dict[int, int]] = [{} for _ in range(most + 1)]
        for total in range(most + 1):
            for count in range(min(total, len(curve) - 1) + 1):
                if allowed is not None and count not in allowed.get(layer, (count,)):
                    continue
                damage = best[total - count] + curve[count]
                if damage < extended[total]:
                    extended[total] = damage
                    chosen[total] = choice[total - count] | ({layer: count} if count else {})
        best, choice = extended, chosen
    for total in range(1, most + 1):
        if best[total] == infinite:
            choice[total] = choice[total - 1]
    return choice


def allocate_ranked(
    units: Mapping[int, Sequence[tuple[Head, ...]]],
    ranks: Mapping[tuple[Head, ...], float],
    count: int,
    allowed: Allowed,
) -> tuple[Head, ...]:
    """Return the heads of at most ``count`` units, sorted, in allowed numbers by layer: those with the smallest sum of
    ranks. In each layer the units of the lowest ranks go first.
    """
    ordered = {layer: sorted(of_layer, key=ranks.__getitem__) for layer, of_layer in units.items()}
    curves = {
        layer: [sum(map(ranks.__getitem__, of_layer[:number])) for number in range(len(of_layer) + 1)]
        for layer, of_layer in ordered.items()
    }
    numbers = allocate_units(curves, count, allowed)[-1]
    return tuple(sorted(head for layer, number in numbers.items() for unit in ordered[layer][:number] for head in unit))


#: Numbers of removed units by layer.
Counts = Mapping[int, int]


class SelectionStage:
    """The best choices around a model with some units removed, ``before``, with the sums of all layers. Each layer is
    chosen again, given what the other layers lack. Its damage is measured for the numbers of units that the wanted
    choices use and for their neighbours alone.

    Attributes:
        units: Number of units that the model lacks before.
        more: Largest number of further units that can be chosen.
    """

    def __init__(
        self,
        lm: LoadedModel,
        moments: Mapping[int, LayerMoments],
        divergence: Divergence,
        units: Mapping[int, Sequence[tuple[Head, ...]]],
        before: Repaired,
        more: int,
        work: LongWork | None = None,
        allowed: Allowed | None = None,
    ) -> None:
        self._divergence, self._before = divergence, before.edits
        work = work or LongWork()
        self.curves: dict[int, DamageCurve] = {}
        sites = [site for site in lm.grid.sites if units[site.layer]]
        with work.steps("best subsets of heads", len(sites), "layer") as done:
            for site in sites:
                of_layer = (moments[site.layer], units[site.layer])
                numbers = None if allowed is None else allowed[site.layer]
                self.curves[site.layer] = DamageCurve(lm, site, *of_layer, before, more, work.known, numbers)
                done()
        self.units = sum(curve.now for curve in self.curves.values())
        self._spare = self.units - sum(curve.least for curve in self.curves.values())
        # A stage adds a few units a layer, so many layers with few units may allow fewer than wanted.
        self.more = min(more, sum(len(curve.damages) - 1 for curve in self.curves.values()) - self._spare)
        if allowed is not None:
            self.more = sum(self._allocated(self.more).values()) - self.units

    def _allocated(self, further: int) -> Counts:
        """Return the numbers of all removed units by layer with the least damage, measured or estimated."""
        damages = {layer: curve.damages for layer, curve in self.curves.items()}
        allowed = {layer: [count - curve.least for count in curve.counts] for layer, curve in self.curves.items()}
        added = allocate_units(damages, self._spare + further, allowed)[-1]
        return {layer: curve.least + added.get(layer, 0) for layer, curve in self.curves.items()}

    def choose(self, further: int) -> Counts:
        """Return the best numbers of all removed units by layer, with so many further ones removed; with slightly fewer
        if the allowed numbers of the layers do not add up to so many.
        """
        while True:
            counts = self._allocated(further)
            missing = {
                layer: curve.candidates(curve.unmeasured(curve.around(counts[layer])))
                for layer, curve in self.curves.items()
            }
            missing = {layer: subsets for layer, subsets in missing.items() if subsets}
            if not missing:
                return counts
            candidates = {
                layer: [self.curves[layer].candidate(subset) for subset in subsets]
                for layer, subsets in missing.items()
            }
            for layer, divergences in self._divergence.of_layers(candidates, self._before).items():
                self.curves[layer].add(missing[layer], divergences)

    def heads(self, counts: Counts) -> tuple[Head, ...]:
        """Return the best heads for measured numbers of units, sorted."""
        return tuple(sorted(head for layer, curve in self.curves.items() for head in curve.heads(counts[layer])))

    def near(self, counts: Counts) -> list[Counts]:
        """Return the choices that differ by one step of as many units in two layers, least summed damage first."""
        nearby = []
        for fewer, more in permutations(self.curves, 2):
            less = self.curves[fewer].around(counts[fewer])[0]
            other = {**counts, fewer: less, more: counts[more] + counts[fewer] - less}
            is_step = other[more] == self.curves[more].around(counts[more])[-1] != counts[more]
            if is_step and all(self.curves[layer].is_measured(other[layer]) for layer in (fewer, more)):
                nearby.append(other)
        return sorted(nearby, key=self._damage)

    def _damage(self, counts: Counts) -> float:
        return sum(curve.damages[counts[layer] - curve.least] for layer, curve in self.curves.items())


class RepairedDamage:
    """The divergence of a model without some heads, repaired on other texts than it is measured on. Choices that
    ``work`` knows are not measured.
    """

    def __init__(
        self, lm: LoadedModel, repairing: Calibration, judging: Calibration, work: LongWork | None = None
    ) -> None:
        self._lm, self._repairing, self._judging, self._work = lm, repairing, judging, work or LongWork()

    @cached_property
    def _divergence(self) -> Divergence:
        return Divergence(self._lm, self._judging, self._work)

    def __call__(self, removed: tuple[Head, ...]) -> float:
        """Return the divergence in nats per token."""

        def measure() -> float:
            repaired = repaired_model(self._lm, self._repairing, removed, RepairConfig(("o", "down")))
            return self._divergence.of(repaired.edits)

        return float(self._work.known.measured(("divergence of a repaired choice", removed), measure)[0])


def best_nearby(
    stage: SelectionStage,
    counts: Counts,
    damage: Callable[[tuple[Head, ...]], float],
    tries: int,
    done: Callable[[], object] = lambda: None,
) -> tuple[Head, ...]:
    """Return the heads of the best choice that moving single units finds from ``counts`` on, in at most ``tries``.
    ``done`` is called after each.
    """
    best = stage.heads(counts)
    least, seen = damage(best), {best}
    done()
    while True:
        for other in stage.near(counts):
            heads = stage.heads(other)
            if heads in seen:
                continue
            if len(seen) > tries:
                return best
            seen.add(heads)
            loss = damage(heads)
            done()
            if loss < least:
                best, least, counts = heads, loss, other
                break
        else:
            return best


_USUAL = SelectionConfig()


class _Original:
    """Measurements of the original model on calibration texts, which choices of any unit share; each is made when it is
    first needed.
    """

    def __init__(self, lm: LoadedModel, calibration: Calibration, config: SelectionConfig, work: LongWork) -> None:
        self._lm, self._calibration, self._config, self._work = lm, calibration, config, work

    @cached_property
    def divergence(self) -> Divergence:
        return Divergence(self._lm, self._calibration.first(self._config.curve_tokens), self._work)

    @cached_property
    def moments(self) -> dict[int, LayerMoments]:
        return layer_moments(self._lm, self._calibration.first(self._config.moment_tokens), steps=self._work.steps)

    @cached_property
    def repaired_damage(self) -> RepairedDamage:
        judged = min(self._config.judged_tokens, self._calibration.tokens // 2)
        repairing, judging = self._calibration.split(judged)
        repairing = repairing.first(self._config.moment_tokens)
        return RepairedDamage(self._lm, repairing, judging, self._work)


class HeadSelection:
    """Heads, groups that share a KV head, or layers to remove from a model, for any budget.

    The method ``damage`` measures how much each number of removed units damages each layer, after repair, and finds the
    best numbers for the whole model. Above ``first_share`` it repairs the model and measures again.

    Damages that ``work`` knows are not measured; all its numbers must be of this model and calibration, and of the same
    numbers of tokens in ``config``. Moments and repairs between the stages are too large to keep.

    ``allowed`` limits the numbers of units that each layer may lose, which include 0. If the allowed numbers cannot add
    up to a count, the choice is that of the next smaller one.
    """

    def __init__(
        self,
        lm: LoadedModel,
        calibration: Calibration,
        *,
        unit: Unit = "head",
        allowed: Allowed | None = None,
        config: SelectionConfig = _USUAL,
        work: LongWork | None = None,
        _original: _Original | None = None,
    ) -> None:
        self._lm, self._calibration, self._config, self._work = lm, calibration, config, work or LongWork()
        self._original = _original or _Original(lm, calibration, config, self._work)
        self._unit: Unit = unit
        self.units = find_units(lm.grid, unit)
        self._allowed = allowed
        self._stages: list[SelectionStage] = []
        self._chosen: dict[int, tuple[Head, ...]] = {}

    @property
    def total(self) -> int:
        return sum(map(len, self.units.values()))

    def choose(self, *, method: str = DAMAGE, count: int, seed: int = 0) -> tuple[Head, ...]:
        """Return the heads of ``count`` units, sorted; ``layer-drop`` counts layers (the control of LLM-Drop). Allowed
        numbers by layer may leave fewer units, or none.
        """
        if (choice := CHOICES.get(method)) is None:
            raise PruningError(f"unknown method {method!r}. Choose one of {', '.join(CHOICES)}")
        if not 0 <= count < self.total:
            raise PruningError(f"{count} units to remove (limit {self.total - 1} of {self.total}). Remove fewer")
        return choice(self, count, seed) if count else ()

    def _random(self, count: int, seed: int) -> tuple[Head, ...]:
        every = list(chain.from_iterable(self.units.values()))
        if self._allowed is not None:
            ranks = {heads: rank for rank, heads in enumerate(random.Random(seed).sample(every, len(every)))}
            return allocate_ranked(self.units, ranks, count, self._allowed)
        return tuple(sorted(chain.from_iterable(random.Random(seed).sample(every, count))))

    def _whole_layers(self, count: int, seed: int) -> tuple[Head, ...]:
        return (self if self._unit == "layer" else self._layers).choose(count=count)

    def _by_damage(self, count: int, seed: int) -> tuple[Head, ...]:
        if count not in self._chosen:
            self._chosen[count] = self._least_damage(count)
        return self._chosen[count]

    def _least_damage(self, count: int) -> tuple[Head, ...]:
        while not self._stages or self._most < count:
            stage = self._next_stage()
            if self._stages and not stage.more:
                break  # only a step of a layer is left that is larger than the units still allowed
            self._stages.append(stage)
        stage = next((each for each in self._stages if each.units + each.more >= count), self._stages[-1])
        counts = stage.choose(min(count - stage.units, stage.more))
        if not self._config.tries:
            return stage.heads(counts)
        self._work.say(
            f"comparing up to {self._config.tries} choices of {counted(count, self._unit)} near the best one"
        )
        with self._work.steps("choices near the best one", 1 + self._config.tries, "choice") as done:
            return best_nearby(stage, counts, self._original.repaired_damage, self._config.tries, done)

    @cached_property
    def _layers(self) -> HeadSelection:
        return HeadSelection(
            self._lm,
            self._calibration,
            unit="layer",
            allowed=self._allowed_layers,
            config=self._config,
            work=self._work,
            _original=self._original,
        )

    @property
    def _allowed_layers(self) -> Allowed | None:
        """Layers that may lose all their units."""
        if self._allowed is None:
            return None
        return {
            layer: (0, 1) if len(of_layer) in self._allowed[layer] else (0,) for layer, of_layer in self.units.items()
        }

    @property
    def _most(self) -> int:
        """Largest number of units that the last stage can choose."""
        return self._stages[-1].units + self._stages[-1].more

    @property
    def _largest_step(self) -> int:
        """Largest number of units by which a layer's next allowed number is larger."""
        if self._allowed is None:
            return 1
        steps = (b - a for numbers in self._allowed.values() for a, b in pairwise(sorted(numbers)))
        return max(steps, default=1)

    def _next_stage(self) -> SelectionStage:
        """Measure the damage of further units on the repaired model."""
        units = self._most if self._stages else 0
        share = self._config.next_share if units else self._config.first_share
        more = min(max(self._largest_step, round(share * self.total)), self.total - 1 - units)
        self._work.say(f"measuring the damage of {counted(more, self._unit)} more")
        if not units:
            before, moments = Repaired(NO_EDITS, {}), self._original.moments
        else:
            last = self._stages[-1]
            texts = self._calibration.first(self._config.moment_tokens)
            removed = last.heads(last.choose(last.more))
            with self._work.steps("repairing between the stages", self._lm.grid.num_layers, "layer") as step:

                def done(layer: int) -> None:
                    step()

                before = repaired_model(
                    self._lm, texts, removed, RepairConfig(("o", "down")), all_layers=True, progress=done
                )
            moments = layer_moments(self._lm, texts, before.edits, self._work.steps)
        return SelectionStage(
            self._lm, moments, self._original.divergence, self.units, before, more, self._work, self._allowed
        )


#: How each method of `catalog.SET_METHODS` chooses ``count`` units, not 0; only random choices use a seed.
CHOICES: Mapping[str, Callable[[HeadSelection, int, int], tuple[Head, ...]]] = {
    RANDOM: HeadSelection._random,
    DAMAGE: HeadSelection._by_damage,
    LAYER_DROP: HeadSelection._whole_layers,
}
