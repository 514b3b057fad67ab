"""KV heads that a window can be given to."""

from __future__ import annotations

from collections.abc import Sequence

from headscan.errors import UnsupportedModelError
from headscan.grid import HeadGrid
from headscan.models.loaded_model import LoadedModel
from headscan.sizing.kv_cache import NO_CACHE, LayerCache, find_caches

#: A (layer, KV head).
KvHead = tuple[int, int]


def window_candidates(lm: LoadedModel) -> tuple[KvHead, ...]:
    """Return the KV heads of a model that can keep a window: those with an unbounded cache of their own.

    Raises:
        UnsupportedModelError: The model is not a decoder, its cache cannot be sized, or no KV head can.
    """
    if not lm.grid.predicts_next_token:
        raise UnsupportedModelError(f"{lm.source} is not a decoder, so it has no plan for a KV cache. Load a decoder")
    return candidates_of(lm.grid, find_caches(lm.model).get("self", ()), lm.source)


def candidates_of(grid: HeadGrid, caches: Sequence[LayerCache], source: str) -> tuple[KvHead, ...]:
    """Return the KV heads of a grid that can keep a window.

    Args:
        caches: KV cache of each layer.
        source: Name of the model, for messages.

    Raises:
        UnsupportedModelError: No KV head can.
    """
    found: list[KvHead] = []
    reasons: dict[str, int] = {}
    for site in grid.sites:
        why = _why_not(grid, caches, site.layer)
        if why is None:
            found += [(site.layer, kv_head) for kv_head in range(site.num_key_value_heads)]
        else:
            reasons[why] = reasons.get(why, 0) + site.num_key_value_heads
    if not found:
        why = "; ".join(f"{count} {reason}" for reason, count in reasons.items()) or "it has no attention layers"
        raise UnsupportedModelError(f"no KV head of {source} can keep a window: {why}. Keep its full cache")
    return tuple(found)


def _why_not(grid: HeadGrid, caches: Sequence[LayerCache], layer: int) -> str | None:
    """Return the reason why the KV heads of a layer cannot keep a window; None if they can."""
    site = grid.site_of(layer)
    cache = caches[layer] if layer < len(caches) else NO_CACHE
    if site.kv_shared_from is not None:
        return "read the keys of an earlier layer"
    if any(other.kv_shared_from == layer for other in grid.sites):
        return "share their keys with later layers"
    if not site.causal or not cache.bytes_per_token:
        return "have no cache"
    if cache.heads % site.num_key_value_heads:
        return "share one latent vector per token (MLA)"
    if site.sliding_window is not None or cache.tokens is not None:
        return "keep a window already"
    return None
