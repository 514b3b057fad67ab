"""Plans as serving engines hold them: one window for all KV heads of a layer."""

from __future__ import annotations

from dataclasses import dataclass

from headscan.plans.head_plan import HeadPlan
from headscan.plans.plan_records import PlanError, PlannedHead

_BY_LAYER = "Make the plan by layer"


@dataclass(frozen=True)
class SlidingLayers:
    """Fields of a model's ``config.json`` by which some layers attend to a window, as vLLM and transformers read them.

    Attributes:
        layer_types: ``sliding_attention`` for layers with a window, ``full_attention`` for all others.
        sliding_window: Keys that a query of such a layer sees, its own included: ``recent`` of the plan.
    """

    layer_types: tuple[str, ...]
    sliding_window: int


def sliding_layers(plan: HeadPlan) -> SlidingLayers:
    """Return the fields of ``config.json`` for a plan. Raise PlanError if these fields cannot express the plan: they
    hold one window for whole layers, without first tokens.
    """
    windows = _windows(plan, "layer types")
    if bounded := [layer.layer for layer in plan.model.layers if layer.type == "sliding"]:
        raise PlanError(
            f"layer {bounded[0]} of {plan.model.name} has a sliding window of its own (limit: one window for a model)."
            " Serve the model without a plan"
        )
    sinks = {sink for sink, _ in windows.values()}
    if sinks - {0}:
        raise PlanError(
            f"windows keep {max(sinks)} first tokens (limit 0 with layer types). Make the plan with sink 0, or use an"
            " engine that keeps first tokens"
        )
    widths = sorted({recent for _, recent in windows.values()})
    if len(widths) > 1:
        listed = ", ".join(map(str, widths))
        raise PlanError(f"windows of {len(widths)} widths: {listed} (limit 1 with layer types). Make the plan with one")
    names = ("full_attention", "sliding_attention")
    return SlidingLayers(tuple(names[layer in windows] for layer in range(plan.model.num_layers)), widths[0])


@dataclass(frozen=True)
class CacheWindows:
    """Arguments of ``KvCacheConfig`` in TensorRT-LLM.

    Attributes:
        max_attention_window: Tokens that each layer keeps, first ones included; the model's positions for a full cache.
        sink_token_length: First tokens of every window; None keeps none.
    """

    max_attention_window: tuple[int, ...]
    sink_token_length: int | None


def cache_windows(plan: HeadPlan) -> CacheWindows:
    """Return the arguments of TensorRT-LLM's ``KvCacheConfig`` for a plan. Raise PlanError if these arguments cannot
    express the plan: they hold one window for each whole layer, and one number of first tokens.
    """
    model, windows = plan.model, _windows(plan, "KvCacheConfig")
    if len(model.layers) != model.num_layers:
        layer = min(set(range(model.num_layers)) - {each.layer for each in model.layers})
        raise PlanError(f"layer {layer} of {model.name} has no attention, and so no window. Use another engine")
    if model.max_tokens is None:
        raise PlanError(f"{model.name} has no known number of positions, which full layers need. Make the plan again")
    sinks = sorted({sink for sink, _ in windows.values()})
    if len(sinks) > 1:
        listed = ", ".join(map(str, sinks))
        raise PlanError(f"windows keep different numbers of first tokens: {listed} (limit 1). Make the plan with one")
    kept = [sum(windows.get(layer.layer, (layer.sliding_window or model.max_tokens, 0))) for layer in model.layers]
    return CacheWindows(tuple(kept), sinks[0] or None)


def _windows(plan: HeadPlan, form: str) -> dict[int, tuple[int, int]]:
    """Return (sink, recent) by layer with a window, at least one; raise PlanError if a layer keeps several things."""
    by_layer: dict[int, list[PlannedHead]] = {}
    for head in plan.heads:
        by_layer.setdefault(head.layer, []).append(head)
    window_of: dict[int, tuple[int, int]] = {}
    for layer, heads in by_layer.items():
        if dropped := sum(head.action == "drop" for head in heads):
            raise PlanError(
                f"layer {layer} drops {dropped} of {len(heads)} KV heads (limit 0 with {form}). Prune the model instead"
            )
        windows = {(head.sink or 0, head.recent) for head in heads if head.recent is not None}
        windowed = sum(head.action == "window" for head in heads)
        if windowed and windowed < len(heads):
            raise PlanError(
                f"layer {layer} has windows on {windowed} of {len(heads)} KV heads (limit none or all with {form})."
                f" {_BY_LAYER}"
            )
        if len(windows) > 1:
            raise PlanError(
                f"the KV heads of layer {layer} have {len(windows)} windows (limit 1 with {form}). {_BY_LAYER}"
            )
        for sink, recent in windows:
            window_of[layer] = (sink, recent)
    if not window_of:
        raise PlanError("the plan has no windows, so there is nothing to export. Serve the model as it is")
    return window_of
