"""Floating-point operations of a forward pass, from the configuration alone.

A matrix product takes 2 operations per weight and token. Attention takes 2 operations per query head, visible key and
dimension of key and value.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import Any

import torch
from transformers import PreTrainedConfig, PreTrainedModel

from headscan.loading import empty_model
from headscan.model_spec import ModelSpec
from headscan.models.loaded_model import find_layout

#: Names of the numbers of routed experts, and of those that a token uses.
_EXPERTS = ("num_local_experts", "n_routed_experts", "num_experts")
_CHOSEN = ("num_experts_per_tok", "moe_topk", "top_k_experts")


@dataclass(frozen=True)
class ForwardFlops:
    """Operations of a forward pass over one token.

    Attributes:
        parameters: Parameters in matrix products of a token: those outside the embedding and the output head, with the
            experts that a token uses. Norms and biases are included.
        head: Parameters of the output head.
        widths: By window of the layer, the sum over its query heads of key and value dimension; None is no window.
    """

    parameters: int
    head: int
    widths: dict[int | None, int]

    def attention(self, tokens: int) -> float:
        """Return the operations of one attention call, the mean over the tokens of a causal sequence."""
        total = 0.0
        for window, width in self.widths.items():
            seen = tokens if window is None else min(window, tokens)
            keys = (seen * (seen + 1) / 2 + (tokens - seen) * seen) / tokens
            total += 2 * width * keys
        return total

    def per_token(self, tokens: int, *, logits: bool = False) -> float:
        """Return the operations of a token, the mean over a sequence."""
        return 2 * (self.parameters + (self.head if logits else 0)) + self.attention(tokens)


def forward_flops(spec: ModelSpec) -> ForwardFlops:
    """Return the operations of a model's forward pass without loading a weight."""
    config = spec.config()
    model = empty_model(spec, config, torch.float32)
    layout = find_layout(model)
    words: Any = model.get_input_embeddings()
    head: Any = model.get_output_embeddings()
    text = config.get_text_config()
    # Under other names a configuration does not show the widths: keys and values are about as wide as a hidden state.
    named = hasattr(text, "num_hidden_layers") and hasattr(text, "num_attention_heads")
    widths: dict[int | None, int] = (
        _widths(text) if named else {None: 2 * int(words.weight.shape[1]) * len(layout.blocks)}
    )
    separate = sum(parameter.numel() for name, parameter in model.named_parameters() if layout.part_of(name) == "head")
    return ForwardFlops(
        parameters=_used_parameters(model) - words.weight.numel() - separate,
        head=0 if head is None else head.weight.numel(),
        widths=widths,
    )


def _used_parameters(model: PreTrainedModel) -> int:
    """Return the parameters that a token uses: all but the experts that it is not routed to."""
    text = model.config.get_text_config()
    experts, chosen = _first(text, _EXPERTS), _first(text, _CHOSEN)
    total = 0
    for name, parameter in model.named_parameters():
        routed = ".experts." in name and experts and chosen
        total += parameter.numel() * chosen // experts if routed else parameter.numel()
    return total


def _widths(config: PreTrainedConfig) -> dict[int | None, int]:
    """Return the sum over query heads of key and value dimension, by window of the layer."""
    kinds = getattr(config, "layer_types", None) or ["full_attention"] * config.num_hidden_layers
    widths: Counter[int | None] = Counter()
    for kind, layer in zip(kinds, config.per_layer_config, strict=True):
        window = getattr(layer, "sliding_window", None)
        if "sliding" in kind and window:
            widths[window] += _width(layer)
        elif "linear" not in kind and "mamba" not in kind and "conv" not in kind:
            widths[None] += _width(layer)
    return dict(widths)


def _width(layer: PreTrainedConfig) -> int:
    heads = int(layer.num_attention_heads)
    dim = getattr(layer, "head_dim", None) or layer.hidden_size // heads
    rope = getattr(layer, "qk_rope_head_dim", None)
    key = dim if rope is None else (getattr(layer, "qk_nope_head_dim", None) or 0) + rope
    return heads * (key + (getattr(layer, "v_head_dim", None) or dim))


def _first(config: PreTrainedConfig, names: tuple[str, ...]) -> int:
    """Return the first of some numbers that a configuration has, or 0."""
    return next((int(value) for name in names if isinstance(value := getattr(config, name, None), int)), 0)
