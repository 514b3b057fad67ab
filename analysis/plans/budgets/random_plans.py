"""Random plans with the same bytes as a given plan: its controls."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import replace

import numpy as np

from headscan.analysis.plans.format.calibrations import RandomCalibration
from headscan.analysis.plans.format.head_plan import HeadPlan
from headscan.analysis.plans.format.plan_records import Evidence, PlannedHead
from headscan.analysis.plans.methods.random_scores import SCORE


def random_plan(plan: HeadPlan, seed: int) -> HeadPlan:
    """Return a plan that deals a plan's actions out to its candidates at random.

    Actions and widths change places only among heads of the same bytes per token, so the cache has the same size at
    every length. Protected heads keep their full cache, as in ``plan``.

    Args:
        seed: The same seed and plan give the same plan.
    """
    candidates = [head for head in plan.heads if head.head_class != "protected"]
    draws = dict(
        zip(
            [(head.layer, head.kv_head) for head in candidates],
            np.random.default_rng(seed).random(len(candidates)).tolist(),
            strict=True,
        )
    )
    bytes_of = {layer.layer: layer.kv_bytes for layer in plan.model.layers}
    alike: dict[int | None, list[PlannedHead]] = defaultdict(list)
    for head in candidates:
        alike[bytes_of[head.layer]].append(head)
    dealt: dict[tuple[int, int], PlannedHead] = {}
    for heads in alike.values():
        # The narrowest caches go to the lowest numbers, as if the numbers were keep-scores.
        caches = sorted(heads, key=lambda head: (head.action == "full", (head.sink or 0) + (head.recent or 0)))
        places = sorted(((head.layer, head.kv_head) for head in heads), key=lambda place: draws[place])
        for (layer, kv_head), cache in zip(places, caches, strict=True):
            dealt[layer, kv_head] = replace(
                cache,
                layer=layer,
                kv_head=kv_head,
                score=draws[layer, kv_head],
                evidence=Evidence(removable="random control" if cache.action == "drop" else None),
            )
    return replace(
        plan,
        method="random",
        score=SCORE,
        calibration=RandomCalibration(seed, None),
        heads=tuple(dealt.get((head.layer, head.kv_head), replace(head, evidence=Evidence())) for head in plan.heads),
        query_heads=(),
        validation=None,
        notes=(f"control: the actions of a {plan.method} plan, dealt out at random", *_protected(plan)),
    )


def _protected(plan: HeadPlan) -> list[str]:
    return [note for note in plan.notes if "KV heads are protected: " in note]
