"""Hooks on the output projections that receive derivatives while a backward pass runs.

Shapes: B sequences, N tokens, H query heads, Dv width of a head's output, E width of a hidden state.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from headscan.attention.hooks import output_hook
from headscan.grid import AttentionSite
from headscan.models.loaded_model import LoadedModel

#: Called with a site, a tensor of its layer, and the derivative of the loss by it: float32 or wider, unscaled.
Visit = Callable[[AttentionSite, Tensor, Tensor], None]


@contextmanager
def watched_layers(
    lm: LoadedModel,
    on_heads: Visit | None,
    on_outputs: Visit | None,
    *,
    scale: float,
    top: int | None = None,
) -> Iterator[None]:
    """Call visitors in backward passes of the forward passes that run with gradients; all kinds of sites.

    Args:
        on_heads: Receives the heads' outputs (B, N, H, Dv); None takes no derivative by them.
        on_outputs: Receives the output projection's output (B, N, E); None takes no derivative by it.
        scale: Factor of the loss, by which derivatives are divided.
        top: The highest layer to visit; None visits all.
    """

    def watch(site: AttentionSite, tensor: Tensor, visit: Visit) -> None:
        if not torch.is_grad_enabled() or (top is not None and site.layer > top):
            return
        if not tensor.requires_grad:
            tensor.requires_grad_()  # no layer below takes derivatives, so the backward pass ends here
        values = tensor.detach()  # keeping the tensor itself would keep its graph alive

        def receive(gradient: Tensor) -> None:
            wide = gradient.to(torch.promote_types(gradient.dtype, torch.float32))
            visit(site, values, wide / scale if scale != 1 else wide)

        tensor.register_hook(receive)

    grids = [lm.at(kind) for kind in lm.grid.kinds]
    sites = [site for each in grids for site in each.grid.sites]
    with ExitStack() as hooks:
        if on_outputs is not None:
            for site in sites:

                def left(_: nn.Module, __: Any, out: Tensor, site: AttentionSite = site) -> None:
                    watch(site, out, on_outputs)

                hooks.callback(lm.module(site.output_projection).register_forward_hook(left).remove)
        if on_heads is not None:

            def entered(site: AttentionSite, heads_BNHD: Tensor) -> Tensor:
                watch(site, heads_BNHD, on_heads)
                return heads_BNHD

            for each in grids:
                hooks.enter_context(output_hook(each, entered))
        yield
