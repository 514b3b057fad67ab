"""Plans as serving engines hold them: windows on whole layers, and windows by KV head for the plugin of vLLM."""

from __future__ import annotations

from itertools import groupby
from typing import Any

from headscan.plans.head_plan import HeadPlan
from headscan.plans.plan_records import PlanError
from headscan.windows import DROPPED, Window

_BY_LAYER = "Make the plan by layer"
_NOTHING = "the plan has no windows, so there is nothing to export. Serve the model as it is"


def sliding_layers(plan: HeadPlan) -> dict[str, Any]:
    """Return the fields of a model's ``config.json`` by which some layers attend to a window, as vLLM and transformers
    read them: ``layer_types``, ``sliding_attention`` for layers with a window and ``full_attention`` for all others,
    and ``sliding_window``, the keys that a query of such a layer sees, its own included. Raise PlanError if these
    fields cannot express the plan: they hold one window for whole layers, without first tokens.
    """
    windows = _windows(plan, "layer types")
    if bounded := [layer.layer for layer in plan.model.layers if layer.type == "sliding"]:
        raise PlanError(
            f"layer {bounded[0]} of {plan.model.name} has a sliding window of its own (limit: one window for a model)."
            " Serve the model without a plan"
        )
    sinks = {window.sink for window in windows.values()}
    if sinks - {0}:
        raise PlanError(
            f"windows keep {max(sinks)} first tokens (limit 0 with layer types). Make the plan with sink 0, or use an"
            " engine that keeps first tokens"
        )
    widths = sorted({window.recent for window in windows.values()})
    if len(widths) > 1:
        listed = ", ".join(map(str, widths))
        raise PlanError(f"windows of {len(widths)} widths: {listed} (limit 1 with layer types). Make the plan with one")
    names = ("full_attention", "sliding_attention")
    layer_types = [names[layer in windows] for layer in range(plan.model.num_layers)]
    return {"layer_types": layer_types, "sliding_window": widths[0]}


def cache_windows(plan: HeadPlan) -> dict[str, Any]:
    """Return the arguments of ``KvCacheConfig`` in TensorRT-LLM: ``max_attention_window``, the tokens that each layer
    keeps, first ones included, which are the model's positions for a full cache; and ``sink_token_length``, the first
    tokens of every window, if there are any. Raise PlanError if these arguments cannot express the plan: they hold one
    window for each whole layer, and one number of first tokens.
    """
    model, windows = plan.model, _windows(plan, "KvCacheConfig")
    if len(model.layers) != model.num_layers:
        layer = min(set(range(model.num_layers)) - {each.layer for each in model.layers})
        raise PlanError(f"layer {layer} of {model.name} has no attention, and so no window. Use another engine")
    if model.max_tokens is None:
        raise PlanError(f"{model.name} has no known number of positions, which full layers need. Make the plan again")
    sinks = sorted({window.sink for window in windows.values()})
    if len(sinks) > 1:
        listed = ", ".join(map(str, sinks))
        raise PlanError(f"windows keep different numbers of first tokens: {listed} (limit 1). Make the plan with one")
    kept = [
        windows[layer.layer].sink + windows[layer.layer].recent
        if layer.layer in windows
        else layer.sliding_window or model.max_tokens
        for layer in model.layers
    ]
    return {"max_attention_window": kept} | ({"sink_token_length": sinks[0]} if sinks[0] else {})


def _windows(plan: HeadPlan, form: str) -> dict[int, Window]:
    """Return the window by layer with one, at least one layer; raise PlanError if a layer keeps several things."""
    window_of: dict[int, Window] = {}
    for layer, group in groupby(plan.heads, key=lambda head: head.layer):
        windows = [head.window for head in group]
        if dropped := windows.count(DROPPED):
            raise PlanError(
                f"layer {layer} drops {dropped} of {len(windows)} KV heads (limit 0 with {form}). Prune the model"
                " instead"
            )
        kinds = {window for window in windows if window is not None}
        if kinds and None in windows:
            raise PlanError(
                f"layer {layer} has windows on {len(windows) - windows.count(None)} of {len(windows)} KV heads (limit"
                f" none or all with {form}). {_BY_LAYER}"
            )
        if len(kinds) > 1:
            raise PlanError(
                f"the KV heads of layer {layer} have {len(kinds)} windows (limit 1 with {form}). {_BY_LAYER}"
            )
        if kinds:
            window_of[layer] = kinds.pop()
    if not window_of:
        raise PlanError(_NOTHING)
    return window_of


def head_windows(plan: HeadPlan) -> tuple[list[tuple[int, int]], list[list[int]]]:
    """Return the first and last tokens of each window of a plan, ascending, and a row for each layer with a number for
    each KV head: 0 keeps all tokens, i the window ``windows[i - 1]``. A layer without attention is empty. Raise
    PlanError if the plan has no windows, or drops heads.
    """
    if dropped := sum(head.window == DROPPED for head in plan.heads):
        raise PlanError(f"the plan drops {dropped} KV heads (limit 0 in vLLM). Prune the model instead")
    windows = sorted({head.window for head in plan.heads if head.window is not None})
    if not windows:
        raise PlanError(_NOTHING)
    rows: list[list[int]] = [[] for _ in range(plan.model.num_layers)]
    for head in plan.heads:
        rows[head.layer].append(0 if head.window is None else 1 + windows.index(head.window))
    return [(window.sink, window.recent) for window in windows], rows
