"""Methods ``distant_mass`` and ``retrieval_score``: KV heads that look far back keep their full cache.

The evidence of query heads comes from a scan or a probe, and is reduced to KV heads.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from headscan.plans.keep_scores import KeepScores, protected_notes, require_candidates
from headscan.plans.plan_records import (
    DERIVED_NOTE,
    LengthBin,
    PlanError,
    PlannedModel,
    ProbeCalibration,
    QueryHead,
    ScanCalibration,
    planned_model,
)
from headscan.ranking.head_ranking import measured_behaviours, rank_behaviours
from headscan.store.store import Store


def measure_calibration(store: Store, run: Mapping[str, Any], sink: int, recent: int) -> ScanCalibration:
    """Return corpus and lengths of a scan; sequences of at most ``sink + recent`` tokens have no distant keys."""
    bounded = sink + recent
    row = store.query(
        "SELECT count(*) AS sequences, coalesce(sum(tokens), 0)::BIGINT AS tokens, max(tokens) AS longest,"
        " count(*) FILTER (tokens > $2) AS evidence, coalesce(sum(greatest(tokens - $2, 0)), 0)::BIGINT AS queries"
        " FROM sequences WHERE run_id = $1",
        [run["run_id"], bounded],
    ).to_pylist()[0]
    if not row["evidence"]:
        raise PlanError(
            f"the longest of the {row['sequences']} sequences of run {run['run_id']} has {row['longest'] or 0} tokens,"
            f" at most the {bounded} of sink and recent, so their distant mass is zero by definition. Scan longer"
            f" sequences, or scan again with recent below {recent}"
        )
    bins = store.query(
        "SELECT floor(log2(greatest(tokens, 1)))::INTEGER AS power, count(*) AS sequences FROM sequences"
        " WHERE run_id = ? GROUP BY 1 ORDER BY 1",
        [run["run_id"]],
    ).to_pylist()
    return ScanCalibration.by_name(
        {**run, **row},
        dtype=str(run["dtype"]).removeprefix("torch."),
        length_histogram=tuple(LengthBin(2 ** b["power"], 2 ** (b["power"] + 1), b["sequences"]) for b in bins),
        sink=sink,
        recent=recent,
        evidence_sequences=row["evidence"],
        evidence_queries=row["queries"],
    )


#: Means of query heads over long sequences.
_LONG_MEANS = ("sink_mass", "recent_mass", "distant_mass", "entropy", "output_norm", "output_norm_ln")


def measure_query_heads(store: Store, run_id: str) -> list[QueryHead]:
    """Return the means of every measured query head over sequences that are longer than sink and recent together."""
    site = next((each for each in store.summaries(run_id, _LONG_MEANS) if each.heads.site == "self"), None)
    rows: list[dict[str, Any]] = []
    if site is not None:
        heads, spreads = site
        columns: dict[str, Any] = {"layer": heads.layer, "head": heads.head, "kv_head": heads.kv_head}
        columns |= {name: spreads[name].long_mean if name in spreads else None for name in _LONG_MEANS}
        columns["far_mass"] = spreads["distant_mass"].far_mean if "distant_mass" in spreads else None
        numbers = [_numbers(values, len(heads)) for values in columns.values()]
        rows = [dict(zip(columns, of_head, strict=True)) for of_head in zip(*numbers, strict=True)]
    for name in ("distant_mass", "output_norm"):
        if all(row[name] is None for row in rows):
            raise PlanError(
                f"run {run_id} did not measure {name}, which a plan requires. Scan again with {name} among the"
                " statistics"
            )
    for row in rows:
        far, norm = row["far_mass"], row["output_norm_ln"]
        if far is not None:
            # A share by definition, but single-precision rounding can exceed 0 or 1.
            row["far_mass"] = far = min(max(far, 0.0), 1.0)
        row["need"] = None if far is None or norm is None else far * norm
    return [QueryHead(**row) for row in rows]


def _numbers(values: np.ndarray | None, heads: int) -> list[Any]:
    """Return a column as numbers; None for a head that was not measured."""
    if values is None:
        return [None] * heads
    return [None if math.isnan(value) else value for value in values.tolist()]


def readers_of(model: PlannedModel, query_heads: Sequence[QueryHead]) -> dict[tuple[int, int], list[QueryHead]]:
    """Return the query heads that read each KV head, including those of layers that share its cache."""
    shared_from = {layer.layer: layer.kv_shared_from for layer in model.layers if layer.kv_shared_from is not None}
    readers: dict[tuple[int, int], list[QueryHead]] = defaultdict(list)
    for head in query_heads:
        readers[head.layer, head.kv_head].append(head)
        if head.layer in shared_from:
            readers[shared_from[head.layer], head.kv_head].append(head)
    return dict(readers)


def group_maxima(
    model: PlannedModel, readers: Mapping[tuple[int, int], Sequence[QueryHead]], name: str
) -> dict[tuple[int, int], float]:
    """Return the largest value of the readers of each KV head of full layers; without heads that lack a value."""
    maxima: dict[tuple[int, int], float] = {}
    for layer in model.layers:
        if layer.type != "full":
            continue
        served = [each for each in model.layers if layer.layer in (each.layer, each.kv_shared_from)]
        expected = sum(each.num_attention_heads // each.num_key_value_heads for each in served)
        for k in range(layer.num_key_value_heads):
            values = [getattr(head, name) for head in readers.get((layer.layer, k), ())]
            known = [value for value in values if value is not None]
            if known and len(known) == expected:
                maxima[layer.layer, k] = max(known)
    return maxima


def sharing_notes(model: PlannedModel) -> list[str]:
    """Return a note for each layer whose cache later layers read too."""
    notes = []
    for layer in sorted({each.kv_shared_from for each in model.layers if each.kv_shared_from is not None}):
        readers = [str(each.layer) for each in model.layers if each.kv_shared_from == layer]
        notes.append(
            f"the cache of layer {layer} is also read by layer {', '.join(readers)}: its scores cover those query heads"
        )
    return notes


SCORE = (
    "far_mass * output_norm_ln of each query head (far_mass: distant mass of the queries that have distant keys), the"
    " largest of the KV head's query heads, over the largest of all candidates"
)


def distant_mass_scores(store: Store, run_id: str | None) -> KeepScores:
    """Score KV heads by the use that their query heads make of distant keys in a scan.

    The need of a query head is ``far_mass * output_norm_ln`` (see `QueryHead`): approximately the part of its output
    that distant keys contribute, relative to the mean output of its layer. Heads that attend far back but write little,
    and heads that write much from recent tokens, both rank low. The need of a KV head is the largest need of its query
    heads; its keep-score is ``need / max(need)`` over all candidates, in the order ``(score, layer, KV head)``.

    Candidates are KV heads with an unbounded cache of their own and no unmeasured query head. Heads of sliding layers,
    of MLA and of layers that read an earlier layer's cache are no candidates; query heads of the latter count for the
    earlier layer.
    """
    with store.reading():
        run = store.resolve_run(run_id, "scan")
        sink, recent = _scan_widths(run)
        model, recorded = planned_model(run)
        calibration = measure_calibration(store, run, sink, recent)
    query_heads = measure_query_heads(store, run["run_id"])
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
        query_heads=tuple(query_heads),
        calibration=calibration,
        notes=(*_scan_notes(run, calibration, recorded), *sharing_notes(model), *protected_notes(model, needs)),
        sink=max(sink, 1),
        recent=max(recent, 1),
    )


def _scan_widths(run: Mapping[str, Any]) -> tuple[int, int]:
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


#: Behaviours that need distant keys; the first decides, and the second breaks ties.
BEHAVIOURS_THAT_LOOK_BACK = ("retrieval_score", "induction_score")


def retrieval_scores(store: Store, run_id: str | None) -> KeepScores:
    """Score KV heads by the behaviours of their query heads in a probe.

    The keep-score of a KV head is the largest ``retrieval_score`` (arXiv 2404.15574) of its query heads, those of
    layers that share its cache included. Many heads have a score of 0; ``induction_score`` breaks ties, then layer and
    KV head do. If the probe has no ``retrieval_score``, ``induction_score`` takes its place.
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
        query_heads=tuple(heads),
        calibration=ProbeCalibration.by_name(run, behaviours=names, dtype=str(run["dtype"]).removeprefix("torch.")),
        notes=(*notes, *sharing_notes(model), *protected_notes(model, scores)),
    )


def _query_heads(store: Store, run_id: str, names: tuple[str, ...], groups: dict[int, int]) -> list[QueryHead]:
    """Return the query heads of a probe with their behaviours; NaN counts as unmeasured."""
    values: dict[tuple[int, int], dict[str, float]] = {}
    for name in names:
        for behaving in rank_behaviours(store, run_id, name):
            row = values.setdefault((behaving.layer, behaving.head), {})
            if behaving.value is not None and math.isfinite(behaving.value):
                row[name] = behaving.value
    return [
        QueryHead(layer, head, head // groups[layer], **values[layer, head])
        for layer, head in sorted(values)
        if layer in groups
    ]
