"""Losses of the sequences of a batch, which backward passes start from.

Shapes: B sequences, N tokens, E width of a hidden state, M scored tokens, V vocabulary.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

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
    @abstractmethod
    def texts(self) -> Mapping[str, Any]:
        """Arguments of `collect` for the same forward pass, by name."""

    @property
    def scale(self) -> float:
        """Factor of all derivatives inside a backward pass: float16 rounds small ones to zero."""
        return 1.0

    @abstractmethod
    def losses(self, lm: LoadedModel) -> Tensor:
        """Run the model and return the losses (B,) in nats, float32 or wider, with their graph."""

    def gradient(self, blocks: Blocks, hidden: Tensor) -> Tensor:
        """Return the derivative (B, N, E) of the summed losses by the output of the last block, times `scale`."""
        leaf = hidden.detach().requires_grad_()
        with torch.enable_grad(), tail_only(blocks, leaf):
            (self.losses(blocks.lm).sum() * self.scale).backward()
        assert leaf.grad is not None
        return leaf.grad


@dataclass(frozen=True)
class NextTokenLoss(Loss):
    """The loss of a decoder's scored tokens; a backward pass computes logits a part of the tokens at a time.

    Attributes:
        places: The scored tokens.
        lengths: Real tokens of each sequence.
    """

    places: ScoredTokens
    lengths: tuple[int, ...]

    @classmethod
    def of(
        cls, ids: Tensor, lengths: Sequence[int], scored: Sequence[int] | None = None, *, summed: bool = False
    ) -> NextTokenLoss:
        """Score tokens of each sequence.

        Args:
            ids: Token ids (B, N) on the model's input device, padded on the right.
            lengths: Real tokens of each sequence.
            scored: Number of scored tokens of each sequence, its last ones; None scores all but the first.
            summed: The loss of a sequence is the sum over its scored tokens instead of the mean.

        Raises:
            SequenceError: A sequence has fewer tokens to score.
        """
        return cls(ScoredTokens.last(ids, lengths, scored, summed=summed), tuple(lengths))

    @property
    def inputs(self) -> Mapping[str, Tensor]:
        return {"input_ids": self.places.ids}

    @property
    def texts(self) -> Mapping[str, Any]:
        return {"input_ids": self.places.ids, "lengths": self.lengths}

    @property
    def scale(self) -> float:
        return self.places.gradient_scale

    def losses(self, lm: LoadedModel) -> Tensor:
        return self.places.losses_of_pass(lm)

    def gradient(self, blocks: Blocks, hidden: Tensor) -> Tensor:
        return self.places.loss_gradient(blocks, hidden)


def reduced(logits_MV: Tensor, targets_M: Tensor, rows: Sequence[int], sequences: int, *, summed: bool) -> Tensor:
    """Return the mean or summed cross-entropy of each sequence's tokens (B,), float32 or wider.

    Args:
        rows: The sequence of each token.
        sequences: B; each has at least one token.
    """
    wide = logits_MV.to(torch.promote_types(logits_MV.dtype, torch.float32))
    loss_M = F.cross_entropy(wide, targets_M.to(wide.device), reduction="none")
    at = torch.tensor(rows, device=wide.device)
    total_B = loss_M.new_zeros(sequences).index_add(0, at, loss_M)
    return total_B if summed else total_B / torch.bincount(at, minlength=sequences)
