"""Calls of blocks, kept so that a backward pass can repeat them one at a time.

Shapes: B sequences, N tokens, E width of a hidden state.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from headscan.layers.blocks import Blocks
from headscan.models.decoder_block import Block
from headscan.models.token_means import wide_norm


@dataclass(frozen=True)
class BlockCall:
    """A call of a block, which can be repeated on its input ``hidden`` (B, N, E)."""

    block: Block
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    hidden: Tensor

    def again(self, hidden: Tensor) -> Tensor:
        """Return the block's output (B, N, E) for another input."""
        name = self.block.argument
        if name in self.kwargs:
            out = self.block.module(*self.args, **(self.kwargs | {name: hidden}))
        else:
            out = self.block.module(hidden, *self.args[1:], **self.kwargs)
        return out[0] if isinstance(out, tuple) else out


@contextmanager
def keep_call(block: Block, layer: int, calls: dict[int, BlockCall]) -> Iterator[None]:
    """Put the call of a block in the next pass into ``calls[layer]``."""

    def hook(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        calls[layer] = BlockCall(block, args, kwargs, block.hidden(args, kwargs))

    handle = block.module.register_forward_pre_hook(hook, with_kwargs=True)
    try:
        yield
    finally:
        handle.remove()


@contextmanager
def last_output(blocks: Blocks) -> Iterator[list[Tensor]]:
    """Keep the output of the last block in the next pass."""
    kept: list[Tensor] = []

    def hook(_: nn.Module, __: Any, out: Any) -> None:
        kept[:] = [out[0] if isinstance(out, tuple) else out]

    handle = blocks.all[-1].module.register_forward_hook(hook)
    try:
        yield kept
    finally:
        handle.remove()


def same_output(out: Tensor, after: Tensor) -> bool:
    """Return True if two hidden states differ by at most 64 roundings, and by at most 2% of their norm."""
    if out.shape != after.shape:
        return False
    bound = min(64 * torch.finfo(out.dtype).eps, 0.02) * wide_norm(out.detach())
    return bool(wide_norm(out.detach() - after.to(out.device)) <= bound)


@contextmanager
def frozen_weights(model: nn.Module) -> Iterator[None]:
    """Take no derivatives by the weights."""
    weights = dict(model.named_parameters())
    names = [name for name, weight in weights.items() if weight.requires_grad]
    try:
        for name in names:
            weights[name].requires_grad_(False)
        yield
    finally:
        # Accelerate replaces the weights of offloaded modules.
        weights = dict(model.named_parameters())
        for name in names:
            weights[name].requires_grad_(True)
