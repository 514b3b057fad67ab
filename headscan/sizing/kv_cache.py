"""Sizes of a KV cache by layer, from a meta-device pass.

The model's own cache shows what head shapes do not: a latent cache (MLA), a cache shared between layers, a window, keys
stored for every query head.
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
from headscan.models.model_class import MODEL_ERRORS, first_line, raise_if_out_of_memory
from headscan.sizing.meta_pass import Allocations, FusedAttention, meta_inputs, shorten

#: Tokens of the pass, fewer than any window, and of a continuation that is longer than any window.
_FEW, _MANY = 4, 1 << 24


@dataclass(frozen=True)
class LayerCache:
    """The KV cache of one attention, for one sequence.

    Attributes:
        heads: Size of the head axis: KV heads, a multiple of them if keys are stored for each query head, 1 if all
            heads share a latent, 0 if the layer has no cache.
        bytes_per_token: Bytes of one token, all heads together.
        tokens: Largest number of tokens that it keeps; None means no limit.
        key_dim: Width of a cached key.
    """

    heads: int
    bytes_per_token: int
    tokens: int | None
    key_dim: int

    def bytes(self, tokens: int) -> int:
        """Return the bytes after ``tokens`` tokens."""
        return self.bytes_per_token * (tokens if self.tokens is None else min(tokens, self.tokens))


#: The cache of a layer that uses another layer's cache, or none.
NO_CACHE = LayerCache(0, 0, None, 0)


def find_caches(model: PreTrainedModel) -> dict[str, tuple[LayerCache, ...]]:
    """Return each layer's KV cache of a loaded model, without running.

    Returns:
        One entry a layer, by kind of site: ``self``, and ``cross`` in encoder-decoders. Empty for an encoder.

    Raises:
        UnsupportedModelError: The model does not run on the meta device, or its cache is of an unknown kind.
    """
    config = copy.deepcopy(model.config)
    try:
        with torch.device("meta"):
            twin = type(model)._from_config(config, dtype=model.dtype).eval()
        substitutes = None if config.is_encoder_decoder else shorten(twin, find_layout(twin).blocks)
    except MODEL_ERRORS as problem:
        raise _unknown(model, problem) from problem
    return fill_caches(twin, substitutes)


@torch.no_grad()
def fill_caches(model: PreTrainedModel, substitutes: Sequence[int] | None = None) -> dict[str, tuple[LayerCache, ...]]:
    """Return each layer's KV cache of a model on the meta device.

    Args:
        substitutes: For each layer the one that runs instead of it, see `meta_pass.shorten`; None runs all.
    """
    try:
        with FusedAttention(), Allocations(model):
            cache = getattr(run(model, {**meta_inputs(model, _FEW), "use_cache": True}), "past_key_values", None)
        if cache is None:
            return {}
        if isinstance(cache, EncoderDecoderCache):
            return {"self": _layers(cache.self_attention_cache), "cross": _layers(cache.cross_attention_cache)}
        return {"self": _layers(cache, substitutes)}
    except MODEL_ERRORS as problem:
        raise _unknown(model, problem) from problem


def _layers(cache: Any, substitutes: Sequence[int] | None = None) -> tuple[LayerCache, ...]:
    found = [_layer(layer) for layer in cache.layers]
    # A cache may have no entries for the last layers.
    return tuple(found) if not substitutes else tuple(found[i] if i < len(found) else NO_CACHE for i in substitutes)


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
    raise_if_out_of_memory(problem)
    return UnsupportedModelError(
        f"the KV cache of {type(model).__name__} cannot be sized on the meta device: {first_line(problem)}. Load "
        "another model"
    )
