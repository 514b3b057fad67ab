"""Derivatives of a loss by tensors of every layer, from one forward and one backward pass.

The forward pass of a decoder keeps the input of every block, and the backward pass runs one block at a time again, so
memory is linear in the length and about that of one block. Other models, and those whose layers exchange more than
hidden states, are differentiated as a whole.

Shapes: B sequences, N tokens, H query heads, Dv width of a head's output, E width of a hidden state.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass

import torch
from torch import Tensor

from headscan.gradients.block_calls import BlockCall, frozen_weights, keep_call, last_output, same_output
from headscan.gradients.example_losses import Loss
from headscan.gradients.layer_watch import Visit, watched_layers
from headscan.layers.blocks import Blocks, find_blocks
from headscan.models.forward_inputs import run, without_autocast
from headscan.models.loaded_model import LoadedModel


def backward(
    lm: LoadedModel,
    loss: Loss,
    *,
    on_heads: Visit | None = None,
    on_outputs: Visit | None = None,
    gates: Mapping[int, Tensor] | None = None,
    recompute: bool = True,
) -> dict[int, Tensor]:
    """Visit the derivatives of the summed loss of a batch, from the last layer to the first.

    A visitor's tensors are released after its call. It may run in a thread of autograd.

    Args:
        lm: A model from `headscan.load`, on any devices; its weights get no derivatives.
        loss: The loss of each sequence.
        on_heads: Called for each layer with its site, the heads' outputs (B, N, H, Dv) at the input of the output
            projection, in the model's dtype, and the derivative by them, float32 or wider; None skips them.
        on_outputs: The same for the output of the output projection (B, N, E).
        recompute: Run the blocks of a decoder again one at a time; False keeps the graph of all blocks, which takes a
            third less time and the memory of all of them.
        gates: By layer, a leaf tensor that requires a gradient and that an open hook uses in this layer.

    Returns:
        The derivatives by the gates, by layer.

    Raises:
        UnsupportedModelError: The model is a decoder without blocks that run one after another, is compiled, or is in
            train mode.
    """
    leaves = dict(gates or {})
    pass_ = _Pass(lm, loss, on_heads, on_outputs, leaves)
    with torch.inference_mode(False), frozen_weights(lm.model):
        if not lm.grid.predicts_next_token:
            pass_.whole_model()
        else:
            blocks = find_blocks(lm)
            shares_keys = any(site.kv_shared_from is not None for site in lm.grid.sites)
            whole = shares_keys or not recompute
            top = len(blocks.all) - 1 if whole else pass_.block_by_block(blocks)
            if top is not None:
                pass_.from_last_block(blocks, top)
    return pass_.found


@dataclass
class _Pass:
    """One backward pass; ``found`` holds the derivatives by the gates."""

    lm: LoadedModel
    loss: Loss
    on_heads: Visit | None
    on_outputs: Visit | None
    gates: dict[int, Tensor]

    def __post_init__(self) -> None:
        self.found: dict[int, Tensor] = {}

    def block_by_block(self, blocks: Blocks) -> int | None:
        """Repeat one block at a time.

        Returns:
            The highest layer that was not visited, because a repeated block gives another output; None if all were.
        """
        lowest, count = self._lowest(), len(blocks.all)
        calls: dict[int, BlockCall] = {}
        with torch.no_grad(), ExitStack() as hooks, last_output(blocks) as last:
            for layer in range(lowest, count):
                hooks.enter_context(keep_call(blocks.all[layer], layer, calls))
            run(self.lm.model, dict(self.loss.inputs))
        after = last.pop()
        gradient = self.loss.gradient(blocks, after)
        for layer in reversed(range(lowest, count)):
            call = calls.pop(layer)
            hidden = call.hidden.detach().requires_grad_(layer > lowest)
            with torch.enable_grad(), self._watched(), without_autocast(self.lm.device):
                out = call.again(hidden)
            if not same_output(out, after):
                return layer
            torch.autograd.backward(out, gradient.to(out.device))
            self._take_gates(layer, layer)
            if layer > lowest:
                assert hidden.grad is not None
                gradient, after = hidden.grad, call.hidden
            del out, hidden
        return None

    def from_last_block(self, blocks: Blocks, top: int) -> None:
        """Differentiate all blocks in one graph, and visit the layers from ``top`` down."""
        with torch.enable_grad(), last_output(blocks) as last, self._watched(top):
            run(self.lm.model, dict(self.loss.inputs))
        after = last.pop()
        torch.autograd.backward(after, self.loss.gradient(blocks, after))
        self._take_gates(0, top)

    def whole_model(self) -> None:
        """Differentiate the losses in one graph of the whole model."""
        with torch.enable_grad(), self._watched(), without_autocast(self.lm.device):
            total = self.loss.losses(self.lm).sum() * self.loss.scale
        total.backward()
        self._take_gates(0, self.lm.grid.num_layers - 1)

    def _watched(self, top: int | None = None) -> AbstractContextManager[None]:
        return watched_layers(self.lm, self.on_heads, self.on_outputs, scale=self.loss.scale, top=top)

    def _lowest(self) -> int:
        """Return the lowest layer with a derivative."""
        visited = self.on_heads is not None or self.on_outputs is not None
        return min([*self.gates, *((site.layer for site in self.lm.grid.sites) if visited else ())])

    def _take_gates(self, first: int, last: int) -> None:
        """Move the derivatives of the gates of these layers to ``found``."""
        for layer, gate in self.gates.items():
            if first <= layer <= last:
                assert gate.grad is not None
                self.found[layer], gate.grad = gate.grad / self.loss.scale, None
            else:
                gate.grad = None
