"""Copies of models that share weights, also weights that accelerate keeps outside the model until a pass needs them."""

from __future__ import annotations

import copy
import weakref
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from headscan.pruning.format.attention_parts import LayerHeads, Rows, output_name
from headscan.pruning.format.pruned_attention import shrink_attention


def sharing_copy(model: Any, config: Any = None, kind: type | None = None) -> Any:
    """Return a copy of a model or module that shares its parameters.

    Args:
        config: Configuration of the copy; None copies it.
        kind: Class of the copy; instances have the same attributes. None keeps it.
    """
    memo: dict[int, Any] = {id(tensor): tensor for tensor in (*model.parameters(), *model.buffers())}
    hooks = [hook for module in model.modules() for hook in _hooks(module)]
    for hook in hooks:
        memo |= {id(shared): shared for shared in (hook.weights_map, hook.tied_params_map) if shared is not None}
    if config is not None:
        memo[id(model.config)] = config
    found = copy.deepcopy(model, memo)
    if kind is not None:
        found.__class__ = kind
        # The names that weights have in files belong to the class.
        vars(found).pop("_weight_conversions", None)
    if any(hook.offload for hook in hooks):
        # The files of offloaded weights go with the last of the two models.
        weakref.finalize(found, _forget, model)
    return found


def replace_weights(model: nn.Module, weights: Mapping[str, Tensor]) -> None:
    """Give parameters of a model new values; tied ones stay tied."""
    current = {id(old): old for old in model.parameters()}
    for name, new in weights.items():
        owner, leaf = _owner(model, name)
        old = getattr(owner, leaf)
        value = new.detach().to(old.dtype, copy=True)
        if old.is_meta:
            hook = _offload_of(owner)
            hook.weights_map = _Changed(hook.weights_map, leaf, value=value.cpu())
        else:
            current[id(old)] = nn.Parameter(value.to(old.device), old.requires_grad)
    for module in model.modules():
        for leaf, old in list(module.named_parameters(recurse=False)):
            if current[id(old)] is not old:
                setattr(module, leaf, current[id(old)])


def shrink_layer(model: nn.Module, name: str, layer: int, heads: LayerHeads) -> None:
    """Remove heads from the attention of one layer in place, as `shrink_attention` does, also if it is offloaded.

    Raises:
        CannotSliceError: From `shrink_attention`.
    """
    attention = model.get_submodule(name.format(layer))
    before = dict(attention.named_parameters()).keys()
    for parameter, rows in shrink_attention(model, name, layer, heads).items():
        _slice_offloaded(model, parameter, rows)
    for parameter, value in attention.named_parameters():
        if parameter not in before and value.is_meta:
            owner, leaf = _owner(attention, parameter)
            hook = _offload_of(owner)
            hook.weights_map = _Changed(hook.weights_map, leaf, value=torch.zeros(value.shape, dtype=value.dtype))
    left: Any = model.get_submodule(name.format(layer))
    if left is not attention and left.bias is not None and left.bias.is_meta:
        # A layer without heads keeps its bias in memory.
        bias = _offload_of(attention.get_submodule(output_name(attention))).weights_map["bias"]
        left.bias = nn.Parameter(bias, left.bias.requires_grad)


def _slice_offloaded(model: nn.Module, name: str, rows: Rows) -> None:
    """Slice an offloaded parameter whenever it is read; do nothing if it is not offloaded."""
    owner, leaf = _owner(model, name)
    if getattr(owner, leaf).is_meta:
        hook = _offload_of(owner)
        hook.weights_map = _Changed(hook.weights_map, leaf, rows=rows)


class _Changed(Mapping[str, Tensor]):
    """Offloaded weights of a module, of which one is replaced, or sliced when it is read."""

    def __init__(
        self, whole: Mapping[str, Tensor], name: str, *, value: Tensor | None = None, rows: Rows | None = None
    ) -> None:
        self._whole, self._name, self._value, self._rows = whole, name, value, rows

    def __getitem__(self, name: str) -> Tensor:
        if name != self._name:
            return self._whole[name]
        value = self._whole[name] if self._value is None else self._value
        return value if self._rows is None else value.index_select(*self._rows)

    def __iter__(self) -> Iterator[str]:
        return iter(dict.fromkeys((*self._whole, self._name)))

    def __len__(self) -> int:
        return len(list(iter(self)))


def _owner(model: nn.Module, name: str) -> tuple[Any, str]:
    path, _, leaf = name.rpartition(".")
    return model.get_submodule(path), leaf


def _hooks(module: Any) -> list[Any]:
    """Return accelerate's hooks on a module that may hold weights."""
    hook = getattr(module, "_hf_hook", None)
    return [each for each in getattr(hook, "hooks", [hook]) if hasattr(each, "weights_map")]


def _offload_of(module: nn.Module) -> Any:
    return next(hook for hook in _hooks(module) if hook.offload)


def _forget(model: object) -> None:
    """Let a model go."""
