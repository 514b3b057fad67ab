"""Removal of heads from attention modules, with weights or on the meta device.

The softmax scale, the rotary positions and the ALiBi slopes stay those of the original model. A KV head remains if one
of its query heads does. Where the remaining groups differ in size, queries read their keys by an index, and neither the
weights nor the KV cache hold a KV head twice.

This file is copied next to a pruned model's weights, so it imports torch and transformers alone.

Shapes: B sequences, N tokens, S keys, H query heads, K KV heads, D width of a head, E width of the hidden states.
"""

from __future__ import annotations

import inspect
import sys
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface
from transformers.cache_utils import Cache, DynamicLayer

from .attention_parts import KeptPositions, LayerHeads, Rows, kept_rows, output_name

#: The attention function of layers whose groups differ in size.
INDEXED = "headscan-indexed"
#: Counts of heads and widths of all heads in attention modules, by the names that transformers uses.
_HEADS = ("num_heads", "num_attention_heads", "n_heads", "n_head")
_KV_HEADS = ("num_key_value_heads", "num_kv_heads", "kv_heads")
_WIDTHS = ("embed_dim", "hidden_size", "split_size")
#: Arguments of attention modules with one number per head and key, such as ALiBi's.
_BIASES = ("alibi", "position_bias", "attention_mask")
_CACHES = ("past_key_values", "layer_past")


def shrink_attention(model: nn.Module, name: str, layer: int, after: LayerHeads) -> dict[str, Rows]:
    """Remove heads from the attention of one layer of a model, in place; return what remains of each parameter that
    shrank.

    ``name`` is that of the attention modules, with {} for the layer.
    """
    path = name.format(layer)
    attention: Any = model.get_submodule(path)
    before = getattr(attention, "headscan_heads", None) or LayerHeads.all(after.heads, after.kv_heads)
    if before == after:
        return {}
    if after.has_added_bias and not before.has_added_bias:
        projection = getattr(attention, output_name(attention))
        zeros = projection.weight.new_zeros(projection.weight.shape[0])
        projection.bias = nn.Parameter(zeros, requires_grad=projection.weight.requires_grad)
    if not after.kept:
        parent, _, leaf = path.rpartition(".")
        setattr(model.get_submodule(parent), leaf, NoAttention(attention, layer, after))
        return {}
    remains = kept_rows(attention, KeptPositions.between(before, after))
    for parameter, (dim, index) in remains.items():
        owner, _, leaf = parameter.rpartition(".")
        _shrink(attention.get_submodule(owner), leaf, dim, index)
    _set_counts(attention, before, after)
    attention.headscan_heads = after
    if len(before.kept_kv) == before.kv_heads > len(after.kept_kv):
        attention.register_forward_pre_hook(_check_past, with_kwargs=True)
    config = getattr(attention, "config", None)
    config = config.whole if isinstance(config, LayerConfig) else config
    if config is not None:
        attention.config = LayerConfig(config, after)
    reads_biases = {"alibi", "position_bias"} & set(inspect.signature(type(attention).forward).parameters)
    if before == LayerHeads.all(before.heads, before.kv_heads) and reads_biases:
        attention.register_forward_pre_hook(_keep_biases, with_kwargs=True)
    return {f"{path}.{parameter}": rows for parameter, rows in remains.items()}


def _shrink(owner: Any, leaf: str, dim: int, index: Tensor) -> None:
    """Replace a parameter by a part of it, and correct the sizes that its module names."""
    old = getattr(owner, leaf)
    new = old.detach().index_select(dim, index.to(old.device))
    setattr(owner, leaf, nn.Parameter(new, requires_grad=old.requires_grad))
    if leaf == "weight" and isinstance(owner, nn.Linear):
        owner.out_features, owner.in_features = new.shape
    elif leaf == "weight" and hasattr(owner, "nf"):
        owner.nx, owner.nf = new.shape


