"""Removal of heads from a loaded model: the result has smaller projections and a smaller KV cache.

Copies share weights with the original, also weights that accelerate keeps outside the model until a pass needs them.
Every sliced attention module is compared with the original one, whose removed heads are zeroed.
"""

from __future__ import annotations

import copy
import weakref
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM

from headscan.ablation.intervention import ZERO, intervene
from headscan.ablation.masks import HeadMask
from headscan.attention.discovery import discover
from headscan.errors import PruningError, UnsupportedModelError, check_type
from headscan.grid import Head, Heads
from headscan.layers.blocks import short_text
from headscan.models.forward_inputs import run_forward
from headscan.models.loaded_model import LoadedModel, check_loaded
from headscan.pruning.format.attention_parts import CannotSliceError, LayerHeads, Rows, output_name
from headscan.pruning.format.pruned_attention import shrink_attention
from headscan.pruning.format.pruned_model import heads_of, model_class, pruned_config
from headscan.text_tables import percent


def sharing_copy(model: Any, config: Any = None, kind: type | None = None) -> Any:
    """Return a copy of a model or module that shares its parameters, with another configuration or class if given."""
    memo: dict[int, Any] = {id(tensor): tensor for tensor in (*model.parameters(), *model.buffers())}
    hooks = [hook for module in model.modules() for hook in _hooks(module)]
    for hook in hooks:
        memo |= {id(shared): shared for shared in (hook.weights_map, hook.tied_params_map) if shared is not None}
    if config is not None:
        memo[id(model.config)] = config
    copied = copy.deepcopy(model, memo)
    if kind is not None:
        copied.__class__ = kind
        # The names that weights have in files belong to the class.
        vars(copied).pop("_weight_conversions", None)
    if any(hook.offload for hook in hooks):
        # The files of offloaded weights go with the last of the two models.
        weakref.finalize(copied, _forget, model)
    return copied


def replace_weights(model: nn.Module, weights: Mapping[str, Tensor]) -> None:
    """Give parameters of a model new values; tied ones stay tied."""
    current = {id(old): old for old in model.parameters()}
    for name, new in weights.items():
        owner, leaf = _owner(model, name)
        old = getattr(owner, leaf)
        value = new.detach().to(old.dtype, copy=True)
        if old.is_meta:
            _change_offloaded(owner, leaf, value=value.cpu())
        else:
            current[id(old)] = nn.Parameter(value.to(old.device), old.requires_grad)
    for module in model.modules():
        for leaf, old in list(module.named_parameters(recurse=False)):
            if current[id(old)] is not old:
                setattr(module, leaf, current[id(old)])


def shrink_layer(model: nn.Module, name: str, layer: int, heads: LayerHeads) -> None:
    """Remove heads from the attention of one layer in place, as `shrink_attention` does, also if it is offloaded."""
    attention = model.get_submodule(name.format(layer))
    before = dict(attention.named_parameters()).keys()
    for parameter, rows in shrink_attention(model, name, layer, heads).items():
        owner, leaf = _owner(model, parameter)
        if getattr(owner, leaf).is_meta:
            _change_offloaded(owner, leaf, rows=rows)
    for parameter, value in attention.named_parameters():
        if parameter not in before and value.is_meta:
            owner, leaf = _owner(attention, parameter)
            _change_offloaded(owner, leaf, value=torch.zeros(value.shape, dtype=value.dtype))
    left: Any = model.get_submodule(name.format(layer))
    if left is not attention and left.bias is not None and left.bias.is_meta:
        # A layer without heads keeps its bias in memory.
        bias = _offload_of(attention.get_submodule(output_name(attention))).weights_map["bias"]
        left.bias = nn.Parameter(bias, left.bias.requires_grad)


def _change_offloaded(owner: nn.Module, leaf: str, *, value: Tensor | None = None, rows: Rows | None = None) -> None:
    """Replace an offloaded parameter, or slice it whenever it is read."""
    hook = _offload_of(owner)
    hook.weights_map = _Changed(hook.weights_map, leaf, value, rows)


class _Changed(Mapping[str, Tensor]):
    """Offloaded weights of a module, of which one is replaced, or sliced when it is read."""

    def __init__(self, whole: Mapping[str, Tensor], name: str, value: Tensor | None, rows: Rows | None) -> None:
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


