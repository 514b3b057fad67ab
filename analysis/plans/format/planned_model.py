"""Model and KV cache layout of a plan, from a run's record."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from headscan.analysis.plans.format.plan_records import LayerType, PlanError, PlannedLayer, PlannedModel

_DTYPE_BYTES = {
    "float64": 8,
    "float32": 4,
    "bfloat16": 2,
    "float16": 2,
    "float8_e4m3fn": 1,
    "float8_e5m2": 1,
}

#: Note of a plan whose scan did not record the KV cache.
DERIVED_NOTE = (
    "the scan does not record the KV cache: bytes assume that every KV head caches a key and a value of each token,"
    " which is wrong for a latent cache (MLA), layers that share a cache, and chunked attention; scan again for exact"
    " bytes"
)


def planned_model(run: Mapping[str, Any], *, equal_groups: bool = True) -> tuple[PlannedModel, bool]:
    """Return the model of a scan from its row of ``runs``, and whether the row records the KV cache.

    Args:
        equal_groups: Refuse a pruned model in which query heads of one layer read KV heads in groups of different
            sizes. False accepts it, for methods that score KV heads themselves.

    Raises:
        PlanError: The run records no self-attention, its KV cache can be neither read nor derived, or groups differ in
            size.
    """
    sites = sorted((site for site in run["grid"] or () if site["site"] == "self"), key=lambda site: site["layer"])
    if not sites:
        raise PlanError(f"run {run['run_id']} does not record the model's self-attention heads. Scan again")
    uneven = [site["layer"] for site in sites if site.get("kv_index") is not None]
    if equal_groups and uneven:
        raise PlanError(
            f"layer {uneven[0]} of {run['model']}: its KV heads serve different numbers of query heads (limit: one"
            " number per layer). Use method measured or random"
        )
    recorded = all(site.get("cache_bytes_per_token") is not None for site in sites)
    model = PlannedModel(
        name=run["model"],
        revision=run["model_revision"],
        config_hash=run["model_config_hash"],
        weights_hash=run["weights_hash"],
        num_layers=run["num_layers"],
        dtype=str(run["dtype"]).removeprefix("torch."),
        layers=tuple(_layer(site if recorded else site | _derived_cache(run, site)) for site in sites),
        max_tokens=sites[0].get("max_tokens"),
    )
    return model, recorded


def _derived_cache(run: Mapping[str, Any], site: Mapping[str, Any]) -> dict[str, Any]:
    """Derive the cache of a layer for older runs: a key and a value of each token in each KV head.

    Raises:
        PlanError: The widths of key and value are unknown or differ, as in MLA.
    """
    size = _DTYPE_BYTES.get(str(run["dtype"]).removeprefix("torch."))
    if size is None:
        raise PlanError(
            f"run {run['run_id']} does not record the KV cache and has dtype {run['dtype']}, whose bytes are unknown."
            f" Scan again with one of {', '.join(_DTYPE_BYTES)}"
        )
    if not site["head_dim"] or site["head_dim"] != site["value_dim"]:
        raise PlanError(
            f"run {run['run_id']} does not record the KV cache, and it does not follow from key width"
            f" {site['head_dim']} and value width {site['value_dim']} of layer {site['layer']}. Scan again"
        )
    heads, window = site["num_key_value_heads"], site["sliding_window"]
    return {
        "cache_heads": heads,
        "cache_bytes_per_token": heads * (site["head_dim"] + site["value_dim"]) * size,
        # The newest token of a window is not in the cache when it is read.
        "cache_tokens": None if window is None else window - 1,
    }


def _layer(site: Mapping[str, Any]) -> PlannedLayer:
    kind, heads = _type(site), site["num_key_value_heads"]
    return PlannedLayer(
        layer=site["layer"],
        type=kind,
        num_attention_heads=site["num_attention_heads"],
        num_key_value_heads=heads,
        head_dim=site["head_dim"],
        value_dim=site["value_dim"],
        sliding_window=site["sliding_window"],
        cache_bytes_per_token=site["cache_bytes_per_token"],
        cache_tokens=site["cache_tokens"],
        kv_bytes=site["cache_bytes_per_token"] // heads if kind in ("full", "sliding") else None,
        kv_shared_from=site.get("kv_shared_from"),
    )


def _type(site: Mapping[str, Any]) -> LayerType:
    if site.get("kv_shared_from") is not None:
        return "shared"
    if not site["cache_bytes_per_token"]:
        return "uncached"
    if site["cache_heads"] % site["num_key_value_heads"]:
        return "latent"
    return "full" if site["cache_tokens"] is None and site["sliding_window"] is None else "sliding"
