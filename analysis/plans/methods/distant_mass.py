"""Method ``distant_mass``: KV heads that attend far back, by a scan, keep their full cache."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from headscan.analysis.plans.format.calibrations import ScanCalibration
from headscan.analysis.plans.format.plan_records import PlanError
from headscan.analysis.plans.format.planned_model import DERIVED_NOTE, planned_model
from headscan.analysis.plans.methods.keep_scores import KeepScores, protected_notes, require_candidates
from headscan.analysis.plans.methods.scan_evidence import (
    group_maxima,
    measure_calibration,
    measure_query_heads,
    readers_of,
    reduce_group,
    sharing_notes,
)
from headscan.analysis.store.store import Store

SCORE = (
    "far_mass * output_norm_ln of each query head (far_mass: distant mass of the queries that have distant keys), the"
    " largest of the KV head's query heads, over the largest of all candidates"
)


def distant_mass_scores(store: Store, run_id: str | None) -> KeepScores:
    """Score KV heads by how much their query heads use distant keys in a scan.

    The need of a query head for distant keys is its distant mass times its layer-normalised output norm: approximately
    the part of its output that distant keys contribute, relative to the mean output of its layer. It is zero if either
    factor is, so heads that attend far back but write little, and heads that write much from recent tokens, both rank
    low. The need of a KV head is the largest need of its query heads, and its keep-score is that need over the largest
    one of all candidates.

    Distant mass is counted over queries that have distant keys (``Evidence.far_mass``); for other queries it is zero by
    definition. Candidates are KV heads with an unbounded cache of their own. Heads of sliding layers, of MLA and of
    layers that read an earlier layer's cache are no candidates; query heads of the latter count for the earlier layer.
    KV heads with an unmeasured query head are no candidates either. Layer and KV head break ties.

    Args:
        run_id: First characters of a scan's id; None uses the newest finished scan.

    Raises:
        PlanError: No longer sequence, an unmeasured statistic, no candidates, or no need at all.
        StoreError: No such scan.
    """
    run = store.resolve_run(run_id, "scan")
    sink, recent = _scan_widths(run)
    model, recorded = planned_model(run)
    calibration = measure_calibration(store, run, sink + recent, sink, recent)
    query_heads = measure_query_heads(store, run["run_id"], sink + recent)
    readers = readers_of(model, query_heads)
    needs = group_maxima(model, readers, "need")
    require_candidates(model, needs)
    most = max(needs.values())
    if most <= 0:
        raise PlanError(
            f"no head of {model.name} has weight beyond {sink + recent} tokens in run {run['run_id']}, so heads cannot"
            " be ordered. Scan other text, or scan with a smaller recent"
        )
    return KeepScores(
        method="distant_mass",
        score=SCORE,
        model=model,
        scores={place: need / most for place, need in needs.items()},
        order=tuple(sorted(needs, key=lambda place: (needs[place], place))),
        evidence={place: reduce_group(group) for place, group in readers.items()},
        query_heads=tuple(query_heads),
        calibration=calibration,
        notes=(*_scan_notes(run, calibration, recorded), *sharing_notes(model), *protected_notes(model, needs)),
        sink=max(sink, 1),
        recent=max(recent, 1),
    )


def _scan_widths(run: Mapping[str, Any]) -> tuple[int, int]:
    """Return the widths of sink and recent in a scan."""
    try:
        return int(run["config"]["sink"]), int(run["config"]["recent"])
    except (KeyError, TypeError, ValueError) as error:
        raise PlanError(
            f"run {run['run_id']} does not record the widths of sink and recent. Scan again with `headscan scan`"
        ) from error


def _scan_notes(run: Mapping[str, Any], calibration: ScanCalibration, recorded: bool) -> list[str]:
    notes = []
    if run["status"] != "finished":
        notes.append(f"the scan is {run['status']}: its evidence covers the stored sequences")
    if calibration.evidence_sequences < calibration.sequences:
        notes.append(
            f"{calibration.evidence_sequences} of {calibration.sequences} sequences are longer than the"
            f" {calibration.sink + calibration.recent} tokens of sink and recent; only they are evidence"
        )
    return notes if recorded else [*notes, DERIVED_NOTE]
