"""The projections of a layer that write into the residual stream: of the attention, and of the MLP.

Shapes: B sequences, N tokens, E width of a hidden state, F columns of a projection's input.
"""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from accelerate.utils import align_module_device
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from headscan.grid import AttentionSite
from headscan.layers.blocks import Blocks, short_text
from headscan.pruning.calibration import Batch, Calibration
from headscan.pruning.edited_model import read_weight
from headscan.pruning.layer_passes import entering, through_layer, watched_modules

#: Tokens of the short text, and largest relative difference of equal hidden states.
_TOKENS, _TOLERANCE = 8, 1e-3


@dataclass(frozen=True)
class Writer:
    """A projection whose output reaches the residual stream.

    Attributes:
        path: Name of the module.
        additive: Its output is added to the residual stream unchanged. False if a norm or a factor follows.
        old: Its weight (E, F).
        bias: Its bias (E,), or 0.
    """

    path: str
    additive: bool
    old: Tensor
    bias: Tensor | float


class Writers(NamedTuple):
    """The writers of a layer; None if there is none that can be repaired."""

    attention: Writer | None
    mlp: Writer | None


def find_writers(blocks: Blocks, layer: int, site: AttentionSite | None) -> Writers:
    """Find the writers of a layer from short passes.

    The MLP's writer is the last plain projection that runs, outside the attention, with outputs as wide as a hidden
    state. Layers of experts have none.
    """
    ids = short_text(blocks.lm, _TOKENS)
    batch = next(Calibration(ids, torch.full((len(ids),), ids.shape[1])).batches(ids.device))
    with torch.no_grad():
        hidden = entering(blocks, batch, layer)
        ran = _order_of_projections(blocks, layer, batch, hidden)
        attention = None
        if site is not None:
            path = site.output_projection
            attention = _writer(blocks, path, _adds_to_residual(blocks, layer, batch, hidden, path))
        prefix = "" if site is None else f"{site.path}."
        width = hidden.shape[-1]
        others = [path for path, out in ran if out == width and not (prefix and path.startswith(prefix))]
        mlp = None
        if others:
            mlp = _writer(blocks, others[-1], _adds_to_output(blocks, layer, batch, hidden, others[-1]))
    return Writers(attention, mlp)


def _writer(blocks: Blocks, path: str, additive: bool) -> Writer:
    module = blocks.lm.module(path)
    weight = read_weight(module)
    with align_module_device(module):
        bias: Any = getattr(module, "bias", None)
        bias = 0.0 if bias is None else bias.detach().clone().float()
    return Writer(path, additive, weight.T if isinstance(module, Conv1D) else weight, bias)


def _order_of_projections(blocks: Blocks, layer: int, batch: Batch, hidden: Tensor) -> list[tuple[str, int]]:
    """Return the plain projections of a layer in the order in which they run, with the widths of their outputs."""
    ran: list[tuple[str, int]] = []
    with ExitStack() as hooks:
        for name, module in blocks.all[layer].module.named_modules():
            if type(module) in (nn.Linear, Conv1D):

                def note(_: nn.Module, __: Any, out: Tensor, path: str = f"{blocks.path}.{layer}.{name}") -> None:
                    ran.append((path, out.shape[-1]))

                hooks.callback(module.register_forward_hook(note).remove)
        through_layer(blocks, layer, batch, hidden)
    return ran


def _adds_to_residual(blocks: Blocks, layer: int, batch: Batch, hidden: Tensor, path: str) -> bool:
    """Return True if the residual stream after the attention is the plain sum of its input and its output."""
    sums: list[Tensor] = []
    module = blocks.all[layer].module
    with ExitStack() as hooks, watched_modules(blocks, [path]) as seen:
        for name, child in module.named_children():
            if path.startswith(f"{blocks.path}.{layer}.{name}."):
                continue

            def keep(_: nn.Module, args: tuple[Any, ...]) -> None:
                sums.extend(each for each in args[:1] if isinstance(each, Tensor))

            hooks.callback(child.register_forward_pre_hook(keep).remove)
        through_layer(blocks, layer, batch, hidden)
    out = batch.by_token(seen.outputs[path])
    hidden_here = hidden.to(out.device)
    for each in sums:
        # The change of the residual stream is compared, because the output may be small next to the stream itself.
        if each.shape == out.shape and _equal(each.to(out.device).float() - hidden_here.float(), out, hidden_here):
            return True
    return _adds_to_output(blocks, layer, batch, hidden, path)


def _adds_to_output(blocks: Blocks, layer: int, batch: Batch, hidden: Tensor, path: str) -> bool:
    """Return True if a change of a projection's output changes the layer's output as much."""
    before = through_layer(blocks, layer, batch, hidden)
    generator = torch.Generator().manual_seed(0)
    change = (torch.randn(before.shape, generator=generator) * float(before.float().std())).to(before)
    handle = blocks.lm.module(path).register_forward_hook(lambda _, __, out: out + change.to(out.device).view_as(out))
    try:
        after = through_layer(blocks, layer, batch, hidden)
    finally:
        handle.remove()
    return _equal(after.float() - before.float(), change, before)


def _equal(change: Tensor, expected: Tensor, stream: Tensor) -> bool:
    """Return True if two changes of the residual stream are equal, up to the rounding of the stream."""
    wide = expected.float()
    bound = max(_TOLERANCE * float(wide.norm()), 2 * torch.finfo(stream.dtype).eps * float(stream.float().norm()))
    # Rounding must not hide the change itself.
    return bound < 0.5 * float(wide.norm()) and float((change.float() - wide).norm()) <= bound
