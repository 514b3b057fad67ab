"""The press of a plan; importing this file imports kvpress.

kvpress wraps the attention functions of transformers: a decoding step overwrites the keys at
``module.masked_key_indices`` by keys whose attention weight is 0. The press sets the indices after each pass, for the
token that follows.

Shapes: B sequences, N queries, S tokens so far, K KV heads, D width of a head.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from kvpress import BasePress
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.cache_utils import DynamicLayer
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from headscan.errors import PlanMismatchError, UnsupportedModelError
from headscan.kv.kept_keys import KeptKeys


class MaskedKeysPress(BasePress):
    """A press that masks the keys outside the windows of KV heads.

    The windows move with every token while the press's hooks are on the model. kvpress's own pipeline has them only
    while it reads the context, so later tokens never leave the windows there.

    Args:
        kept: The windows; none of them drops its KV head.
        kv_heads: Number of KV heads by layer.
    """

    def __init__(self, kept: KeptKeys, kv_heads: Mapping[int, int]) -> None:
        self.kept = kept
        self.kv_heads = dict(kv_heads)

    @contextmanager
    def __call__(self, model: PreTrainedModel) -> Iterator[None]:
        """Put the hooks on the model; remove them on exit.

        Raises:
            PlanMismatchError: As `post_init_from_model`.
            UnsupportedModelError: As `post_init_from_model`.
        """
        with super().__call__(model), ExitStack() as hooks:
            for layer in self.kept.layers:
                attention: Any = _layers(model)[layer].self_attn
                hooks.callback(attention.register_forward_pre_hook(self.check_pass, with_kwargs=True).remove)
            yield

    def post_init_from_model(self, model: PreTrainedModel) -> None:
        """Check that kvpress can mask keys in this model.

        Raises:
            PlanMismatchError: The model lacks a layer of the plan.
            UnsupportedModelError: kvpress does not wrap the model's attention function, or its hooks have no place.
        """
        layers = _layers(model)
        last = max(self.kv_heads, default=-1)
        if last >= len(layers):
            raise PlanMismatchError(
                f"layer {last} of the plan does not exist (limit {len(layers) - 1}). Make a plan for this model"
            )
        name = model.config.get_text_config()._attn_implementation
        # Functions that are registered after kvpress is imported are not wrapped, and neither is eager attention.
        if getattr(ALL_ATTENTION_FUNCTIONS.get(name), "__module__", None) != "kvpress.attention_patch":
            raise UnsupportedModelError(
                f"kvpress does not mask keys in attention implementation {name!r}. Call"
                " model.set_attn_implementation('sdpa')"
            )

    def check_pass(self, module: Any, input: Any, kwargs: dict[str, Any]) -> None:
        """Check, before a pass of a layer with windows, that kvpress can mask the keys of its tokens.

        Raises:
            PlanMismatchError: The cache does not keep all keys, or windows would move within a pass that continues it.
            UnsupportedModelError: The mask is not causal with padding on the left.
        """
        cache, layer = kwargs.get("past_key_values"), module.layer_idx
        if cache is None:
            return
        if layer < len(cache.layers) and type(cache.layers[layer]) is not DynamicLayer:
            raise PlanMismatchError(
                f"layer {layer} has windows in the plan, but a {type(cache.layers[layer]).__name__} as its cache. Use a"
                " DynamicCache, and a plan for this model"
            )
        past, N = cache.get_seq_length(layer), (input[0] if input else kwargs["hidden_states"]).shape[1]
        if not past or N == 1:
            return
        starts_B = _starts(kwargs.get("attention_mask"), past + N)
        longest = past + N - int(starts_B.min())
        width = min(window.width for at, _, window in self.kept.windows if at == layer)
        if longest > width:
            raise PlanMismatchError(
                f"a pass of {N} tokens that continues a cache reaches token {longest} (limit {width}, the narrowest"
                f" window of layer {layer}), and kvpress masks the same keys for all its tokens. Read the prompt in one"
                " pass, and add one token per pass"
            )

    def forward_hook(self, module: Any, input: Any, kwargs: dict[str, Any], output: Any) -> Any:
        """Set the keys to mask for the next token; return the output unchanged.

        The position comes from the cache, since transformers 5.3 and later pass no ``cache_position``.

        Raises:
            PlanMismatchError: The model has other KV heads than the plan.
            UnsupportedModelError: The mask is not causal with padding on the left.
        """
        cache, layer = kwargs.get("past_key_values"), module.layer_idx
        held = None if cache is None else cache.layers[layer]
        if type(held) is not DynamicLayer:
            return output
        assert held.keys is not None and held.values is not None
        kv_heads, planned = held.keys.shape[1], self.kv_heads.get(layer, 0)
        if kv_heads != planned:
            raise PlanMismatchError(
                f"layer {layer} caches {kv_heads} heads (limit {planned}, as in the plan). Make a plan for this model"
            )
        if layer in self.kept.layers:
            self.compress(module, output[0], held.keys, held.values, None, kwargs)
        return output

    def compress(
        self,
        module: Any,
        hidden_states: Tensor,
        keys: Tensor,
        values: Tensor,
        attentions: Tensor | None,
        kwargs: dict[str, Any],
    ) -> tuple[Tensor, Tensor]:
        """Set the keys to mask for the next token; return keys and values (B, K, S, D) unchanged."""
        B, K, S, _ = keys.shape
        starts_B = _starts(kwargs.get("attention_mask"), S).to(keys.device)
        at = torch.arange(S, device=keys.device)
        masked_BKS = torch.zeros(B, K, S, dtype=torch.bool, device=keys.device)
        for group in self.kept.groups(module.layer_idx, K):
            if group.window is not None:
                # The next token is at position S, and its window includes itself.
                left = (at - starts_B[:, None] >= group.window.sink) & (at <= S - group.window.recent)
                masked_BKS[:, list(group.kv_heads)] = left[:, None]
        indices = torch.nonzero(masked_BKS, as_tuple=True)
        module.masked_key_indices = indices if len(indices[0]) else None
        return keys, values


def _layers(model: PreTrainedModel) -> nn.ModuleList:
    """Return the layers that kvpress puts its hooks on.

    Raises:
        UnsupportedModelError: A layer has no ``self_attn``.
    """
    backbone = getattr(model, "model", None)
    layers = getattr(getattr(backbone, "language_model", backbone), "layers", ())
    if not layers or not all(hasattr(layer, "self_attn") for layer in layers):
        raise UnsupportedModelError(
            f"{type(model).__name__} has layers without `self_attn`, where kvpress puts its hooks. Use"
            " headscan.PlanCache"
        )
    return layers


def _starts(mask: Tensor | None, keys: int) -> Tensor:
    """Return the position of the first real token of each row (B or 1,).

    Args:
        mask: (B or 1, 1 or H, N, S), bool (True means attend) or additive; None means no padding.
        keys: Keys that the last query sees, padding included (S).

    Raises:
        UnsupportedModelError: The last query does not see all keys after the padding.
    """
    if mask is None:
        return torch.zeros(1, dtype=torch.long)
    if mask.dim() != 4 or mask.shape[-1] != keys:
        raise UnsupportedModelError(
            f"attention mask {tuple(mask.shape)} for {keys} keys: the press reads masks with one entry per query and"
            " key. Call model.set_attn_implementation('sdpa')"
        )
    last = mask[:, :, -1]
    seen_BS = (last if last.dtype == torch.bool else last > torch.finfo(last.dtype).min / 2).any(1)
    starts_B = seen_BS.long().argmax(-1)
    if bool((seen_BS.sum(-1) != keys - starts_B).any()):
        raise UnsupportedModelError(
            "the attention mask is not causal with padding on the left, so windows have no place in it. Pad on the"
            " left, and use a decoder"
        )
    return starts_B
