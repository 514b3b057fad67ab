"""Measures of a head plan: what each KV head keeps, and the loss that a window on it adds."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import numpy as np

from headscan.analysis.plans import HeadDamage, HeadPlan, PlannedHead
from headscan.analysis.report.numbers.head_arrays import SiteHeads
from headscan.analysis.report.numbers.measure import Measure

_CLASSES = ("retrieval", "streaming", "removable", "protected")

#: By kind of text, the number in the plan's evidence.
DAMAGES: dict[str, Callable[[HeadDamage], float | None]] = {
    "text": lambda damage: damage.text,
    "recall": lambda damage: damage.recall,
}


def plan_measures(plan: HeadPlan, heads: SiteHeads) -> list[Measure]:
    """Return the measures of a plan; query heads that share a KV head have equal numbers."""
    if heads.site != "self":
        return []
    by_place = {(head.layer, head.kv_head): head for head in plan.heads}
    places = list(zip(heads.layer.tolist(), heads.kv_head.tolist(), strict=True))
    entries = [by_place.get(place) for place in places]

    def numbers(read: Callable[[PlannedHead], float | None]) -> np.ndarray:
        found = [None if entry is None else read(entry) for entry in entries]
        return np.array([np.nan if value is None else value for value in found], dtype=float)

    measures = [
        Measure(
            "plan",
            "Plan",
            numbers(lambda entry: _CLASSES.index(entry.head_class)),
            f"what the KV head keeps; method {plan.method}: streaming heads keep {plan.window_text()}",
            scale="classes",
            classes=_CLASSES,
        ),
        Measure("keep_score", "Plan", numbers(lambda entry: entry.score), plan.score, scale="share"),
    ]
    for kind, read in DAMAGES.items():
        values = numbers(partial(_damage, read))
        if not np.isnan(values).all():
            text = f"loss that a window on this KV head alone adds on {kind}"
            measures.append(Measure(f"damage_{kind}", "Damage", values, text, "nats per token"))
    return measures


def _damage(read: Callable[[HeadDamage], float | None], entry: PlannedHead) -> float | None:
    return None if entry.evidence.damage is None else read(entry.evidence.damage)