def _set_counts(attention: Any, before: LayerHeads, after: LayerHeads) -> None:
    H, K = len(after.kept), len(after.kept_kv)
    for name in _HEADS + _KV_HEADS:
        if isinstance(getattr(attention, name, None), int):
            setattr(attention, name, H if name in _HEADS else K)
    D = getattr(attention, "head_dim", 0)
    for name in _WIDTHS:
        if getattr(attention, name, None) == len(before.kept) * D:
            setattr(attention, name, H * D)
    if getattr(attention, "kv_dim", None) == len(before.kept_kv) * D:
        attention.kv_dim = K * D
    if hasattr(attention, "num_key_value_groups"):
        attention.num_key_value_groups = H // K if after.groups_are_equal else 1


def _keep_biases(module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Any]:
    """Leave the removed heads out of biases that the model computes for all original heads."""
    heads: LayerHeads = module.headscan_heads
    names = tuple(inspect.signature(type(module).forward).parameters)[1:]
    given = dict(zip(names, args, strict=False)) | kwargs
    for name in _BIASES:
        bias = given.get(name)
        if not isinstance(bias, Tensor) or bias.ndim < 3:
            continue
        index = torch.tensor(heads.kept, device=bias.device)
        if bias.ndim == 4 and bias.shape[1] == heads.heads:
            given[name] = bias.index_select(1, index)
        elif bias.ndim == 3:  # sequences and heads are one dimension
            given[name] = bias.unflatten(0, (-1, heads.heads)).index_select(1, index).flatten(0, 1)
    return (), given


