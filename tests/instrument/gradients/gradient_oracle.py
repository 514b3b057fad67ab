"""Slow oracle of gradients: one sequence at a time, without padding, in one graph of the whole model."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from headscan.models.loaded_model import LoadedModel


@dataclass
class Traced:
    """Input and output of an output projection, with the derivatives by them; one sequence."""

    heads_NHD: Tensor
    heads_gradient_NHD: Tensor
    output_gradient_NE: Tensor

    @property
    def importance_H(self) -> Tensor:
        return (self.heads_NHD * self.heads_gradient_NHD).sum((0, 2)).abs()

    @property
    def token_importance_H(self) -> Tensor:
        return sum(
            (out * gradient).sum(-1).abs()
            for out, gradient in zip(self.heads_NHD, self.heads_gradient_NHD, strict=True)
        )


def traced(lm: LoadedModel, loss: Callable[[], Tensor]) -> dict[int, Traced]:
    """Return what flows through each layer's output projection when ``loss`` runs the model on one sequence."""
    seen: dict[int, tuple[Tensor, Tensor]] = {}
    with torch.enable_grad(), ExitStack() as hooks:
        for site in lm.grid.sites:

            def keep(_, args, out, layer=site.layer) -> None:
                seen[layer] = args[0], out

            hooks.callback(lm.module(site.output_projection).register_forward_hook(keep).remove)
        total = loss()
        gradients = torch.autograd.grad(total, [tensor for pair in seen.values() for tensor in pair])
    found = {}
    for (layer, (heads, _)), by_heads, by_output in zip(seen.items(), gradients[::2], gradients[1::2], strict=True):
        site = lm.grid.site_of(layer)
        shape = (site.num_attention_heads, site.value_dim)
        found[layer] = Traced(heads[0].detach().unflatten(-1, shape), by_heads[0].unflatten(-1, shape), by_output[0])
    return found


def next_token_loss(lm: LoadedModel, ids_N: Tensor, reduction: str = "mean") -> Tensor:
    logits = lm.model(input_ids=ids_N[None], use_cache=False).logits[0, :-1]
    wide = logits.to(torch.promote_types(logits.dtype, torch.float32))
    return F.cross_entropy(wide, ids_N[1:], reduction=reduction)
