"""KV caches of a prefix that many sequences continue.

Shapes: B sequences, N tokens, K KV heads, D head width.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import Cache, DynamicCache, DynamicLayer, LinearAttentionCacheLayerMixin

from headscan.models.forward_inputs import input_device, run
from headscan.models.loaded_model import LoadedModel
from headscan.models.model_errors import MODEL_ERRORS, raise_if_out_of_memory
from headscan.models.token_means import wide_norm

#: Tokens of the prefix and of its continuation in the check of `shares_prefixes`.
_CHECKED = (9, 5)


class Prefix:
    """The KV cache of the first tokens of several sequences.

    Attributes:
        tokens: Number of cached tokens.
    """

    def __init__(self, cache: Cache, tokens: int) -> None:
        self._cache = cache
        self.tokens = tokens

    def above(self, layer: int, lower: Prefix) -> Prefix:
        """Return this prefix from ``layer`` on, and another one below it.

        Both have the same tokens.
        """
        return Prefix(Cache(layers=[*lower._cache.layers[:layer], *self._cache.layers[layer:]]), lower.tokens)

    def continued(self, sequences: int) -> Cache:
        """Return a cache for one pass over a batch of continuations.

        It does not keep their keys and values.
        """
        return _Continuation([_fork(layer, sequences) for layer in self._cache.layers])


def read_prefix(lm: LoadedModel, ids: Sequence[int], parent: Prefix | None = None) -> Prefix:
    """Read the first tokens, or those after ``parent``, with all open interventions.

    Raises:
        SequenceError: The longer prefix is read with other rotary frequencies than ``parent``.
    """
    if parent is not None:
        lm.rope_lengths.check(parent.tokens + len(ids), [parent.tokens])
    if parent is None:
        cache: Cache = DynamicCache(config=lm.model.config)
    else:
        cache = Cache(layers=[_fork(layer, 1) for layer in parent._cache.layers])
    inputs = {"input_ids": torch.tensor([ids], device=input_device(lm.model))}
    run(lm.model, {**inputs, "past_key_values": cache, "use_cache": True})
    return Prefix(cache, len(ids) + (0 if parent is None else parent.tokens))


@torch.no_grad()
def shares_prefixes(lm: LoadedModel) -> bool:
    """Return True if a cached prefix reproduces the full-sequence hidden states.

    A short text is tried, since models that cache other states than keys and values, or share them between layers, may
    fail. If the rotary frequencies depend on the length (`LoadedModel.rope_lengths`), the result holds for sequences
    with the frequencies of their prefix.

    Raises:
        RuntimeError: A pass ran out of memory.
    """
    prefix, rest = _CHECKED
    vocabulary = lm.model.config.get_text_config().vocab_size
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(min(vocabulary, 1000), (2, prefix + rest), generator=generator)
    ids[1, :prefix] = ids[0, :prefix]
    ids = ids.to(input_device(lm.model))
    # Outside the handler: a model that cannot read whole sequences must raise.
    whole = _hidden(run(lm.model, {"input_ids": ids}))[:, prefix:]
    try:
        half = prefix // 2
        shared = read_prefix(lm, ids[0, half:prefix].tolist(), read_prefix(lm, ids[0, :half].tolist()))
        for _ in range(2):  # the second pass shows whether the first one changed the prefix
            out = run(
                lm.model,
                {"input_ids": ids[:, prefix:], "past_key_values": shared.continued(2), "use_cache": True},
            )
            if not nearly_equal(_hidden(out), whole):
                return False
    except MODEL_ERRORS as problem:
        raise_if_out_of_memory(problem)
        return False
    return True


def _hidden(output: Any) -> Tensor:
    hidden: Tensor = output[0]
    return hidden


def nearly_equal(ours: Tensor, whole: Tensor) -> bool:
    """Return True if hidden states equal those of whole sequences."""
    # Kernels sum in another order for another shape, which costs a few roundings through all layers.
    tolerance = max(1e-4, 8 * torch.finfo(whole.dtype).eps)
    return bool(wide_norm(ours - whole) <= tolerance * wide_norm(whole))


class _Continuation(Cache):
    """A cache that reads prefix and new tokens, but keeps the prefix.

    The keys and values of a whole batch exist for one layer at a time.
    """

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        layer: Any = self.layers[layer_idx]
        before = (layer.keys, layer.values)
        full: tuple[Tensor, Tensor] = super().update(key_states, value_states, layer_idx, *args, **kwargs)
        layer.keys, layer.values = before
        return full


def _fork(layer: Any, sequences: int) -> Any:
    """Return a layer's cache for a batch.

    Keys and values are views, because new tokens are appended to copies.
    """
    fork = copy.copy(layer)
    if isinstance(layer, DynamicLayer) and layer.is_initialized:
        for name in ("keys", "values"):
            setattr(fork, name, getattr(layer, name).expand(sequences, -1, -1, -1))
    if isinstance(layer, LinearAttentionCacheLayerMixin):
        # Recurrent states are updated in place.
        for name in ("conv_states", "recurrent_states"):
            states = getattr(layer, name)
            copies = {i: None if s is None else s.repeat_interleave(sequences, 0) for i, s in states.items()}
            setattr(fork, name, copies)
        for name in ("is_conv_states_initialized", "is_recurrent_states_initialized", "has_previous_state"):
            setattr(fork, name, dict(getattr(layer, name)))
    return fork
