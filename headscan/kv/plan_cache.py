"""A KV cache for generation that keeps only the tokens of a plan.

    cache = headscan.PlanCache(plan)
    lm.model.generate(**inputs, past_key_values=cache)

Full heads keep every token, window heads the first and the last ones, dropped heads none; the memory of all others is
free. Rotary positions stay those of the text.
"""

from __future__ import annotations

from typing import Any, get_args

from torch import Tensor
from transformers import PreTrainedConfig
from transformers.cache_utils import (
    Cache,
    CacheLayerMixin,
    DynamicCache,
    DynamicLayer,
    DynamicSlidingWindowLayer,
    LinearAttentionAndFullAttentionLayer,
    LinearAttentionCacheLayerMixin,
)

from headscan.attention.cache_attention import register
from headscan.errors import PlanMismatchError
from headscan.kv.padded_masks import MaskReader
from headscan.kv.plan_layer import PlanLayer, PlanMixedLayer, Prefill
from headscan.windows import kept_keys


class PlanCache(Cache):
    """A cache of transformers whose KV heads keep the tokens of a plan.

    It works in greedy decoding, sampling, beam search and assisted decoding, and with a prompt read in chunks
    (``prefill_chunk_size`` of ``generate``), which bounds the peak memory too. Padding may be anywhere in a row;
    several documents in one row are refused. Passes may take gradients, or run in inference mode or autocast, in any
    order. The model must compute attention with ``sdpa``. If that is not its default (soft caps, learned sinks), call
    ``model.set_attn_implementation("headscan-cache")`` after making a cache. ``crop`` fails if freed tokens would be
    needed again. A cache of assisted decoding records the tokens of every pass, so that ``crop`` can remove them, until
    ``reset`` ends that. Offloading is not supported. ``torch.compile`` gives the same numbers and breaks its graph at
    the cache, so it saves little.

    Args:
        plan: A `HeadPlan` from `headscan.load_plan` (a file of ``headscan plan``), `headscan.make_plan` (a stored scan
            or probe) or `headscan.Plan`, or a `KeptKeys` with the number of KV heads of each layer.
        config: Configuration of the model, needed only for models with layers that a plan does not describe: those
            without attention, those that read the keys of others, and chunked ones. None takes all layers from
            the plan.
        prefill: ``window``: each prompt token sees its window, so the result does not depend on the passes, and with a
            plan for a serving engine it is what the engine computes. ``full``: the first pass sees all keys, and the
            cache shrinks after it (as kvpress does); it fits a prompt in several passes only if the first one holds
            all of it, and no assisted decoding.
        max_tokens: Tokens for which full heads get memory at once; None lets it grow in steps.

    Raises:
        PlanMismatchError: An argument is of a wrong type or out of range. The plan names layers that the configuration
            does not have, or layers without a full cache, or lacks a KV head of a layer. Calls of the model raise it if
            the plan has other layers or KV heads than the model.
        UnsupportedModelError: From calls of the model: its attention reads cached keys in another way, its mask is
            not causal or hides more than padding, or decoding is assisted with ``prefill="full"``.
    """

    def __init__(
        self,
        plan: object,
        config: PreTrainedConfig | None = None,
        *,
        prefill: Prefill = "window",
        max_tokens: int | None = None,
    ) -> None:
        _check_options(config, prefill, max_tokens)
        kept = kept_keys(plan)
        kv_heads = kept.kv_heads or {}
        layers: list[Any]
        if config is None:
            missing = next((layer for layer in range(max(kv_heads, default=-1) + 1) if not kv_heads.get(layer)), None)
            if missing is not None:
                raise PlanMismatchError(
                    f"the plan has no entry for layer {missing}, whose cache depends on the model. Pass its"
                    " configuration as `config`"
                )
            layers = [
                DynamicSlidingWindowLayer(kept.sliding[layer]) if layer in kept.sliding else DynamicLayer()
                for layer in range(len(kv_heads))
            ]
        else:
            layers = DynamicCache(config=config).layers
        for layer in kept.layers:
            if layer >= len(layers) or type(layers[layer]) not in (DynamicLayer, LinearAttentionAndFullAttentionLayer):
                kind = "does not exist" if layer >= len(layers) else f"has a {type(layers[layer]).__name__}"
                raise PlanMismatchError(
                    f"layer {layer} of the plan has windows, but the layer {kind}. Make a plan for this model"
                )
        # With a configuration or the bounds of sliding layers, layers with other masks have other caches.
        masks = MaskReader(same=config is not None or bool(kept.sliding))
        for layer, count in kv_heads.items():
            if layer >= len(layers):
                raise PlanMismatchError(
                    f"layer {layer} of the plan does not exist (limit {len(layers) - 1}). Make a plan for this model"
                )
            if not count:
                continue
            arguments = (f"layer {layer}", kept.groups(layer, count), prefill, max_tokens, masks, kept.block)
            if type(layers[layer]) is DynamicLayer:
                layers[layer] = PlanLayer(*arguments)
            elif isinstance(mixed := layers[layer], LinearAttentionAndFullAttentionLayer):
                layers[layer] = PlanMixedLayer(mixed.number_of_states, *arguments)
        super().__init__(layers=layers)
        self._kept = kept
        # Layers that share the keys of others stay empty; only the configuration distinguishes them from missing ones.
        self._known_complete = config is not None
        register()

    def __repr__(self) -> str:
        return f"PlanCache({len(self.layers)} layers, {self._kept}, {self.get_seq_length()} tokens)"

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Add new tokens to a layer; return all keys and values for attention."""
        if layer_idx >= len(self.layers):
            raise PlanMismatchError(
                f"the model caches layer {layer_idx} (limit {len(self.layers) - 1}, as in the plan). Make a plan for"
                " this model, or pass its configuration as `config`"
            )
        if layer_idx == 0 and not self._known_complete and self.get_seq_length():
            self._check_complete()
        return super().update(key_states, value_states, layer_idx, *args, **kwargs)

    def crop(self, tokens_to_remove: int) -> None:
        """Remove the last ``-tokens_to_remove`` tokens from all layers, or from none.

        Raises:
            PlanMismatchError: Tokens that a layer would need again have been freed.
            ValueError: The number is positive.
        """
        for layer in self.layers:
            if isinstance(layer, PlanLayer):
                layer.check_crop(tokens_to_remove)
        lost = [at for at, layer in enumerate(self.layers) if _has_freed_states(layer)]
        if lost:
            raise PlanMismatchError(
                f"cannot remove {-tokens_to_remove} tokens: layer {lost[0]} has freed earlier states. Call"
                " activate_past_recording() before the pass that adds them"
            )
        super().crop(tokens_to_remove)

    def reset(self) -> None:
        """Remove all tokens, and stop recording them for `crop`."""
        super().reset()
        for layer in self.layers:
            if hasattr(layer, "record_past"):
                layer.record_past = False

    def _check_complete(self) -> None:
        """Raise if the first pass left layers without keys."""
        empty = [layer for layer in self.layers if isinstance(layer, PlanLayer) and not layer.tokens]
        if empty:
            raise PlanMismatchError(
                f"{empty[0].name} of the plan has no keys after a pass: the model has fewer layers. Make a plan for"
                " this model, or pass its configuration as `config`"
            )
        self._known_complete = True

    @property
    def nbytes(self) -> int:
        """Bytes of the keys and values held, all layers and sequences together."""
        return cache_bytes(self)

    @property
    def allocated_bytes(self) -> int:
        """Bytes of memory that the cache occupies; more than `nbytes` while full heads have room to grow."""
        return sum(layer.allocated_bytes if isinstance(layer, PlanLayer) else _nbytes(layer) for layer in self.layers)


def _check_options(config: object, prefill: object, max_tokens: object) -> None:
    if config is not None and not isinstance(config, PreTrainedConfig):
        raise PlanMismatchError(
            f"`config` is a {type(config).__name__} (limit a configuration of transformers). Pass `model.config`"
        )
    if prefill not in get_args(Prefill):
        raise PlanMismatchError(f"`prefill={prefill!r}` (limit {' or '.join(get_args(Prefill))}). Change it")
    whole = isinstance(max_tokens, int) and not isinstance(max_tokens, bool)
    if max_tokens is not None and (not whole or max_tokens < 1):  # type: ignore[operator]
        raise PlanMismatchError(f"`max_tokens={max_tokens!r}` (limit a whole number from 1 on, or None). Change it")


def _has_freed_states(layer: Any) -> bool:
    """Return True if a layer with linear attention or a sliding window cannot remove tokens."""
    if isinstance(layer, DynamicSlidingWindowLayer):
        freed = layer.get_seq_length() >= layer.sliding_window
    else:
        freed = isinstance(layer, LinearAttentionCacheLayerMixin)
    return freed and not layer.record_past


def cache_bytes(cache: Cache) -> int:
    """Return the bytes of the keys and values that a cache holds, all layers and sequences together."""
    return sum(_nbytes(layer) for layer in cache.layers)


def _nbytes(layer: Any) -> int:
    if isinstance(layer, PlanLayer):
        return layer.nbytes
    if isinstance(layer, CacheLayerMixin) and layer.is_initialized and layer.keys is not None:
        assert layer.values is not None
        return layer.keys.nbytes + layer.values.nbytes
    return 0
