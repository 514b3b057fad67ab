"""Scores by which plans keep KV heads: random, imported, and by measured damage."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import groupby

import numpy as np

from headscan.plans.pattern_files import THRESHOLD, HeadPattern
from headscan.plans.plan_budgets import WindowHeads
from headscan.plans.plan_records import (
    WHY_PROTECTED,
    DamageCalibration,
    Evidence,
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

#: (layer, KV head).
KVHead = tuple[int, int]

UNMEASURED = "not all of their query heads were measured"


@dataclass(frozen=True)
class KeepScores:
    """Keep-scores of a model's KV heads by one method.

    Attributes:
        score: Definition of the keep-score in words.
        scores: Keep-score of each candidate, 0 to 1, higher = keep. Heads without an entry are protected: they always
            keep their full cache.
        order: The candidates in the order in which they get a window: ascending score; the method breaks ties.
        evidence: Evidence of KV heads, candidates or not; a missing entry is no evidence.
        query_heads: Numbers of the query heads, in order of layer and query head; empty if the method has none.
        notes: Limitations of the evidence, and why heads are protected.
        sink: Fewest first tokens of a window that the evidence covers; None for no limit, as for ``recent``.
        granularity: ``layer``: the KV heads of a layer have one score and follow each other in ``order``, and a plan
            gives windows to whole layers.
    """

    method: PlanMethod
    score: str
    model: PlannedModel
    scores: Mapping[KVHead, float]
    order: tuple[KVHead, ...]
    evidence: Mapping[KVHead, Evidence]
    query_heads: tuple[QueryHead, ...]
    calibration: PlanSource
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
    def candidates(self) -> frozenset[KVHead]:
        """(layer, KV head) of every head that can get a window."""
        return frozenset(self.scores)


def full_heads(model: PlannedModel) -> list[KVHead]:
    """Return the KV heads with an unbounded cache of their own."""
    return [
        (layer.layer, k) for layer in model.layers if layer.type == "full" for k in range(layer.num_key_value_heads)
    ]


def protected_notes(model: PlannedModel, candidates: Collection[KVHead], unmeasured: str = UNMEASURED) -> list[str]:
    """Return the number of KV heads that cannot get a window, by reason; in full layers it is ``unmeasured``."""
    counts = Counter[str]()
    for layer in model.layers:
        counts[layer.type] += layer.num_key_value_heads
    missing = sum(place not in candidates for place in full_heads(model))
    reasons = [(counts[kind], why) for kind, why in WHY_PROTECTED.items()] + [(missing, unmeasured)]
    return [f"{count} KV heads are protected: {why}" for count, why in reasons if count]


def require_candidates(model: PlannedModel, candidates: Collection[KVHead], unmeasured: str = UNMEASURED) -> None:
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


def _whole_layers(model: PlannedModel, places: Collection[KVHead]) -> dict[int, list[KVHead]]:
    """Return the KV heads of each layer whose KV heads are all among ``places``."""
    groups = {
        layer.layer: [(layer.layer, kv_head) for kv_head in range(layer.num_key_value_heads)] for layer in model.layers
    }
    return {layer: group for layer, group in groups.items() if all(place in places for place in group)}


def _spread(groups: Mapping[int, Sequence[KVHead]], order: Sequence[int]) -> tuple[KVHead, ...]:
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
        evidence={},
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
        evidence={place: Evidence(pattern=values[place]) for place in places},
        query_heads=(),
        calibration=PatternCalibration.by_name(vars(pattern), run_id=run_id),
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
    text: np.ndarray,
    recall: np.ndarray | None,
    *,
    calibration: DamageCalibration,
    confirmed_text: np.ndarray | None = None,
    confirmed_recall: np.ndarray | None = None,
    chosen: Collection[KVHead] = (),
    recents: Mapping[KVHead, int] | None = None,
    notes: Sequence[str] = (),
    granularity: Granularity = "kv_head",
) -> KeepScores:
    """Score KV heads, or whole layers, by the loss that a window on each one adds, in nats per token.

    The keep-score is ``s / max(s)`` with ``s = clip(text, 0) / sum(clip(text, 0)) + clip(recall, 0) / sum(clip(recall,
    0))``. Ties go by ``text / sum(|text|) + recall / sum(|recall|)``, then by layer and KV head. Confirmed heads
    exchange places among each other: the ranks and scores that their estimates got go to them in the order of
    ``confirmed_text / sum(clip(text, 0)) + confirmed_recall / sum(clip(recall, 0))``.

    Args:
        text: Damage on text, (layers of the model, KV heads of the widest layer); NaN where the head is no candidate or
            does not exist.
        recall: Damage on recall prompts, likewise; None if it was not measured.
        confirmed_text: Damage of a real window mask on text, likewise; NaN where it was not measured.
        confirmed_recall: The same on recall prompts.
        chosen: KV heads that a search gave windows. They take the lowest scores, in their order, and the others the
            rest.
        recents: Last tokens of the window with which each head was measured; None uses the calibration's for all heads.
        notes: Limitations of the measurement.
        granularity: ``layer``: the arrays hold the damage of windows on all KV heads of the layer, the same for each of
            them, and each layer counts once. ``chosen`` and ``recents`` name all KV heads of a layer, too.
    """
    arrays = {"text": text, "recall": recall, "confirmed_text": confirmed_text, "confirmed_recall": confirmed_recall}
    tables = {name: _values_by_head(model, name, values) for name, values in arrays.items() if values is not None}
    places = sorted(tables["text"])
    require_candidates(model, places, _UNMEASURED)
    if "recall" in tables and sorted(tables["recall"]) != places:
        layer, kv_head = min(set(tables["recall"]) ^ set(places))
        raise PlanError(
            f"layer {layer}, KV head {kv_head} has a damage on text or on recall prompts only. Measure both, or neither"
        )
    groups = _whole_layers(model, places) if granularity == "layer" else {}
    if granularity == "layer":
        _check_equal_in_layers(tables, groups)
        # Each layer counts once, by its first KV head.
        tables = {
            name: {place: value for place, value in table.items() if not place[1]} for name, table in tables.items()
        }
        chosen = {place for place in chosen if not place[1]}
        places = sorted(tables["text"])
    kinds = [name for name in ("text", "recall") if name in tables]
    measured = [tables[name] for name in kinds]
    scores = _summed_shares(measured, clip=True)
    if most := max(scores.values()):
        scores = {place: score / most for place, score in scores.items()}
    raw = _summed_shares(measured, clip=False)
    order = sorted(places, key=lambda place: (scores[place], raw[place], place))
    for name in ("confirmed_text", "confirmed_recall"):
        if odd := set(tables.get(name, {})) - set(places):
            layer, kv_head = min(odd)
            raise PlanError(f"{name} of layer {layer}, KV head {kv_head} has no estimate. Give NaN, or measure `text`")
    kinds = [name for name in kinds if f"confirmed_{name}" in tables]
    if kinds:
        # Shares of all estimated damage: where nothing is left to lose on recall, its noise decides nothing.
        totals = [sum(max(value, 0.0) for value in tables[name].values()) or 1.0 for name in kinds]
        damage = _summed_shares([tables[f"confirmed_{name}"] for name in kinds], totals, clip=False)
        order, scores = _exchanged(order, scores, damage)
    if odd := set(chosen) - set(places):
        raise PlanError(f"layer {min(odd)[0]}, KV head {min(odd)[1]} of `chosen` is no candidate. Leave it out")
    if chosen:
        ranked = [scores[place] for place in order]
        order = sorted(order, key=lambda place: place not in chosen)
        scores = dict(zip(order, ranked, strict=True))
    unit_of = {place: place for place in places}
    if granularity == "layer":
        unit_of = {place: (layer, 0) for layer, group in groups.items() for place in group}
        scores = {place: scores[unit] for place, unit in unit_of.items()}
        order = list(_spread(groups, [layer for layer, _ in order]))
    windows = "a window" if granularity == "kv_head" else "windows on a whole layer"
    more = "" if recall is None else ", plus the same on recall prompts"
    return KeepScores(
        method="measured",
        score=f"damage of {windows} on text, clipped at 0, over its sum{more}; over the largest of all candidates",
        model=model,
        scores=scores,
        order=tuple(order),
        evidence={
            place: Evidence(
                damage=HeadDamage(
                    **{name: tables.get(name, {}).get(unit) for name in arrays},
                    recent=calibration.recent if recents is None else recents[place],
                )
            )
            for place, unit in unit_of.items()
        },
        query_heads=(),
        calibration=calibration,
        notes=(*notes, *protected_notes(model, unit_of, _UNMEASURED)),
        sink=calibration.sink,
        recent=calibration.recent,
        granularity=granularity,
    )


def _check_equal_in_layers(
    tables: Mapping[str, Mapping[KVHead, float]], groups: Mapping[int, Sequence[KVHead]]
) -> None:
    """Raise PlanError unless each table has one value for all KV heads of a layer."""
    for name, table in tables.items():
        for layer in {layer for layer, _ in table}:
            values = {table.get(place) for place in groups.get(layer, ())}
            if len(values) != 1 or None in values:
                raise PlanError(
                    f"{name} has several values for the KV heads of layer {layer} (limit 1 with granularity layer)."
                    " Give the damage of the whole layer for each of them"
                )


def _values_by_head(model: PlannedModel, name: str, values: np.ndarray) -> dict[KVHead, float]:
    """Return the known values of an array by (layer, KV head)."""
    shape = (model.num_layers, max(layer.num_key_value_heads for layer in model.layers))
    if values.shape != shape:
        raise PlanError(
            f"{name} has shape {values.shape} (limit {shape}, layers and KV heads). Give one value per head"
        )
    full = set(full_heads(model))
    score_of: dict[KVHead, float] = {}
    for layer, kv_head in np.argwhere(~np.isnan(values)).tolist():
        value = float(values[layer, kv_head])
        if (layer, kv_head) not in full:
            raise PlanError(
                f"{name} of layer {layer}, KV head {kv_head} is {value:g}, but that head has no unbounded cache of its"
                " own. Give NaN"
            )
        if not np.isfinite(value):
            raise PlanError(f"{name} of layer {layer}, KV head {kv_head} is {value:g}. Measure it again, or give NaN")
        score_of[layer, kv_head] = value
    return score_of


def _summed_shares(
    tables: Sequence[Mapping[KVHead, float]], totals: Sequence[float] | None = None, *, clip: bool
) -> dict[KVHead, float]:
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
    order: list[KVHead], scores: dict[KVHead, float], damage: Mapping[KVHead, float]
) -> tuple[list[KVHead], dict[KVHead, float]]:
    """Return order and scores after heads have exchanged places by their confirmed damage."""
    ranks = [rank for rank, place in enumerate(order) if place in damage]
    new_order = list(order)
    for rank, place in zip(ranks, sorted(damage, key=lambda place: (damage[place], place)), strict=True):
        new_order[rank] = place
    return new_order, {place: scores[before] for place, before in zip(new_order, order, strict=True)}
