"""Head plans from scans: KV heads that attend far back keep their whole cache."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from headscan.analysis.plans.evidence import by_kv_head, measure_calibration, measure_query_heads, reduce_group
from headscan.analysis.plans.head_plan import HeadPlan, PlanError, check_model
from headscan.analysis.plans.plan_files import load_plan
from headscan.analysis.plans.plan_records import Budget, Calibration, LengthBudget, PlannedHead, PlannedModel, QueryHead
from headscan.analysis.plans.planned_model import DERIVED_NOTE, planned_model
from headscan.analysis.store.store import Store

__all__ = ["BUDGET_LENGTHS", "HeadPlan", "PlanError", "check_model", "load_plan", "make_plan"]

#: Sequence lengths at which a plan reports saved KV bytes: 4k, 32k and 128k.
BUDGET_LENGTHS = (4096, 32768, 131072)

SCORE = (
    "far_mass * output_norm_ln of each query head (far_mass: distant mass of the queries that have distant keys), the"
    " largest of the KV head's query heads, over the largest of all candidates"
)

#: Reasons by type of layer, and for missing numbers.
_WHY_PROTECTED = {
    "sliding": "the model itself bounds their layers, with a sliding window or in chunks",
    "latent": "their layers cache one latent vector a token for all heads (MLA)",
    "shared": "their layers read the cache of an earlier layer",
    "uncached": "their layers cache nothing",
    "unmeasured": "not all of their query heads were measured",
}


def make_plan(
    store: Store,
    run_id: str | None,
    *,
    window_share: float,
    sink: int = 4,
    recent: int = 256,
    validation: Mapping[str, Any] | None = None,
) -> HeadPlan:
    """Make a plan: KV heads whose query heads use distant keys least get a window.

    The need of a query head for distant keys is its distant mass times its layer-normalised output norm: approximately
    the part of its output that distant keys contribute, relative to the mean output of its layer. It is zero if either
    factor is, so heads that attend far back but write little, and heads that write much from recent tokens, both rank
    low. The need of a KV head is the largest need of its query heads, and its keep-score is that need over the largest
    one of all candidates.

    Distant mass is counted over queries that have distant keys (``Evidence.far_mass``); for other queries it is zero by
    definition. Candidates are KV heads with an unbounded cache of their own. Heads of sliding layers, of MLA and of
    layers that read an earlier layer's cache are no candidates; query heads of the latter count for the earlier layer.
    KV heads with an unmeasured query head are no candidates either.

    Args:
        run_id: First characters of a scan's id; None uses the newest finished scan.
        window_share: Share of the candidates that get a window, above 0 and at most 1; rounded to the nearest count, at
            least one head. Lowest scores come first; layer and KV head break ties.
        sink: Number of first tokens in a window.
        recent: Number of last tokens in a window.
        validation: Benchmark result of this plan, which JSON can hold; None if not validated.

    Raises:
        PlanError: A value out of range, a window narrower than sink and recent of the scan, no longer sequence, an
            unmeasured statistic, or no candidates.
        StoreError: No such scan.
    """
    run = store.resolve_run(run_id, "scan")
    scan_sink, scan_recent = _scan_widths(run)
    _check_window(window_share, sink, recent, scan_sink, scan_recent)
    model, recorded = planned_model(run)
    calibration = measure_calibration(store, run, scan_sink + scan_recent, scan_sink, scan_recent)
    query_heads = measure_query_heads(store, run["run_id"], scan_sink + scan_recent)
    readers = _readers(model, query_heads)
    needs = _needs(model, readers)
    candidates = {place: need for place, need in needs.items() if need is not None}
    if not candidates:
        raise PlanError(
            f"no KV head of {model.name} can get a window: {'; '.join(_protected(model, needs))}. Keep its full cache"
        )
    most = max(candidates.values())
    if most <= 0:
        raise PlanError(
            f"no head of {model.name} has weight beyond {scan_sink + scan_recent} tokens in run {run['run_id']}, so"
            " heads cannot be ordered. Scan other text, or scan with a smaller recent"
        )
    order = sorted(candidates, key=lambda place: (candidates[place], place))
    windows = set(order[: max(1, math.floor(window_share * len(order) + 0.5))])

    def planned(layer: int, kv_head: int) -> PlannedHead:
        place = (layer, kv_head)
        is_window, is_candidate = place in windows, place in candidates
        return PlannedHead(
            layer=layer,
            kv_head=kv_head,
            score=candidates[place] / most if is_candidate else 1.0,
            head_class="streaming" if is_window else "retrieval" if is_candidate else "protected",
            action="window" if is_window else "full",
            sink=sink if is_window else None,
            recent=recent if is_window else None,
            evidence=reduce_group(readers.get(place, [])),
        )

    return HeadPlan(
        model=model,
        calibration=calibration,
        granularity="kv_head",
        group_reduction="max",
        score=SCORE,
        heads=tuple(planned(layer.layer, k) for layer in model.layers for k in range(layer.num_key_value_heads)),
        query_heads=tuple(query_heads),
        budget=_budget(model, windows, sink + recent),
        validation=validation,
        notes=tuple(_notes(run, calibration, model, needs, recorded)),
    )


def _scan_widths(run: Mapping[str, Any]) -> tuple[int, int]:
    """Return the widths of sink and recent in a scan."""
    try:
        return int(run["config"]["sink"]), int(run["config"]["recent"])
    except (KeyError, TypeError, ValueError) as error:
        raise PlanError(
            f"run {run['run_id']} does not record the widths of sink and recent. Scan again with `headscan scan`"
        ) from error


def _check_window(window_share: float, sink: int, recent: int, scan_sink: int, scan_recent: int) -> None:
    if not 0 < window_share <= 1:
        raise PlanError(f"window_share out of range: {window_share:g} (limit above 0, at most 1). Change it")
    for name, width, scanned in (("sink", sink, scan_sink), ("recent", recent, scan_recent)):
        if width < max(scanned, 1):
            raise PlanError(
                f"{name} of the window is too narrow: {width} (limit {max(scanned, 1)}, {name} of the scan). Raise"
                f" `{name}`, or scan again with {name} {max(width, 1)}"
            )


def _readers(model: PlannedModel, query_heads: Sequence[QueryHead]) -> dict[tuple[int, int], list[QueryHead]]:
    """Return the query heads that read each KV head, including those of layers that share its cache."""
    own = by_kv_head(query_heads)
    readers = {place: list(group) for place, group in own.items()}
    for layer in model.layers:
        if layer.kv_shared_from is not None:
            for k in range(layer.num_key_value_heads):
                readers.setdefault((layer.kv_shared_from, k), []).extend(own.get((layer.layer, k), []))
    return readers


def _needs(
    model: PlannedModel, readers: Mapping[tuple[int, int], Sequence[QueryHead]]
) -> dict[tuple[int, int], float | None]:
    """Return the largest need of the readers of each KV head of full layers; None if one is unmeasured."""
    needs: dict[tuple[int, int], float | None] = {}
    for layer in model.layers:
        if layer.type != "full":
            continue
        served = [each for each in model.layers if layer.layer in (each.layer, each.kv_shared_from)]
        expected = sum(each.num_attention_heads // each.num_key_value_heads for each in served)
        for k in range(layer.num_key_value_heads):
            values = [head.need for head in readers.get((layer.layer, k), ())]
            known = [value for value in values if value is not None]
            needs[layer.layer, k] = max(known) if len(known) == expected else None
    return needs


def _budget(model: PlannedModel, windows: Collection[tuple[int, int]], width: int) -> Budget:
    """Return the bytes of one sequence's cache; a window head keeps ``min(tokens, width)`` tokens."""
    bytes_of = {layer.layer: layer.kv_bytes or 0 for layer in model.layers}

    def at(tokens: int) -> LengthBudget:
        whole = sum(layer.cache_bytes(tokens) for layer in model.layers)
        saved = sum(max(0, tokens - width) * bytes_of[layer] for layer, _ in windows)
        return LengthBudget(tokens, whole, whole - saved, saved, saved / whole)

    heads = sum(layer.num_key_value_heads for layer in model.layers)
    return Budget(heads, len(windows), len(windows) / heads, tuple(at(tokens) for tokens in BUDGET_LENGTHS))


