"""Method ``measured``: KV heads on which a window adds loss keep their full cache.

The damages are measured elsewhere, with the model; this file turns the arrays into keep-scores.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace

import numpy as np

from headscan.analysis.plans.format.calibrations import DamageCalibration
from headscan.analysis.plans.format.plan_records import Evidence, HeadDamage, PlanError, PlannedModel, QueryHead
from headscan.analysis.plans.methods.keep_scores import (
    KeepScores,
    Place,
    full_heads,
    protected_notes,
    require_candidates,
)

SCORE = (
    "damage of a window on text, clipped at 0, over its sum, plus the same on recall prompts; over the largest of all"
    " candidates"
)

_UNMEASURED = "their damage was not measured"


def damage_scores(
    model: PlannedModel,
    text: np.ndarray,
    recall: np.ndarray | None,
    *,
    calibration: DamageCalibration,
    confirmed_text: np.ndarray | None = None,
    confirmed_recall: np.ndarray | None = None,
    chosen: Collection[Place] = (),
    recents: Mapping[Place, int] | None = None,
    evidence: Mapping[Place, Evidence] | None = None,
    query_heads: Sequence[QueryHead] = (),
    notes: Sequence[str] = (),
) -> KeepScores:
    """Score KV heads by the loss that a window on each one adds, in nats per token.

    The keep-score is ``clip(text, 0) / sum + clip(recall, 0) / sum``, over the largest one. The damages themselves,
    each over the sum of its absolute values, break ties, then layer and KV head do. Confirmed heads exchange places
    among each other: the ranks and scores that their estimates got go to them in the order of their confirmed damages,
    each over the sum of the clipped estimates.

    Args:
        text: Damage on text, (layers of the model, KV heads of the widest layer); NaN where the head is no candidate or
            does not exist.
        recall: Damage on recall prompts, likewise; None if it was not measured.
        confirmed_text: Damage of a real window mask on text, likewise; NaN where it was not measured.
        confirmed_recall: The same on recall prompts.
        chosen: KV heads that a search gave windows. They take the lowest scores, in their order, and the others the
            rest.
        recents: Last tokens of the window with which each head was measured; None uses the calibration's for all heads.
        evidence: More evidence, as from a scan; its ``damage`` is replaced.
        query_heads: Numbers of the query heads of that evidence.
        notes: Limitations of the measurement.

    Raises:
        PlanError: An array has another shape or an infinite value, recall and text have different candidates, a damage
            of a head without an unbounded cache of its own, or no candidates.
    """
    arrays = {"text": text, "recall": recall, "confirmed_text": confirmed_text, "confirmed_recall": confirmed_recall}
    tables = {name: _table(model, name, values) for name, values in arrays.items() if values is not None}
    places = sorted(tables["text"])
    require_candidates(model, places, _UNMEASURED)
    if "recall" in tables and sorted(tables["recall"]) != places:
        layer, kv_head = min(set(tables["recall"]) ^ set(places))
        raise PlanError(
            f"layer {layer}, KV head {kv_head} has a damage on text or on recall prompts only. Measure both, or neither"
        )
    kinds = [name for name in ("text", "recall") if name in tables]
    measured = [tables[name] for name in kinds]
    scores = _scaled(_summed_shares(measured, clip=True))
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
    found = {place: (evidence or {}).get(place, Evidence()) for place in full_heads(model)}
    return KeepScores(
        method="measured",
        score=SCORE if recall is not None else SCORE.replace(", plus the same on recall prompts", ""),
        model=model,
        scores=scores,
        order=tuple(order),
        evidence={
            place: replace(
                held,
                damage=HeadDamage(
                    **{name: tables.get(name, {}).get(place) for name in arrays},
                    recent=calibration.recent if recents is None else recents[place],
                )
                if place in tables["text"]
                else None,
            )
            for place, held in found.items()
        },
        query_heads=tuple(query_heads),
        calibration=calibration,
        notes=(*notes, *protected_notes(model, places, _UNMEASURED)),
        sink=calibration.sink,
        recent=calibration.recent,
    )


def _table(model: PlannedModel, name: str, values: np.ndarray) -> dict[Place, float]:
    """Return the known values of an array by (layer, KV head)."""
    shape = (model.num_layers, max(layer.num_key_value_heads for layer in model.layers))
    if values.shape != shape:
        raise PlanError(
            f"{name} has shape {values.shape} (limit {shape}, layers and KV heads). Give one value per head"
        )
    full = set(full_heads(model))
    found: dict[Place, float] = {}
    for layer, kv_head in np.argwhere(~np.isnan(values)).tolist():
        value = float(values[layer, kv_head])
        if (layer, kv_head) not in full:
            raise PlanError(
                f"{name} of layer {layer}, KV head {kv_head} is {value:g}, but that head has no unbounded cache of its"
                " own. Give NaN"
            )
        if not np.isfinite(value):
            raise PlanError(f"{name} of layer {layer}, KV head {kv_head} is {value:g}. Measure it again, or give NaN")
        found[layer, kv_head] = value
    return found


def _summed_shares(
    tables: Sequence[Mapping[Place, float]], totals: Sequence[float] | None = None, *, clip: bool
) -> dict[Place, float]:
    """Return each head's share of the damage, summed over tables; heads that a table lacks are left out.

    Args:
        totals: The whole of each table; None sums the table.
        clip: Clip damages at 0; otherwise they keep their sign, and the whole is the sum of absolute values.
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


def _scaled(scores: dict[Place, float]) -> dict[Place, float]:
    most = max(scores.values())
    return {place: score / most for place, score in scores.items()} if most else scores


def _exchanged(
    order: list[Place], scores: dict[Place, float], damage: Mapping[Place, float]
) -> tuple[list[Place], dict[Place, float]]:
    """Return order and scores after heads have exchanged places by their confirmed damage."""
    ranks = [rank for rank, place in enumerate(order) if place in damage]
    new_order = list(order)
    for rank, place in zip(ranks, sorted(damage, key=lambda place: (damage[place], place)), strict=True):
        new_order[rank] = place
    return new_order, {place: scores[before] for place, before in zip(new_order, order, strict=True)}
