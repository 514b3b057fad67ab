"""KV caches of prefixes: many sequences continue one prefix, which is read once.

Shapes: N tokens, K KV heads, D width of a head, R prefixes.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import Cache, DynamicCache, DynamicLayer, LinearAttentionCacheLayerMixin

from headscan.models.forward_inputs import input_device, run_forward, wide_norm
from headscan.models.loaded_model import LoadedModel
from headscan.models.model_facts import MODEL_ERRORS, raise_if_out_of_memory

#: Tokens of the prefix and of its continuation in the check of `shares_prefixes`.
_CHECKED_TOKENS = (9, 5)


class Prefix:
    """The KV cache of one or several prefixes with equally many tokens."""

    def __init__(self, cache: Cache, tokens: int) -> None:
        self._cache = cache
        self.tokens = tokens

    def above(self, layer: int, lower: Prefix) -> Prefix:
        """Return this prefix from ``layer`` on, and another one below it. Both have the same tokens."""
        return Prefix(Cache(layers=[*lower._cache.layers[:layer], *self._cache.layers[layer:]]), lower.tokens)

    def continued(self, rows: Sequence[int]) -> Cache:
        """Return a cache for one pass over sequences that continue the prefixes ``rows``; it keeps none of them."""
        return _Continuation(self._cache.layers, rows)


def read_prefix(lm: LoadedModel, ids: Sequence[Sequence[int]], parent: Prefix | None = None) -> Prefix:
    """Read the first tokens (R, N), or those after one parent, which all continue, with all open interventions."""
    if parent is not None:
        lm.rope_lengths.check(parent.tokens + len(ids[0]), [parent.tokens])
    if parent is None:
        cache = _Filling(DynamicCache(config=lm.model.config).layers)
    else:
        cache = _Filling([_fork(layer, [0] * len(ids)) for layer in parent._cache.layers])
    inputs = {"input_ids": torch.tensor(ids, device=input_device(lm.model))}
    with suppress(_Filled):
        run_forward(lm.model, {**inputs, "past_key_values": cache, "use_cache": True})
    return Prefix(cache, len(ids[0]) + (0 if parent is None else parent.tokens))


@torch.no_grad()
def shares_prefixes(lm: LoadedModel) -> bool:
    """Return True if a cached prefix of a short text reproduces the full-sequence hidden states.

    Models that cache other states than keys and values, or share them between layers, may fail. If the rotary
    frequencies depend on the length (`LoadedModel.rope_lengths`), the result holds for sequences with those of their
    prefix.
    """
    prefix, rest = _CHECKED_TOKENS
    vocabulary = lm.model.config.get_text_config().vocab_size
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(min(vocabulary, 1000), (3, prefix + rest), generator=generator)
    half = prefix // 2  # the part of the prefix that all three sequences have
    ids[1:, :half] = ids[0, :half]
    ids[2, :prefix] = ids[0, :prefix]
    ids = ids.to(input_device(lm.model))
    # Outside the handler: a model that cannot read whole sequences must raise.
    whole: Tensor = run_forward(lm.model, {"input_ids": ids})[0][:, prefix:]
    try:
        first = read_prefix(lm, ids[:1, :half].tolist())
        shared = read_prefix(lm, ids[:2, half:prefix].tolist(), first)
        for _ in range(2):  # the second pass shows whether the first one changed the prefix
            cached = {"past_key_values": shared.continued([0, 1, 0]), "use_cache": True}
            if not nearly_equal(run_forward(lm.model, {"input_ids": ids[:, prefix:], **cached})[0], whole):
                return False
    except MODEL_ERRORS as problem:
        raise_if_out_of_memory(problem)
        return False
    return True


def nearly_equal(hidden: Tensor, whole: Tensor) -> bool:
    """Return True if hidden states equal those of whole sequences, but for rounding."""
    # Kernels sum in another order for another shape, which costs a few roundings through all layers.
    tolerance = max(1e-4, 8 * torch.finfo(whole.dtype).eps)
    return bool(wide_norm(hidden - whole) <= tolerance * wide_norm(whole))


class _Filled(Exception):
    """A cache has all its keys."""


class _Filling(Cache):
    """A cache that ends the pass with its last keys: nothing reads the hidden states of a prefix."""

    def __init__(self, layers: list[Any]) -> None:
        super().__init__(layers=layers)
        # A recurrent layer may still change its states.
        self._last = None if isinstance(layers[-1], LinearAttentionCacheLayerMixin) else len(layers) - 1

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        full: tuple[Tensor, Tensor] = super().update(key_states, value_states, layer_idx, *args, **kwargs)
        if layer_idx == self._last:
            raise _Filled
        return full


class _Continuation(Cache):
    """A cache that reads prefixes and new tokens, but keeps the prefixes, spread over the batch one layer at a time."""

    def __init__(self, layers: Sequence[Any], rows: Sequence[int]) -> None:
        super().__init__(layers=[_fork(layer, rows, spread=False) for layer in layers])
        self._rows = rows

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        layer: Any = self.layers[layer_idx]
        prefix_keys, prefix_values = layer.keys, layer.values
        _spread(layer, self._rows)
        full: tuple[Tensor, Tensor] = super().update(key_states, value_states, layer_idx, *args, **kwargs)
        layer.keys, layer.values = prefix_keys, prefix_values
        return full


def _fork(layer: Any, rows: Sequence[int], *, spread: bool = True) -> Any:
    """Return a layer's cache for sequences that continue the prefixes ``rows``, with keys and values if ``spread``."""
    fork = copy.copy(layer)
    if spread:
        _spread(fork, rows)
    if isinstance(layer, LinearAttentionCacheLayerMixin):
        # Recurrent states are updated in place.
        for name in ("conv_states", "recurrent_states"):
            states = getattr(layer, name)
            copies = {i: None if s is None else s[list(rows)] for i, s in states.items()}
            setattr(fork, name, copies)
        for name in ("is_conv_states_initialized", "is_recurrent_states_initialized", "has_previous_state"):
            setattr(fork, name, dict(getattr(layer, name)))
    return fork


def _spread(layer: Any, rows: Sequence[int]) -> None:
    """Give every sequence the keys and values (R, K, N, D) of its prefix, maybe as views: new tokens go to copies."""
    if isinstance(layer, DynamicLayer) and layer.is_initialized:
        for name in ("keys", "values"):
            cached = getattr(layer, name)
            setattr(layer, name, cached.expand(len(rows), -1, -1, -1) if len(cached) == 1 else cached[list(rows)])
