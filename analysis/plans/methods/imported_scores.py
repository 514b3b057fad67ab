"""Method ``imported``: the scores of another tool's pattern."""

from __future__ import annotations

from headscan.analysis.plans.format.budget_records import WindowHeads
from headscan.analysis.plans.format.calibrations import PatternCalibration
from headscan.analysis.plans.format.plan_records import Evidence, PlanError, PlannedModel
from headscan.analysis.plans.interchange.head_pattern import THRESHOLD, HeadPattern
from headscan.analysis.plans.methods.keep_scores import KeepScores, full_heads, protected_notes, require_candidates


def imported_scores(model: PlannedModel, pattern: HeadPattern, *, run_id: str | None = None) -> KeepScores:
    """Score KV heads by an imported pattern.

    The keep-score is the pattern's number, clipped to 0 to 1; the number itself breaks ties, then layer and KV head do.
    Numbers of heads that cannot get a window are ignored.

    Args:
        run_id: Run from which the model's shape was read; None if it came from elsewhere.

    Raises:
        PlanError: The pattern is of another shape of model, or no candidates.
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
        calibration=PatternCalibration(
            format=pattern.format,
            path=pattern.path,
            sha256=pattern.sha256,
            sink_size=pattern.sink_size,
            recent_size=pattern.recent_size,
            sparsity=pattern.sparsity,
            inverted=pattern.inverted,
            run_id=run_id,
        ),
        notes=(*pattern.notes, *protected_notes(model, places)),
    )


def own_budget(pattern: HeadPattern, scores: KeepScores) -> WindowHeads:
    """Return the pattern's own number of window heads, at most all candidates.

    It follows from the stated sparsity; without one, numbers below 0.5 stand for window heads.

    Raises:
        PlanError: The pattern has scores of query heads, which have no natural threshold.
    """
    count = pattern.stated_window_heads
    if count is None and pattern.heads == "query_head":
        raise PlanError(f"{pattern.path} does not state how many heads get a window. Give `window_share` or `kv_bytes`")
    if count is None:
        count = sum(score < THRESHOLD for score in scores.scores.values())
    return WindowHeads(min(count, len(scores.scores)))
