"""Keep-scores: how much each KV head needs its full cache, by one method."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Mapping
from dataclasses import dataclass

from headscan.analysis.plans.format.calibrations import Calibration
from headscan.analysis.plans.format.plan_records import (
    WHY_PROTECTED,
    Evidence,
    PlanError,
    PlanMethod,
    PlannedModel,
    QueryHead,
)

#: (layer, KV head).
Place = tuple[int, int]

UNMEASURED = "not all of their query heads were measured"


@dataclass(frozen=True)
class KeepScores:
    """Keep-scores of a model's KV heads by one method.

    Attributes:
        method: The method that made them.
        score: Definition of the keep-score in words.
        scores: Keep-score of each candidate, 0 to 1, higher = keep. Heads without an entry are protected: they always
            keep their full cache.
        order: The candidates in the order in which they get a window: ascending score; the method breaks ties.
        evidence: Evidence of KV heads, candidates or not; a missing entry is no evidence.
        query_heads: Numbers of the query heads, in order of layer and query head; empty if the method has none.
        notes: Limitations of the evidence, and why heads are protected.
        sink: Fewest first tokens of a window that the evidence covers; None for no limit, as for ``recent``.

    Raises:
        PlanError: No candidates, a candidate without an unbounded cache of its own, a score out of range, or an order
            that is not ascending or not of the candidates.
    """

    method: PlanMethod
    score: str
    model: PlannedModel
    scores: Mapping[Place, float]
    order: tuple[Place, ...]
    evidence: Mapping[Place, Evidence]
    query_heads: tuple[QueryHead, ...]
    calibration: Calibration
    notes: tuple[str, ...] = ()
    sink: int | None = None
    recent: int | None = None

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

    @property
    def candidates(self) -> frozenset[Place]:
        """(layer, KV head) of every head that can get a window."""
        return frozenset(self.scores)


def full_heads(model: PlannedModel) -> list[Place]:
    """Return the KV heads with an unbounded cache of their own."""
    return [
        (layer.layer, k) for layer in model.layers if layer.type == "full" for k in range(layer.num_key_value_heads)
    ]


def protected_notes(model: PlannedModel, candidates: Collection[Place], unmeasured: str = UNMEASURED) -> list[str]:
    """Return the number of KV heads that cannot get a window, by reason.

    Args:
        unmeasured: Reason for heads of full layers that are no candidates.
    """
    counts = Counter[str]()
    for layer in model.layers:
        counts[layer.type] += layer.num_key_value_heads
    missing = sum(place not in candidates for place in full_heads(model))
    reasons = [(counts[kind], why) for kind, why in WHY_PROTECTED.items()] + [(missing, unmeasured)]
    return [f"{count} KV heads are protected: {why}" for count, why in reasons if count]


def require_candidates(model: PlannedModel, candidates: Collection[Place], unmeasured: str = UNMEASURED) -> None:
    """Raise PlanError with the reasons if there are no candidates."""
    if not candidates:
        raise PlanError(
            f"no KV head of {model.name} can get a window: {'; '.join(protected_notes(model, candidates, unmeasured))}."
            " Keep its full cache"
        )