def _check_past(module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Raise ValueError if a cache has other KV heads than the layer, which prefix tuning or the original wrote."""
    past = next((kwargs[name] for name in _CACHES if kwargs.get(name) is not None), None)
    heads: LayerHeads = module.headscan_heads
    # Modules without groups store a key for each query head.
    _check_heads(past, module.layer_idx, len(heads.kept_kv if hasattr(module, "num_key_value_groups") else heads.kept))


def _check_heads(past: Any, layer: int, count: int) -> None:
    layers = getattr(past, "layers", ())
    keys = layers[layer].keys if layer < len(layers) and type(layers[layer]) is DynamicLayer else None
    if keys is not None and keys.ndim == 4 and keys.shape[1] != count:
        raise ValueError(
            f"past_key_values have {keys.shape[1]} KV heads in layer {layer} (limit {count}, those that remain). "
            "Pass a cache that this model wrote; tune prompts or adapters instead of a prefix"
        )


class LayerConfig:
    """The ``whole`` model's configuration as a pruned layer's attention module reads it, with the layer's heads."""

    def __init__(self, whole: Any, heads: LayerHeads) -> None:
        self.whole, self.heads = whole, heads
        self.num_attention_heads, self.num_key_value_heads = len(heads.kept), len(heads.kept_kv)
        self._indices: dict[torch.device, tuple[Tensor, Tensor]] = {}

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or name in ("whole", "heads"):
            raise AttributeError(name)  # while a copy is made
        return getattr(self.whole, name)

    @property
    def _attn_implementation(self) -> Any:
        return self.whole._attn_implementation if self.heads.groups_are_equal else INDEXED

    def indices_on(self, device: torch.device) -> tuple[Tensor, Tensor]:
        """Return each query head's position of its KV head, and place among groups as wide as the widest: (H,)."""
        if device not in self._indices:
            with torch.inference_mode(False):
                index, slots = self.heads.kv_index, self.heads.slots
                self._indices[device] = torch.tensor(index, device=device), torch.tensor(slots, device=device)
        return self._indices[device]


class _Reader:
    """An attention module as attention functions of transformers read it, with the configuration of the whole model."""

    def __init__(self, module: Any, group: int) -> None:
        self.module, self.config, self.num_key_value_groups = module, module.config.whole, group

    def __getattr__(self, name: str) -> Any:
        return getattr(self.module, name)


def indexed_attention(
    module: Any, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, *args: Any, **kwargs: Any
) -> tuple[Tensor, Tensor | None]:
    """Compute the attention of queries (B, H, N, D) that read keys (B, K, S, D) by the index of their layer.

    One query leaves the keys where they are, and groups get queries of zeros until they are equal. Several queries take
    less time if the keys are gathered.
    """
    name = module.config.whole._attn_implementation
    own: Any = getattr(sys.modules[type(module).__module__], "eager_attention_forward", None)
    attend: Any = AttentionInterface().get_interface(name, own)
    grouped = name is not None and (name == "sdpa" or "flash" in name)
    index, slots = module.config.indices_on(query.device)
    if grouped and query.shape[2] == 1 and not _per_head(attention_mask, kwargs):
        G = max(module.config.heads.group_sizes)
        filled = query.new_zeros(len(query), key.shape[1] * G, *query.shape[2:]).index_copy(1, slots, query)
        out = attend(_Reader(module, G), filled, key, value, attention_mask, *args, **kwargs)[0]
        return out.index_select(2, slots), None
    reader = _Reader(module, 1) if grouped else module
    return attend(
        reader, query, key.index_select(1, index), value.index_select(1, index), attention_mask, *args, **kwargs
    )


# Also a process that only reads a model from a pickle needs the function.
AttentionInterface.register(INDEXED, indexed_attention)


def _per_head(mask: Tensor | None, kwargs: dict[str, Any]) -> bool:
    """Return True if a call has numbers per query head."""
    given = any(kwargs.get(name) is not None for name in ("s_aux", "sinks", "position_bias"))
    return given or (mask is not None and mask.ndim == 4 and mask.shape[1] > 1)


class NoAttention(nn.Module):
    """The place of an attention module without heads; only the output projection's bias is left. The KV cache of the
    layer holds no heads, and still counts the tokens.
    """

    bias: nn.Parameter | None

    def __init__(self, attention: Any, layer: int, heads: LayerHeads) -> None:
        super().__init__()
        self.headscan_heads, self.layer_idx = heads, layer
        self.head_dim: int = getattr(attention, "head_dim", 0)
        self.value_dim: int = getattr(attention, "v_head_dim", self.head_dim)
        self._names = tuple(inspect.signature(type(attention).forward).parameters)[1:]
        # It is no part of a module with the projection's name, in which adapters would look for a weight.
        bias = getattr(getattr(attention, output_name(attention)), "bias", None)
        self.register_parameter("bias", None if bias is None else nn.Parameter(bias.detach(), bias.requires_grad))
        self.train(attention.training)

    def forward(self, *args: Any, **kwargs: Any) -> tuple[Tensor, None]:
        """Return the bias as the output for every token (B, N, E), and no weights."""
        given = dict(zip(self._names, args, strict=False)) | kwargs
        hidden = given["hidden_states"]
        past = next((given[name] for name in _CACHES if given.get(name) is not None), None)
        if past is not None:
            _count_tokens(past, self.layer_idx, hidden, self.head_dim, self.value_dim)
        out = torch.zeros_like(hidden)
        if self.bias is not None:
            out = out + self.bias.to(out)
        if "residual" in self._names:
            out = out + given["residual"]
        return out, None


class HeadlessLayer(DynamicLayer):
    """The cache of a layer without heads."""

    def get_seq_length(self) -> int:
        """Return the number of tokens, which the layer above reads from its numbers."""
        return self.keys.shape[-2] if self.keys is not None and self.keys.ndim > 1 else 0


def _count_tokens(past: Cache, layer: int, hidden: Tensor, head_dim: int, value_dim: int) -> None:
    B, N, _ = hidden.shape
    _check_heads(past, layer, 0)
    past.update(hidden.new_empty(B, 0, N, head_dim), hidden.new_empty(B, 0, N, value_dim), layer)
    if type(past.layers[layer]) is DynamicLayer:
        headless = HeadlessLayer()
        headless.__dict__.update(past.layers[layer].__dict__)
        past.layers[layer] = headless
