"""Copies of models that share weights, also weights that accelerate keeps outside the model until a pass needs them."""

from __future__ import annotations

import copy
import weakref
from collections.abc import Iterator, Mapping
from typing import Any

from torch import Tensor, nn

from headscan.pruning.attention_parts import Rows


def sharing_copy(model: Any, config: Any, kind: type) -> Any:
    """Return a copy of a model with another configuration and class, which shares its parameters.

    Args:
        kind: Its class; instances have the same attributes.
    """
    memo: dict[int, Any] = {id(tensor): tensor for tensor in (*model.parameters(), *model.buffers())}
    hooks = [hook for module in model.modules() for hook in _hooks(module)]
    for hook in hooks:
        memo |= {id(shared): shared for shared in (hook.weights_map, hook.tied_params_map) if shared is not None}
    memo[id(model.config)] = config
    found = copy.deepcopy(model, memo)
    found.__class__ = kind
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


def slice_offloaded(model: nn.Module, name: str, rows: Rows) -> None:
    """Slice an offloaded parameter whenever it is read; do nothing if it is not offloaded."""
    owner, leaf = _owner(model, name)
    if getattr(owner, leaf).is_meta:
        hook = _offload_of(owner)
        hook.weights_map = _Changed(hook.weights_map, leaf, rows=rows)


def read_offloaded(module: nn.Module, name: str) -> Tensor:
    """Return the value of an offloaded parameter of a module."""
    value: Tensor = _offload_of(module).weights_map[name]
    return value


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
        return iter(self._whole)

    def __len__(self) -> int:
        return len(self._whole)


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
