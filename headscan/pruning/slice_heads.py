"""Removal of heads from a loaded model: the result has smaller projections and a smaller KV cache.

Every sliced attention module is compared with the original one, whose removed heads are zeroed.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping
from contextlib import ExitStack
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM

from headscan.ablation.intervene import intervene
from headscan.ablation.masks import HeadMask
from headscan.attention.discovery import discover
from headscan.errors import PruningError, UnsupportedModelError
from headscan.grid import AttentionSite, Head
from headscan.layers.blocks import short_text
from headscan.models.forward_inputs import run
from headscan.models.loaded_model import LoadedModel
from headscan.pruning.format.attention_parts import CannotSliceError, LayerHeads
from headscan.pruning.format.pruned_model import heads_of, model_class, pruned_config
from headscan.pruning.model_copy import replace_weights, sharing_copy, shrink_layer

_TOKENS = 6


@torch.no_grad()
def check_slicing(lm: LoadedModel, removed: Iterable[Head], heads: Mapping[int, LayerHeads]) -> None:
    """Raise if a sliced attention module computes something else than the original one with heads zeroed.

    Layouts of weights are known by their names, so an architecture with the same names may have another layout. One
    layer after the other is sliced for this, with the original weights.

    Args:
        lm: The original model.
        removed: The heads to remove.
        heads: Remaining heads of each layer that loses some.

    Raises:
        UnsupportedModelError: The outputs differ.
    """
    sites = {site.layer: site for site in lm.grid.sites if site.layer in heads}
    calls: dict[int, tuple[Any, Any, Tensor]] = {}
    with ExitStack() as hooks:
        hooks.enter_context(intervene(lm, HeadMask(removed)))
        for layer, site in sites.items():

            def keep(_: nn.Module, args: Any, kwargs: Any, out: Any, layer: int = layer) -> None:
                calls[layer] = args, kwargs, out[0]

            hooks.callback(lm.module(site.path).register_forward_hook(keep, with_kwargs=True).remove)
        run(lm.model, {"input_ids": short_text(lm, _TOKENS)})
    bound = 1e-3 if lm.model.dtype in (torch.float32, torch.float64) else 0.1
    for layer, (args, kwargs, want) in calls.items():
        holder = nn.Module()
        holder.add_module(str(layer), sharing_copy(lm.module(sites[layer].path)))
        shrink_layer(holder, "{}", layer, heads[layer])
        found = holder.get_submodule(str(layer))(*args, **kwargs)[0]
        error = float((found - want).float().norm() / want.float().norm().clamp_min(1e-12))
        if not error <= bound:
            raise UnsupportedModelError(
                f"heads of {type(lm.model).__name__} cannot be removed: without them the attention of layer {layer} "
                f"differs by {error:.1%} (limit {bound:.1%}) from that with them zeroed. Load another model"
            )


def slice_heads(
    lm: LoadedModel, removed: Iterable[tuple[int, int]], weights: Mapping[str, Tensor] | None = None
) -> LoadedModel:
    """Return a model without some heads.

    The given model stays as it is. Weights that stay the same are shared, not copied. A KV head goes with the last of
    its query heads. A layer without heads has no attention, and adds only the bias of its output projection.

    Args:
        lm: A decoder, pruned before or not.
        removed: ``(layer, head)`` pairs.
        weights: New values of parameters by name, in the shape of the given model. Parts that belong to removed heads
            are ignored. The output projection of a layer that loses heads can get a bias that it lacks. None changes
            no value.

    Raises:
        HeadIndexError: The model lacks a head.
        PruningError: No heads remain, or a new value has the wrong name or shape.
        UnsupportedModelError: Heads of this architecture cannot be removed one by one.
    """
    gone = lm.grid.check(removed)
    _check_architecture(lm)
    weights = dict(weights or {})
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
    found: dict[int, tuple[str, Tensor]] = {}
    for layer in {head.layer for head in gone}:
        projection = lm.grid.site_of(layer).output_projection
        name, module = f"{projection}.bias", lm.module(projection)
        if name in weights and module.bias is None and weights[name].shape == module.weight.shape[:1]:
            found[layer] = name, weights.pop(name)
    return found


def _remaining(lm: LoadedModel, gone: tuple[Head, ...]) -> dict[int, LayerHeads]:
    """Return the remaining heads of each layer that loses some.

    Raises:
        PruningError: No layer keeps a head.
        UnsupportedModelError: Groups of different sizes would remain in a model that cannot have them.
    """
    if len(gone) == lm.grid.total_heads:
        raise PruningError(f"all {len(gone)} heads of the model are to go (limit {len(gone) - 1}). Keep some")
    by_layer: dict[int, set[int]] = defaultdict(set)
    for layer, head in gone:
        by_layer[layer].add(head)
    found = {}
    for layer, positions in by_layer.items():
        site = lm.grid.site_of(layer)
        before = _heads_now(lm, site)
        left = replace(before, kept=tuple(head for at, head in enumerate(before.kept) if at not in positions))
        if not site.by_interface and not left.groups_are_equal:
            raise UnsupportedModelError(
                f"heads of layer {layer} cannot be removed: {type(lm.module(site.path)).__name__} computes attention "
                f"itself, and the groups that remain have sizes {left.group_sizes} (limit: one size). Remove equally "
                "many heads of each group, or whole groups"
            )
        found[layer] = left
    return found


def _heads_now(lm: LoadedModel, site: AttentionSite) -> LayerHeads:
    heads: LayerHeads | None = getattr(lm.module(site.path), "pruned_heads", None)
    return heads or LayerHeads.all(site.num_attention_heads, site.num_key_value_heads)


def _attention_name(lm: LoadedModel) -> str:
    """Return the name of all attention modules, with {} for the layer.

    Raises:
        UnsupportedModelError: They do not have a common name.
    """
    names = {site.path.replace(f".{site.layer}.", ".{}.", 1) for site in lm.grid.sites}
    if len(names) != 1 or "{}" not in (name := names.pop()):
        raise UnsupportedModelError(
            f"the attention modules of {type(lm.model).__name__} have no common name, so its heads cannot be removed. "
            "Load another model"
        )
    return name


def _check_architecture(lm: LoadedModel) -> None:
    """Raise if heads of this architecture cannot be removed.

    Raises:
        UnsupportedModelError: They cannot.
    """
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
    """Raise if new values do not fit a model.

    Raises:
        PruningError: A value has the wrong name or shape.
    """
    parameters = dict(model.named_parameters(remove_duplicate=False))
    for name, new in weights.items():
        old = parameters.get(name)
        if old is None or old.shape != new.shape:
            limit = "no such parameter" if old is None else f"limit {tuple(old.shape)}"
            raise PruningError(f"new value of {name}: shape {tuple(new.shape)} ({limit}). Pass one that fits the model")
