"""What a model caches of each token, layer by layer, found by letting it fill its own KV cache on the meta device.

Nothing is derived from the shapes of heads: a latent cache (MLA), a cache that another layer fills, a window and keys
that are stored for every query head all show in the cache itself.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import EncoderDecoderCache, PreTrainedModel

from headscan.errors import UnsupportedModelError
from headscan.models.forward_inputs import run
from headscan.models.layout import find_layout
from headscan.sizing.meta_pass import Allocations, FusedAttention, meta_inputs, shorten

#: Tokens of the pass, fewer than any window, and of the text that follows, longer than all.
_FEW, _MANY = 4, 1 << 24


@dataclass(frozen=True)
class LayerCache:
    """The KV cache of one attention, for one sequence.

    Attributes:
        heads: Size of its axis of heads: the KV heads, a multiple of them where they are stored for each query head, 1
            where all heads share a latent; 0: the layer caches nothing of its own.
        bytes_per_token: Bytes of one token, all heads together.
        tokens: Most tokens that it keeps; None for no limit.
        key_dim: Width of a cached key.
    """

    heads: int
    bytes_per_token: int
    tokens: int | None
    key_dim: int

    def bytes(self, tokens: int) -> int:
        """Bytes after so many tokens."""
        return self.bytes_per_token * (tokens if self.tokens is None else min(tokens, self.tokens))


#: Of a layer that attends to another layer's cache, or has none.
NO_CACHE = LayerCache(0, 0, None, 0)


def find_caches(model: PreTrainedModel) -> dict[str, tuple[LayerCache, ...]]:
    """Return what each layer of a loaded model caches; the model itself does not run.

    Returns:
        One entry for each layer, by kind of site: ``self``, and ``cross`` in encoder-decoders. Empty for an encoder.

    Raises:
        UnsupportedModelError: Its code does not run on the meta device, or its cache is of an unknown kind.
    """
    config = copy.deepcopy(model.config)
    try:
        with torch.device("meta"):
            twin = type(model)._from_config(config, dtype=model.dtype).eval()
        alike = None if config.is_encoder_decoder else shorten(twin, find_layout(twin).blocks)
    except Exception as problem:  # the model's own code, of any kind
        raise _unknown(model, problem) from problem
    return fill_caches(twin, alike)


@torch.no_grad()
def fill_caches(model: PreTrainedModel, alike: Sequence[int] | None = None) -> dict[str, tuple[LayerCache, ...]]:
    """`find_caches`, of a model on the meta device.

    Args:
        alike: For each layer the one that runs in its place, see `meta_pass.shorten`; None: all run.
    """
    try:
        with FusedAttention(), Allocations(model):
            cache = getattr(run(model, {**meta_inputs(model, _FEW), "use_cache": True}), "past_key_values", None)
        if cache is None:
            return {}
        if isinstance(cache, EncoderDecoderCache):
            return {"self": _layers(cache.self_attention_cache), "cross": _layers(cache.cross_attention_cache)}
        return {"self": _layers(cache, alike)}
    except Exception as problem:
        raise _unknown(model, problem) from problem


def _layers(cache: Any, alike: Sequence[int] | None = None) -> tuple[LayerCache, ...]:
    found = [_layer(layer) for layer in cache.layers]
    # A cache may end before the last layers, which then have no place in it.
    return tuple(found) if not alike else tuple(found[i] if i < len(found) else NO_CACHE for i in alike)


def _layer(layer: Any) -> LayerCache:
    keys, values = getattr(layer, "keys", None), getattr(layer, "values", None)
    if not isinstance(keys, Tensor) or not isinstance(values, Tensor) or not keys.numel():
        return NO_CACHE
    held, tokens = (keys, values, getattr(layer, "indexer_keys", None)), keys.shape[-2]
    per_token = sum(each.nbytes for each in held if isinstance(each, Tensor)) // tokens
    heads, width = keys.shape[1], keys.shape[-1]
    layer.update(*(each.new_empty(*each.shape[:-2], _MANY, each.shape[-1]) for each in (keys, values)))
    kept = layer.keys.shape[-2]
    return LayerCache(heads, per_token, None if kept == tokens + _MANY else kept, width)


def _unknown(model: PreTrainedModel, problem: Exception) -> UnsupportedModelError:
    line = (str(problem).strip().splitlines() or [type(problem).__name__])[0]
    return UnsupportedModelError(f"what {type(model).__name__} caches cannot be found on the meta device: {line}")