_TOKENS = 6


@torch.no_grad()
def check_slicing(lm: LoadedModel, removed: Iterable[Head], heads: Mapping[int, LayerHeads]) -> None:
    """Raise if a sliced attention module computes something else than the original one with heads zeroed.

    Layouts of weights are known by their names, so an architecture with the same names may have another layout. One
    layer after the other is sliced for this, with the original weights.
    """
    sites = {site.layer: site for site in lm.grid.sites if site.layer in heads}
    calls: dict[int, tuple[Any, Any, Tensor]] = {}
    with ExitStack() as hooks:
        hooks.enter_context(intervene(lm, HeadMask(removed)))
        for layer, site in sites.items():

            def keep(_: nn.Module, args: Any, kwargs: Any, out: Any, layer: int = layer) -> None:
                calls[layer] = args, kwargs, out[0]

            hooks.callback(lm.module(site.path).register_forward_hook(keep, with_kwargs=True).remove)
        run_forward(lm.model, {"input_ids": short_text(lm, _TOKENS)})
    bound = 1e-3 if lm.model.dtype in (torch.float32, torch.float64) else 0.1
    for layer, (args, kwargs, want) in calls.items():
        holder = nn.Module()
        holder.add_module(str(layer), sharing_copy(lm.module(sites[layer].path)))
        shrink_layer(holder, "{}", layer, heads[layer])
        got = holder.get_submodule(str(layer))(*args, **kwargs)[0]
        error = float((got - want).float().norm() / want.float().norm().clamp_min(1e-12))
        if not error <= bound:
            raise UnsupportedModelError(
                f"heads of {type(lm.model).__name__} cannot be removed: without them the attention of layer {layer} "
                f"differs by {percent(error)} (limit {percent(bound)}) from that with them zeroed. Load another model"
            )


def slice_heads(lm: LoadedModel, removed: Heads, weights: Mapping[str, Tensor] | None = None) -> LoadedModel:
    """Return a model without some heads.

    The given model stays as it is. Weights that stay the same are shared, not copied. A KV head goes with the last of
    its query heads. A layer without heads has no attention, and adds only the bias of its output projection.

    Args:
        lm: A decoder, pruned before or not.
        removed: ``(layer, head)`` pairs, the heads of each layer by its number, or a `HeadMask`.
        weights: New values of parameters by name, in the shape of the given model. Parts that belong to removed heads
            are ignored. The output projection of a layer that loses heads can get a bias that it lacks. None changes
            no value.

    Raises:
        HeadIndexError: The model lacks a head.
        PruningError: No heads remain, or a new value has the wrong name or shape.
        UnsupportedModelError: Heads of this architecture cannot be removed one by one.
    """
    check_loaded(lm)
    if isinstance(removed, HeadMask) and removed.replacement is not ZERO:
        raise PruningError("`removed` is a mask with other outputs than zero, which removed heads lack. Pass its heads")
    gone = lm.grid.check(removed)
    _check_architecture(lm)
    check_type("weights", weights, Mapping | None, "tensors by the name of the parameter", PruningError)
    weights = dict(weights or {})
    for name, new in weights.items():
        check_type(f"weights[{name!r}]", new, Tensor, "a tensor", PruningError)
    biases = _take_added_biases(lm, gone, weights)
    _check_shapes(lm.model, weights)
    remaining = {
        layer: replace(heads, has_added_bias=heads.has_added_bias or layer in biases)
        for layer, heads in _remaining(lm, gone).items()
    }
    heads = heads_of(lm.model.config) | remaining
    if not heads:
        model = sharing_copy(lm.model)
        replace_weights(model, weights)
        return replace(lm, model=model)
    config = pruned_config(lm.model.config, _attention_name(lm), heads)
    model = sharing_copy(lm.model, config, model_class(type(config)))
    replace_weights(model, weights)
    for layer, each in remaining.items():
        try:
            shrink_layer(model, config.pruned_attention, layer, each)
        except CannotSliceError as problem:
            raise UnsupportedModelError(f"heads of layer {layer} cannot be removed: {problem}") from problem
    check_slicing(lm, gone, remaining)
    for layer, (name, value) in biases.items():
        is_left = bool(remaining[layer].kept)
        replace_weights(model, {name if is_left else f"{config.pruned_attention.format(layer)}.bias": value})
    return LoadedModel(model, lm.tokenizer, discover(model), lm.source, lm.revision)


