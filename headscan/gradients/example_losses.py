"""Losses of the sequences of a batch, which backward passes start from.

A decoder's losses come from the output of its last block without all logits at once: the model's own final norm, head
and logit scaling run on a part of the tokens at a time.

Shapes: B sequences, N tokens, E width of a hidden state, M scored tokens, V vocabulary.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from transformers.cache_utils import Cache

from headscan.errors import SequenceError
from headscan.layers.blocks import Blocks
from headscan.models.forward_inputs import without_autocast
from headscan.models.loaded_model import LoadedModel
from headscan.models.logits import logits_at

#: Logits in memory at one time.
_LOGITS = 1 << 25


@contextmanager
def tail_only(blocks: Blocks, hidden: Tensor) -> Iterator[None]:
    """Let forward passes skip all blocks and go on with ``hidden`` (B, N, E), the output of the last one.

    Call the model with the token ids of the same batch and without a KV cache.
    """
    with ExitStack() as changes:
        for block in blocks.all:
            changes.enter_context(block.skipped())

        def replace(own: Tensor, _: Cache | None) -> Tensor:
            return hidden.to(own.device)

        changes.enter_context(blocks.all[-1].watched(replace))
        yield


@dataclass(frozen=True)
class ScoredTokens:
    """Tokens of a batch whose loss counts, and the places whose logits predict them.

    Attributes:
        ids: Token ids (B, N).
        counts: Number of scored tokens of each sequence, its last ones.
        rows, columns: Places of the predicting logits, M each.
        summed: The loss of a sequence is the sum over its scored tokens instead of the mean.
    """

    ids: Tensor
    counts: tuple[int, ...]
    rows: tuple[int, ...]
    columns: tuple[int, ...]
    summed: bool = False

    @classmethod
    def last(
        cls, ids: Tensor, lengths: Sequence[int], counts: Sequence[int] | None, *, summed: bool = False
    ) -> ScoredTokens:
        """Score the last ``counts`` tokens of each sequence; None scores all but the first.

        Raises:
            SequenceError: A sequence has fewer tokens to score.
        """
        counts = tuple(length - 1 for length in lengths) if counts is None else tuple(counts)
        for row, (length, count) in enumerate(zip(lengths, counts, strict=True)):
            if not 1 <= count < length:
                raise SequenceError(
                    f"scored tokens of sequence {row}: {count} (limit 1 to {length - 1}). Score fewer, and never the "
                    "first token"
                )
        places = [
            (row, column)
            for row, (length, count) in enumerate(zip(lengths, counts, strict=True))
            for column in range(length - 1 - count, length - 1)
        ]
        return cls(ids, counts, tuple(row for row, _ in places), tuple(column for _, column in places), summed)

    @property
    def gradient_scale(self) -> int:
        """Factor of `loss_gradient`: a mean over many tokens has derivatives that float16 rounds to zero."""
        return 1 if self.summed else max(self.counts)

    def losses(self, blocks: Blocks, hidden: Tensor) -> Tensor:
        """Return the loss of each sequence, in nats: (B,), float32 or wider."""
        with torch.no_grad():
            return sum((loss_B for loss_B in self._parts(blocks, hidden)), torch.zeros(()))

    def loss_gradient(self, blocks: Blocks, hidden: Tensor) -> Tensor:
        """Return the derivative (B, N, E) of the sum of `losses` by ``hidden``, times `gradient_scale`."""
        leaf = hidden.detach().requires_grad_()
        with torch.enable_grad():
            for loss_B in self._parts(blocks, leaf, self.gradient_scale):
                loss_B.sum().backward()
        assert leaf.grad is not None
        return leaf.grad

    def losses_of_pass(self, lm: LoadedModel) -> Tensor:
        """Run the whole model and return the loss of each sequence (B,), with its graph; all logits exist at once."""
        logits_MV = logits_at(lm, self.ids, list(self.rows), list(self.columns), use_cache=False)
        return self._share(logits_MV, slice(0, len(self.rows)), 1)

    def _parts(self, blocks: Blocks, hidden: Tensor, scale: int = 1) -> Iterator[Tensor]:
        """Yield the shares of the losses (B,), times ``scale``, of parts of the scored tokens, on the CPU."""
        lm = blocks.lm
        size = max(16, _LOGITS // lm.vocab_size)
        with tail_only(blocks, hidden), without_autocast(lm.device):
            for start in range(0, len(self.rows), size):
                part = slice(start, start + size)
                logits_MV = logits_at(lm, self.ids, list(self.rows[part]), list(self.columns[part]), use_cache=False)
                yield self._share(logits_MV, part, scale)

    def _share(self, logits_MV: Tensor, part: slice, scale: int) -> Tensor:
        """Return the share of some scored tokens in the losses (B,), times ``scale``, on the CPU."""
        rows, columns = list(self.rows[part]), list(self.columns[part])
        targets = self.ids[rows, [column + 1 for column in columns]].to(logits_MV.device)
        wide = logits_MV.to(torch.promote_types(logits_MV.dtype, torch.float32))
        loss_M = F.cross_entropy(wide, targets, reduction="none").cpu()
        if not self.summed:
            counts = torch.tensor(self.counts, dtype=torch.float64)
            loss_M = loss_M * (scale / counts)[rows].to(loss_M.dtype)
        return torch.zeros(len(self.counts), dtype=loss_M.dtype).index_add(0, torch.tensor(rows), loss_M)


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
