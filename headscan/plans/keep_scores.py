"""Scores by which plans keep KV heads: random, imported, and by measured damage."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import groupby

import numpy as np

from headscan.plans.pattern_files import THRESHOLD, HeadPattern
from headscan.plans.plan_budgets import WindowHeads
from headscan.plans.plan_records import (
    WHY_PROTECTED,
    DamageCalibration,
    Granularity,
    HeadDamage,
    PatternCalibration,
    PlanError,
    PlanMethod,
    PlannedModel,
    PlanSource,
    QueryHead,
    RandomCalibration,
)
from headscan.windows import KvHead

UNMEASURED = "not all of their query heads were measured"


@dataclass(frozen=True)
class KeepScores:
    """Keep-scores of a model's KV heads by one method.

    Attributes:
        score: Definition of the keep-score in words.
        scores: Keep-score of each candidate, 0 to 1, higher = keep. Heads without an entry are protected: they always
            keep their full cache.
        order: The candidates in the order in which they get a window: ascending score; the method breaks ties.
        query_heads: Numbers of the query heads, in order of layer and query head; empty if the method has none.
        damages: Measured damage of the candidates; empty if it was not measured.
        patterns: Number of each candidate in an imported pattern; empty without one.
        notes: Limitations of the evidence, and why heads are protected.
        sink: Fewest first tokens of a window that the evidence covers; None for no limit, as for ``recent``.
        granularity: ``layer``: the KV heads of a layer have one score and follow each other in ``order``, and a plan
            gives windows to whole layers.
    """

    method: PlanMethod
    score: str
    model: PlannedModel
    scores: Mapping[KvHead, float]
    order: tuple[KvHead, ...]
    query_heads: tuple[QueryHead, ...]
    calibration: PlanSource
    damages: Mapping[KvHead, HeadDamage] = field(default_factory=dict)
    patterns: Mapping[KvHead, float] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
    sink: int | None = None
    recent: int | None = None
    granularity: Granularity = "kv_head"

    def __post_init__(self) -> None:
        require_candidates(self.model, self.scores)
        full = full_heads(self.model)
        for place, score in self.scores.items():
            if place not in full:
                layer = next((layer for layer in self.model.layers if layer.layer == place[0]), None)
                why = "the model has no such KV head" if layer is None else WHY_PROTECTED.get(layer.type)
                raise PlanError(
                    f"layer {place[0]}, KV head {place[1]} of {self.model.name} cannot get a window:"
                    f" {why or 'the model has no such KV head'}. Leave it out of the scores"
                )
            if not (math.isfinite(score) and 0 <= score <= 1):
                raise PlanError(
                    f"keep-score of layer {place[0]}, KV head {place[1]} is {score:g} (limit 0 to 1). Scale the scores"
                )
        ascending = [self.scores[place] for place in self.order if place in self.scores]
        if sorted(self.order) != sorted(self.scores) or ascending != sorted(ascending):
            raise PlanError(
                f"the order of {len(self.order)} KV heads is not that of the {len(self.scores)} keep-scores. Sort the"
                " candidates by score"
            )
        if self.granularity == "layer":
            sizes = {each.layer: each.num_key_value_heads for each in self.model.layers}
            for at, group in groupby(self.order, key=lambda place: place[0]):
                member_scores = [self.scores[place] for place in group]
                if len(member_scores) != sizes[at] or len(set(member_scores)) > 1:
                    raise PlanError(
                        f"the KV heads of layer {at} have several scores or places in the order (limit one for a"
                        " layer). Score whole layers with `by_layer`"
                    )

    @property
    def candidates(self) -> frozenset[KvHead]:
        """(layer, KV head) of every head that can get a window."""
        return frozenset(self.scores)


def full_heads(model: PlannedModel) -> list[KvHead]:
    """Return the KV heads with an unbounded cache of their own."""
    return [
        (layer.layer, k) for layer in model.layers if layer.type == "full" for k in range(layer.num_key_value_heads)
    ]


def protected_notes(model: PlannedModel, candidates: Collection[KvHead], unmeasured: str = UNMEASURED) -> list[str]:
    """Return the number of KV heads that cannot get a window, by reason; in full layers it is ``unmeasured``."""
    counts = Counter[str]()
    for layer in model.layers:
        counts[layer.type] += layer.num_key_value_heads
    missing = sum(place not in candidates for place in full_heads(model))
    reasons = [(counts[kind], why) for kind, why in WHY_PROTECTED.items()] + [(missing, unmeasured)]
    return [f"{count} KV heads are protected: {why}" for count, why in reasons if count]


def require_candidates(model: PlannedModel, candidates: Collection[KvHead], unmeasured: str = UNMEASURED) -> None:
    """Raise PlanError with the reasons if there are no candidates."""
    if not candidates:
        raise PlanError(
            f"no KV head of {model.name} can get a window: {'; '.join(protected_notes(model, candidates, unmeasured))}."
            " Keep its full cache"
        )


def by_layer(scores: KeepScores) -> KeepScores:
    """Return the scores of whole layers: the largest keep-score of a layer's KV heads, as a KV head has that of its
    neediest query head; the sum breaks ties. Layers of which not all KV heads are candidates are protected.
    """
    groups = _whole_layers(scores.model, scores.scores)
    most = {layer: max(scores.scores[place] for place in places) for layer, places in groups.items()}
    total = {layer: sum(scores.scores[place] for place in places) for layer, places in groups.items()}
    left_out = len(scores.scores) - sum(map(len, groups.values()))
    notes = [f"{left_out} KV heads are protected: others of their layers are"] if left_out else []
    return replace(
        scores,
        score=f"{scores.score}; the largest of the layer's KV heads",
        scores={place: most[layer] for layer, places in groups.items() for place in places},
        order=_spread(groups, sorted(groups, key=lambda layer: (most[layer], total[layer], layer))),
        notes=(*scores.notes, *notes),
        granularity="layer",
    )


def _whole_layers(model: PlannedModel, places: Collection[KvHead]) -> dict[int, list[KvHead]]:
    """Return the KV heads of each layer whose KV heads are all among ``places``."""
    groups = {
        layer.layer: [(layer.layer, kv_head) for kv_head in range(layer.num_key_value_heads)] for layer in model.layers
    }
    return {layer: group for layer, group in groups.items() if all(place in places for place in group)}


def _spread(groups: Mapping[int, Sequence[KvHead]], order: Sequence[int]) -> tuple[KvHead, ...]:
    """Return the KV heads of layers, in the order of the layers."""
    return tuple(place for layer in order for place in groups[layer])


RANDOM_SCORE = "a random number from 0 to 1"


def random_scores(
    model: PlannedModel, seed: int, *, run_id: str | None = None, granularity: Granularity = "kv_head"
) -> KeepScores:
    """Score all KV heads with an unbounded cache of their own at random, the same for the same seed. ``run_id`` is the
    run from which the model's shape was read; the granularity ``layer`` draws one number for each layer.
    """
    places = full_heads(model)
    require_candidates(model, places)
    units = places if granularity == "kv_head" else [place for place in places if place[1] == 0]
    drawn = dict(zip(units, np.random.default_rng(seed).random(len(units)).tolist(), strict=True))
    scores = {place: drawn[place if granularity == "kv_head" else (place[0], 0)] for place in places}
    return KeepScores(
        method="random",
        score=RANDOM_SCORE,
        model=model,
        scores=scores,
        order=tuple(sorted(places, key=lambda place: (scores[place], place))),
        query_heads=(),
        calibration=RandomCalibration(seed, run_id),
        notes=tuple(protected_notes(model, places)),
        granularity=granularity,
    )


def imported_scores(model: PlannedModel, pattern: HeadPattern, *, run_id: str | None = None) -> KeepScores:
    """Score KV heads by an imported pattern: ``clip(number, 0, 1)``, in the order ``(number, layer, KV head)``. Numbers
    of heads that cannot get a window are ignored. ``run_id`` is the run from which the model's shape was read.
    """
    values = pattern.for_model(model)
    places = full_heads(model)
    require_candidates(model, places)
    unit = "KV head" if pattern.heads == "kv_head" else "largest of the KV head's query heads, over the largest of all"
    return KeepScores(
        method="imported",
        score=f"number of the {pattern.format} pattern, {unit}{', inverted' if pattern.inverted else ''}",
        model=model,
        scores={place: min(max(values[place], 0.0), 1.0) for place in places},
        order=tuple(sorted(places, key=lambda place: (values[place], place))),
        query_heads=(),
        calibration=PatternCalibration.by_name(vars(pattern), run_id=run_id),
        patterns={place: values[place] for place in places},
        notes=(*pattern.notes, *protected_notes(model, places)),
    )


def own_budget(pattern: HeadPattern, scores: KeepScores) -> WindowHeads:
    """Return the pattern's own number of window heads, at most all candidates: that of the stated sparsity, or without
    one the count of numbers below 0.5.
    """
    count = pattern.stated_window_heads
    if count is None and pattern.heads == "query_head":
        raise PlanError(f"{pattern.path} does not state how many heads get a window. Give `window_share` or `kv_bytes`")
    if count is None:
        count = sum(score < THRESHOLD for score in scores.scores.values())
    return WindowHeads(min(count, len(scores.scores)))


_UNMEASURED = "their damage was not measured"


def damage_scores(
    model: PlannedModel,
    text: Mapping[KvHead, float],
    recall: Mapping[KvHead, float] | None,
    *,
    calibration: DamageCalibration,
    confirmed: Mapping[str, Mapping[KvHead, float]] | None = None,
    chosen: Collection[KvHead] = (),
    recents: Mapping[KvHead, int] | None = None,
    notes: Sequence[str] = (),
    granularity: Granularity = "kv_head",
) -> KeepScores:
    """Score KV heads, or whole layers, by the loss that a window on each one adds, in nats per token.

    The keep-score is ``s / max(s)`` with ``s = clip(text, 0) / sum(clip(text, 0)) + clip(recall, 0) / sum(clip(recall,
    0))``. Ties go by ``text / sum(|text|) + recall / sum(|recall|)``, then by layer and KV head. Confirmed heads
    exchange places among each other: the ranks and scores that their estimates got go to them in the order of
    ``confirmed text / sum(clip(text, 0)) + confirmed recall / sum(clip(recall, 0))``.

    Args:
        text: Damage on text by (layer, KV head); a missing head, or NaN, is no candidate. A table (layers, KV heads)
            such as that of `kv_damage` becomes such a mapping by ``dict(np.ndenumerate(table))``.
        recall: Damage on recall prompts, likewise; None if it was not measured.
        confirmed: Damage of a real window mask by ``text`` and ``recall``, for heads for which it was measured.
        chosen: KV heads that a search gave windows. They take the lowest scores, in their order, and the others the
            rest.
        recents: Last tokens of the window with which each head was measured; None uses the calibration's for all heads.
        notes: Limitations of the measurement.
        granularity: ``layer``: the first KV head of a layer, (layer, 0), has the damage of windows on all of them, and
            stands for the layer in all arguments.
    """
    damages = {"text": text} if recall is None else {"text": text, "recall": recall}
    tables = {name: _known(model, name, values) for name, values in damages.items()}
    units = sorted(tables["text"])
    require_candidates(model, units, _UNMEASURED)
    if recall is not None and (odd := tables["recall"].keys() ^ tables["text"].keys()):
        raise PlanError(
            f"layer {min(odd)[0]}, KV head {min(odd)[1]} has a damage on text or on recall prompts only. Measure both,"
            " or neither"
        )
    measured = list(tables.values())
    scores = _summed_shares(measured, clip=True)
    if most := max(scores.values()):
        scores = {unit: score / most for unit, score in scores.items()}
    raw = _summed_shares(measured, clip=False)
    order = sorted(units, key=lambda unit: (scores[unit], raw[unit], unit))
    again = {name: _known(model, f"confirmed {name}", values) for name, values in (confirmed or {}).items()}
    for name, named in [*((f"confirmed {name}", {*each}) for name, each in again.items()), ("`chosen`", {*chosen})]:
        if unknown := named - tables["text"].keys():
            raise PlanError(
                f"{name} has layer {min(unknown)[0]}, KV head {min(unknown)[1]}, which is no candidate. Leave it out"
            )
    if again:
        # Shares of all estimated damage: where nothing is left to lose on recall, its noise decides nothing.
        totals = [sum(max(value, 0.0) for value in tables[name].values()) or 1.0 for name in again]
        order, scores = _exchanged(order, scores, _summed_shares(list(again.values()), totals, clip=False))
    if chosen:
        ranked = [scores[unit] for unit in order]
        order = sorted(order, key=lambda unit: unit not in chosen)
        scores = dict(zip(order, ranked, strict=True))
    damage = {
        unit: HeadDamage(
            tables["text"][unit],
            tables["recall"][unit] if recall is not None else None,
            again.get("text", {}).get(unit),
            again.get("recall", {}).get(unit),
            calibration.recent if recents is None else recents[unit],
        )
        for unit in units
    }
    unit_of = {unit: unit for unit in units}
    if granularity == "layer":
        groups = _whole_layers(model, full_heads(model))
        unit_of = {place: unit for unit in units for place in groups[unit[0]]}
        order = list(_spread(groups, [layer for layer, _ in order]))
    windows = "a window" if granularity == "kv_head" else "windows on a whole layer"
    more = "" if recall is None else ", plus the same on recall prompts"
    return KeepScores(
        method="measured",
        score=f"damage of {windows} on text, clipped at 0, over its sum{more}; over the largest of all candidates",
        model=model,
        scores={place: scores[unit] for place, unit in unit_of.items()},
        order=tuple(order),
        query_heads=(),
        calibration=calibration,
        damages={place: damage[unit] for place, unit in unit_of.items()},
        notes=(*notes, *protected_notes(model, unit_of, _UNMEASURED)),
        sink=calibration.sink,
        recent=calibration.recent,
        granularity=granularity,
    )


def _known(model: PlannedModel, name: str, values: Mapping[KvHead, float]) -> dict[KvHead, float]:
    """Return the damages that are no NaN."""
    full = set(full_heads(model))
    known = {place: float(value) for place, value in values.items() if not math.isnan(value)}
    for (layer, kv_head), value in known.items():
        if (layer, kv_head) not in full:
            raise PlanError(
                f"{name} of layer {layer}, KV head {kv_head} is {value:g}, but that head has no unbounded cache of its"
                " own. Give NaN"
            )
        if not math.isfinite(value):
            raise PlanError(f"{name} of layer {layer}, KV head {kv_head} is {value:g}. Measure it again, or give NaN")
    return known


def _summed_shares(
    tables: Sequence[Mapping[KvHead, float]], totals: Sequence[float] | None = None, *, clip: bool
) -> dict[KvHead, float]:
    """Return the sum over tables of ``clip(damage, 0) / total``, or without ``clip`` of ``damage / total``, by head;
    heads that a table lacks are left out. None for ``totals`` uses ``sum(clip(damage, 0))`` or ``sum(|damage|)`` of
    each table.
    """
    if totals is None:
        totals = [sum(max(value, 0.0) if clip else abs(value) for value in table.values()) or 1.0 for table in tables]
    return {
        place: sum(
            (max(table[place], 0.0) if clip else table[place]) / total
            for table, total in zip(tables, totals, strict=True)
        )
        for place in tables[0]
        if all(place in table for table in tables)
    }


def _exchanged(
    order: list[KvHead], scores: dict[KvHead, float], damage: Mapping[KvHead, float]
) -> tuple[list[KvHead], dict[KvHead, float]]:
    """Return order and scores after heads have exchanged places by their confirmed damage."""
    ranks = [rank for rank, place in enumerate(order) if place in damage]
    new_order = list(order)
    for rank, place in zip(ranks, sorted(damage, key=lambda place: (damage[place], place)), strict=True):
        new_order[rank] = place
    return new_order, {place: scores[before] for place, before in zip(new_order, order, strict=True)}
