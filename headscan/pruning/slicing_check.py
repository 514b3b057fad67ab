"""A comparison of sliced attention modules with the original ones, whose removed heads are zeroed."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor, nn

from headscan.ablation.intervene import intervene
from headscan.ablation.masks import HeadMask
from headscan.errors import UnsupportedModelError
from headscan.grid import Head
from headscan.layers.blocks import short_text
from headscan.models.forward_inputs import run
from headscan.models.loaded_model import LoadedModel
from headscan.pruning.format.attention_parts import LayerHeads
from headscan.pruning.model_copy import sharing_copy, shrink_layer

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
