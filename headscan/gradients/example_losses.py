"""Losses of the sequences of a batch, which backward passes start from.

Shapes: B sequences, N tokens, E width of a hidden state, M scored tokens, V vocabulary.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from headscan.layers.blocks import Blocks
from headscan.layers.model_tail import ScoredTokens, tail_only
from headscan.models.loaded_model import LoadedModel


class Loss(ABC):
    """One loss for each sequence of a batch."""

    @property
    @abstractmethod
    def inputs(self) -> Mapping[str, Tensor]:
        """Arguments of the forward pass, by name."""

    @property
    def scale(self) -> float:
        """Factor of all derivatives inside a backward pass: float16 rounds small ones to zero."""
        return 1.0

    @abstractmethod
    def losses(self, lm: LoadedModel) -> Tensor:
        """Run the model and return the losses (B,), float32 or wider, with their graph."""

    def gradient(self, blocks: Blocks, hidden: Tensor) -> Tensor:
        """Return the derivative (B, N, E) of the summed losses by the output of the last block, times `scale`."""
        leaf = hidden.detach().requires_grad_()
        with torch.enable_grad(), tail_only(blocks, leaf):
            (self.losses(blocks.lm).sum() * self.scale).backward()
        assert leaf.grad is not None
        return leaf.grad


@dataclass(frozen=True)
class NextTokenLoss(Loss):
    """The loss of a decoder's scored tokens, in nats; logits are computed a part of the tokens at a time.

    Attributes:
        places: The scored tokens.
    """

    places: ScoredTokens

    @property
    def inputs(self) -> Mapping[str, Tensor]:
        return {"input_ids": self.places.ids}

    @property
    def scale(self) -> float:
        return self.places.gradient_scale

    def losses(self, lm: LoadedModel) -> Tensor:
        return self.places.losses_of_pass(lm)

    def gradient(self, blocks: Blocks, hidden: Tensor) -> Tensor:
        return self.places.loss_gradient(blocks, hidden)
