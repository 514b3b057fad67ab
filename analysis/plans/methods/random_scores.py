"""Method ``random``: the control, which knows nothing of the heads."""

from __future__ import annotations

import numpy as np

from headscan.analysis.plans.format.calibrations import RandomCalibration
from headscan.analysis.plans.format.plan_records import PlannedModel
from headscan.analysis.plans.methods.keep_scores import KeepScores, full_heads, protected_notes, require_candidates

SCORE = "a random number from 0 to 1"


def random_scores(model: PlannedModel, seed: int, *, run_id: str | None = None) -> KeepScores:
    """Score all KV heads with an unbounded cache of their own at random.

    Args:
        seed: The same seed and model give the same scores.
        run_id: Run from which the model's shape was read; None if it came from elsewhere.

    Raises:
        PlanError: No candidates.
    """
    places = full_heads(model)
    require_candidates(model, places)
    scores = dict(zip(places, np.random.default_rng(seed).random(len(places)).tolist(), strict=True))
    return KeepScores(
        method="random",
        score=SCORE,
        model=model,
        scores=scores,
        order=tuple(sorted(places, key=lambda place: (scores[place], place))),
        evidence={},
        query_heads=(),
        calibration=RandomCalibration(seed, run_id),
        notes=tuple(protected_notes(model, places)),
    )
