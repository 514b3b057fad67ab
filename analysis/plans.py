"""Making a head plan from a scan: which KV heads look far enough back to need their whole cache."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any

from analysis.head_plan import (
    Budget,
    Calibration,
    HeadPlan,
    LengthBudget,
    PlanError,
    PlannedHead,
    PlannedLayer,
    PlannedModel,
    QueryHead,
    check_model,
)
from analysis.plan_evidence import by_kv_head, measure_calibration, measure_query_heads, reduce_group
from analysis.plan_files import load_plan
from analysis.store import Store

__all__ = ["BUDGET_LENGTHS", "HeadPlan", "PlanError", "check_model", "load_plan", "make_plan"]

#: Tokens at which a plan says how many KV bytes it saves: 4k, 32k and 128k.
BUDGET_LENGTHS = (4096, 32768, 131072)

SCORE = (
    "far_mass * output_norm_ln of each query head (far_mass: distant mass of the queries that have distant keys), the"
    " largest of the KV head's query heads, over the largest of all candidates"
)

_DTYPE_BYTES = {
    "float64": 8,
    "float32": 4,
    "bfloat16": 2,
    "float16": 2,
    "float8_e4m3fn": 1,
    "float8_e5m2": 1,
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
    """Give a window to the KV heads whose query heads all get little from far away.

    What a query head ``needs`` of distant keys is its distant mass times its layer-normalised output norm: about the
    part of its output that comes from there, in units of what a head of its layer writes. It grows with both and is
    zero when either is, so a head that looks far back but writes nothing, and one that writes a lot from its window,
    both rank low. A KV head is needed as much as its neediest query head needs it, and its keep-score is that over the
    largest of all candidates.

    Distant mass is counted per query that has distant keys (``Evidence.far_mass``), over the sequences that have such
    queries: elsewhere it is zero by construction and says nothing. Layers with a sliding window are bounded already and
    never candidates; nor are KV heads of which a query head was not measured.

    Args:
        run_id: The scan, or the beginning of its name; None: the newest finished one.
        window_share: Share of the candidates that get a window, above 0 and at most 1; rounded to the nearest, but one
            head at least. The lowest scores come first, then the order of layer and KV head.
        sink: First tokens that a window keeps.
        recent: Last tokens that a window keeps.
        validation: What a benchmark said of this plan, JSON-able.

    Raises:
        PlanError: A value out of range, a window narrower than what the scan counted as sink and recent, no sequence
            longer than these, a statistic that was not measured, or no candidates.
        StoreError: No such scan.
    """
    run = store.resolve_run(run_id, "scan")
    scan_sink, scan_recent = _scan_widths(run)
    _check_window(window_share, sink, recent, scan_sink, scan_recent)
    model = _model(run)
    calibration = measure_calibration(store, run, scan_sink + scan_recent, scan_sink, scan_recent)
    query_heads = measure_query_heads(store, run["run_id"], scan_sink + scan_recent)
    needs = _group_needs(model, query_heads)
    candidates = {place: need for place, need in needs.items() if need is not None}
    if not candidates:
        raise PlanError(
            f"no KV head of {model.name} can get a window: every layer has a sliding window of its own or was not"
            " measured; there is nothing to plan"
        )
    most = max(candidates.values())
    if most <= 0:
        raise PlanError(
            f"no head of {model.name} put any weight beyond {scan_sink + scan_recent} tokens in run {run['run_id']}:"
            " the order of the heads would be chance; scan other text, or with a smaller --recent"
        )
    order = sorted(candidates, key=lambda place: (candidates[place], place))
    windows = set(order[: max(1, math.floor(window_share * len(order) + 0.5))])
    groups = by_kv_head(query_heads)

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
            evidence=reduce_group(groups.get(place, [])),
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
        notes=tuple(_notes(run, calibration, model, needs)),
    )


def _scan_widths(run: Mapping[str, Any]) -> tuple[int, int]:
    """Sink and recent of the scan's masses."""
    try:
        return int(run["config"]["sink"]), int(run["config"]["recent"])
    except (KeyError, TypeError, ValueError) as error:
        raise PlanError(
            f"run {run['run_id']} does not record the widths of sink and recent: scan again, with `headscan scan`"
        ) from error