def _take_added_biases(
    lm: LoadedModel, gone: Iterable[Head], weights: dict[str, Tensor]
) -> dict[int, tuple[str, Tensor]]:
    """Take from new values the biases that output projections lack: by layer the name and the value."""
    biases: dict[int, tuple[str, Tensor]] = {}
    for layer in {head.layer for head in gone}:
        projection = lm.grid.site_of(layer).output_projection
        name, module = f"{projection}.bias", lm.module(projection)
        if name in weights and module.bias is None and weights[name].shape == module.weight.shape[:1]:
            biases[layer] = name, weights.pop(name)
    return biases


def _remaining(lm: LoadedModel, gone: tuple[Head, ...]) -> dict[int, LayerHeads]:
    if len(gone) == lm.grid.total_heads:
        raise PruningError(f"all {len(gone)} heads of the model are to go (limit {len(gone) - 1}). Keep some")
    by_layer: dict[int, set[int]] = defaultdict(set)
    for layer, head in gone:
        by_layer[layer].add(head)
    remaining = {}
    for layer, positions in by_layer.items():
        site = lm.grid.site_of(layer)
        now: LayerHeads | None = getattr(lm.module(site.path), "headscan_heads", None)
        before = now or LayerHeads.all(site.num_attention_heads, site.num_key_value_heads)
        left = replace(before, kept=tuple(head for at, head in enumerate(before.kept) if at not in positions))
        if not site.by_interface and not left.groups_are_equal:
            raise UnsupportedModelError(
                f"heads of layer {layer} cannot be removed: {type(lm.module(site.path)).__name__} computes attention "
                f"itself, and the groups that remain have sizes {left.group_sizes} (limit: one size). Remove equally "
                "many heads of each group, or whole groups"
            )
        remaining[layer] = left
    return remaining


def _attention_name(lm: LoadedModel) -> str:
    """Return the name of all attention modules, with {} for the layer."""
    names = {site.path.replace(f".{site.layer}.", ".{}.", 1) for site in lm.grid.sites}
    if len(names) != 1 or "{}" not in (name := names.pop()):
        raise UnsupportedModelError(
            f"the attention modules of {type(lm.model).__name__} have no common name, so its heads cannot be removed. "
            "Load another model"
        )
    return name


def _check_architecture(lm: LoadedModel) -> None:
    model: Any = lm.model
    parameters = Counter(id(p) for site in lm.grid.sites for p in lm.module(site.path).parameters())
    everywhere = Counter(id(p) for _, p in model.named_parameters(remove_duplicate=False))
    config, why = model.config, None
    if lm.grid.others or not lm.grid.predicts_next_token:
        why = "it is not a decoder"
    elif getattr(model, "is_quantized", False) or getattr(config, "quantization_config", None) is not None:
        why = "its weights are quantised"
    elif getattr(config, "kv_lora_rank", None):
        why = "its heads share a latent KV cache (MLA)"
    elif any(site.kv_shared_from is not None for site in lm.grid.sites):
        why = "layers use the keys of other layers"
    elif any(everywhere[each] > 1 for each in parameters):
        why = "attention modules share weights with other modules"
    elif config.get_text_config() is not config:
        why = "it is the text part of a model of several kinds of input"
    elif type(model) is not AutoModelForCausalLM._model_mapping.get(type(config), None):
        why = f"{type(config).__name__} does not belong to AutoModelForCausalLM, which loads pruned models"
    elif config.is_heterogeneous and not heads_of(config):
        why = "its layers have different configurations already"
    if why is not None:
        raise UnsupportedModelError(f"no heads of {type(model).__name__} can be removed: {why}. Load another model")


def _check_shapes(model: nn.Module, weights: Mapping[str, Tensor]) -> None:
    parameters = dict(model.named_parameters(remove_duplicate=False))
    for name, new in weights.items():
        old = parameters.get(name)
        if old is None or old.shape != new.shape:
            limit = "no such parameter" if old is None else f"limit {tuple(old.shape)}"
            raise PruningError(f"new value of {name}: shape {tuple(new.shape)} ({limit}). Pass one that fits the model")
