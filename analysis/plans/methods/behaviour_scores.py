"""Method ``retrieval_score``: KV heads that copy from far back, by a probe, keep their full cache."""

from __future__ import annotations

import math

from headscan.analysis.plans.format.calibrations import ProbeCalibration
from headscan.analysis.plans.format.plan_records import PlanError, QueryHead
from headscan.analysis.plans.format.planned_model import DERIVED_NOTE, planned_model
from headscan.analysis.plans.methods.keep_scores import KeepScores, protected_notes, require_candidates
from headscan.analysis.plans.methods.scan_evidence import group_maxima, readers_of, reduce_group, sharing_notes
from headscan.analysis.store.behaviour_rows import behaving_heads, measured_behaviours
from headscan.analysis.store.store import Store

#: Behaviours that need distant keys; the first decides, and the second breaks ties.
BEHAVIOURS_THAT_LOOK_BACK = ("retrieval_score", "induction_score")


def retrieval_scores(store: Store, run_id: str | None) -> KeepScores:
    """Score KV heads by the behaviours of their query heads in a probe.

    The keep-score of a KV head is the largest ``retrieval_score`` (arXiv 2404.15574) of its query heads, those of
    layers that share its cache included. Many heads have a score of 0; ``induction_score`` breaks ties, then layer and
    KV head do. If the probe has no ``retrieval_score``, ``induction_score`` takes its place.

    Args:
        run_id: First characters of a probe's id; None uses the newest finished probe.

    Raises:
        PlanError: The probe has neither behaviour, all scores are 0, or no candidates.
        StoreError: No such probe.
    """
    run = store.resolve_run(run_id, "probe")
    model, recorded = planned_model(run)
    probed = measured_behaviours(store, run["run_id"])
    names = tuple(name for name in BEHAVIOURS_THAT_LOOK_BACK if name in probed)
    if not names:
        raise PlanError(
            f"run {run['run_id']} has neither {' nor '.join(BEHAVIOURS_THAT_LOOK_BACK)}, which a plan requires. Probe"
            " again with all `behaviours`"
        )
    groups = {layer.layer: layer.num_attention_heads // layer.num_key_value_heads for layer in model.layers}
    heads = _query_heads(store, run["run_id"], names, groups)
    readers = readers_of(model, heads)
    first, *others = (group_maxima(model, readers, name) for name in names)
    require_candidates(model, first)
    if max(first.values()) <= 0 and all(max(other.values(), default=0) <= 0 for other in others):
        raise PlanError(
            f"{' and '.join(names)} of all heads of {model.name} are 0 in run {run['run_id']}, so heads cannot be"
            " ordered. Use another method"
        )
    notes = [] if recorded else [DERIVED_NOTE]
    if names[0] != BEHAVIOURS_THAT_LOOK_BACK[0]:
        notes.append(f"the probe has no {BEHAVIOURS_THAT_LOOK_BACK[0]}; {names[0]} takes its place")
    scores = {place: min(max(value, 0.0), 1.0) for place, value in first.items()}
    return KeepScores(
        method="retrieval_score",
        score=f"{names[0]}, the largest of the KV head's query heads"
        + (f"; ties by {names[1]}" if len(names) > 1 else ""),
        model=model,
        scores=scores,
        order=tuple(
            sorted(scores, key=lambda place: (scores[place], *(other.get(place, 0.0) for other in others), place))
        ),
        evidence={place: reduce_group(group) for place, group in readers.items()},
        query_heads=tuple(heads),
        calibration=ProbeCalibration(
            run_id=run["run_id"],
            behaviours=names,
            corpus=run["corpus"],
            corpus_hash=run["corpus_hash"],
            tokenizer_hash=run["tokenizer_hash"],
            dtype=str(run["dtype"]).removeprefix("torch."),
            attention_path=run["attention_path"],
            code_version=run["code_version"],
        ),
        notes=(*notes, *sharing_notes(model), *protected_notes(model, scores)),
    )


def _query_heads(store: Store, run_id: str, names: tuple[str, ...], groups: dict[int, int]) -> list[QueryHead]:
    """Return the query heads of a probe with their behaviours; NaN counts as unmeasured."""
    values: dict[tuple[int, int], dict[str, float]] = {}
    for name in names:
        for found in behaving_heads(store, run_id, name):
            row = values.setdefault((found.layer, found.head), {})
            if found.value is not None and math.isfinite(found.value):
                row[name] = found.value
    return [
        QueryHead(layer, head, head // groups[layer], **values[layer, head])
        for layer, head in sorted(values)
        if layer in groups
    ]