def _protected(model: PlannedModel, needs: Mapping[tuple[int, int], float | None]) -> list[str]:
    """Return the number of KV heads that cannot get a window, by reason."""
    counts = Counter[str]()
    for layer in model.layers:
        counts[layer.type] += layer.num_key_value_heads
    counts["unmeasured"] = sum(need is None for need in needs.values())
    return [f"{counts[kind]} KV heads are protected: {why}" for kind, why in _WHY_PROTECTED.items() if counts[kind]]


def _notes(
    run: Mapping[str, Any],
    calibration: Calibration,
    model: PlannedModel,
    needs: Mapping[tuple[int, int], float | None],
    recorded: bool,
) -> list[str]:
    notes = []
    if run["status"] != "finished":
        notes.append(f"the scan is {run['status']}: its evidence covers the stored sequences")
    if calibration.evidence_sequences < calibration.sequences:
        notes.append(
            f"{calibration.evidence_sequences} of {calibration.sequences} sequences are longer than the"
            f" {calibration.sink + calibration.recent} tokens of sink and recent; only they are evidence"
        )
    if not recorded:
        notes.append(DERIVED_NOTE)
    for layer in sorted({each.kv_shared_from for each in model.layers if each.kv_shared_from is not None}):
        readers = [str(each.layer) for each in model.layers if each.kv_shared_from == layer]
        notes.append(
            f"the cache of layer {layer} is also read by layer {', '.join(readers)}: its scores cover those query heads"
        )
    return notes + _protected(model, needs)