def _check_window(window_share: float, sink: int, recent: int, scan_sink: int, scan_recent: int) -> None:
    if not 0 < window_share <= 1:
        raise PlanError(f"window share {window_share:g} of the KV heads is out of range: above 0 and at most 1")
    for name, width, scanned in (("sink", sink, scan_sink), ("recent", recent, scan_recent)):
        if width < max(scanned, 1):
            raise PlanError(
                f"a window with {name} {width} is narrower than the {scanned} tokens that the scan counted as {name},"
                f" so the evidence does not cover it: plan with --{name} {max(scanned, 1)} or more, or scan again with"
                f" --{name} {max(width, 1)}"
            )


def _model(run: Mapping[str, Any]) -> PlannedModel:
    """The model of a scan, from its ``runs`` row."""
    size = _DTYPE_BYTES.get(str(run["dtype"]).removeprefix("torch."))
    if size is None:
        raise PlanError(
            f"run {run['run_id']} has dtype {run['dtype']}, whose bytes are not known, so KV bytes cannot be counted:"
            f" scan with one of {', '.join(_DTYPE_BYTES)}"
        )
    sites = sorted((site for site in run["grid"] or () if site["site"] == "self"), key=lambda site: site["layer"])
    if not sites:
        raise PlanError(f"run {run['run_id']} does not record the model's self-attention heads: scan again")
    return PlannedModel(
        name=run["model"],
        revision=run["model_revision"],
        config_hash=run["model_config_hash"],
        weights_hash=run["weights_hash"],
        num_layers=run["num_layers"],
        dtype=str(run["dtype"]).removeprefix("torch."),
        layers=tuple(
            PlannedLayer(
                layer=site["layer"],
                type="full" if site["sliding_window"] is None else "sliding",
                num_attention_heads=site["num_attention_heads"],
                num_key_value_heads=site["num_key_value_heads"],
                head_dim=site["head_dim"],
                value_dim=site["value_dim"],
                sliding_window=site["sliding_window"],
                kv_bytes=(site["head_dim"] + site["value_dim"]) * size,
            )
            for site in sites
        ),
    )


def _group_needs(model: PlannedModel, query_heads: Iterable[QueryHead]) -> dict[tuple[int, int], float | None]:
    """What the neediest query head of each unbounded KV head needs; None unless all of them were measured."""
    groups = by_kv_head(query_heads)
    needs: dict[tuple[int, int], float | None] = {}
    for layer in model.layers:
        if layer.sliding_window is not None:
            continue
        for k in range(layer.num_key_value_heads):
            values = [head.need for head in groups.get((layer.layer, k), [])]
            known = [value for value in values if value is not None]
            complete = len(known) == layer.num_attention_heads // layer.num_key_value_heads
            needs[layer.layer, k] = max(known) if complete else None
    return needs


def _budget(model: PlannedModel, windows: set[tuple[int, int]], width: int) -> Budget:
    """Bytes of one sequence's cache; a window head keeps ``min(tokens, width)`` tokens."""

    def at(tokens: int) -> LengthBudget:
        whole = planned = 0
        for layer in model.layers:
            kept = tokens if layer.sliding_window is None else min(tokens, layer.sliding_window)
            for k in range(layer.num_key_value_heads):
                whole += kept * layer.kv_bytes
                planned += (min(kept, width) if (layer.layer, k) in windows else kept) * layer.kv_bytes
        return LengthBudget(tokens, whole, planned, whole - planned, (whole - planned) / whole)

    heads = sum(layer.num_key_value_heads for layer in model.layers)
    return Budget(heads, len(windows), len(windows) / heads, tuple(at(tokens) for tokens in BUDGET_LENGTHS))


def _notes(
    run: Mapping[str, Any],
    calibration: Calibration,
    model: PlannedModel,
    needs: Mapping[tuple[int, int], float | None],
) -> list[str]:
    notes = []
    if run["status"] != "finished":
        notes.append(f"the scan is {run['status']}: its evidence covers the sequences that had landed")
    if calibration.evidence_sequences < calibration.sequences:
        notes.append(
            f"{calibration.evidence_sequences} of {calibration.sequences} sequences are longer than the"
            f" {calibration.sink + calibration.recent} tokens of sink and recent; only they are evidence"
        )
    if bounded := sum(layer.num_key_value_heads for layer in model.layers if layer.sliding_window is not None):
        notes.append(f"{bounded} KV heads are protected: the model bounds their layers with a sliding window")
    if unmeasured := sum(need is None for need in needs.values()):
        notes.append(f"{unmeasured} KV heads are protected: not all of their query heads were measured")
    return notes
