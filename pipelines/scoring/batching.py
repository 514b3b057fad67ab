"""Padded batches of token sequences.

Shapes: B sequences, N tokens of the longest.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from headscan.models.model_facts import RopeLengths
from headscan.models.token_batches import batches

#: The one id that every vocabulary has; padding changes no number.
_PADDING = 0

#: Cost of one more forward pass, in tokens: on a GPU a short pass takes as long as one of hundreds of tokens.
_PASS_COST = {"cpu": 64, "cuda": 512}

#: Most tokens of one pass on devices where more are slower: on a CPU larger activations exceed its caches.
_PASS_TOKENS = {"cpu": 2048}


def pass_cost(device: str) -> int:
    """Return the cost of one more forward pass on a type of device, in tokens."""
    return _PASS_COST.get(device, max(_PASS_COST.values()))


def pass_tokens(device: str, batch_tokens: int) -> int:
    """Return the tokens of one pass, at most ``batch_tokens``. There are fewer if the type of device is faster with
    fewer.
    """
    return min(batch_tokens, _PASS_TOKENS.get(device, batch_tokens))


@dataclass(frozen=True)
class Batch:
    """Sequences of one batch, in one or several passes.

    Attributes:
        rows: Indices of the sequences.
        width: Padded tokens, N; a half keeps the width of the whole batch, since its hidden states have it.
    """

    rows: tuple[int, ...]
    width: int

    def __len__(self) -> int:
        return len(self.rows)

    @property
    def tokens(self) -> int:
        """Tokens of the pass, padding included."""
        return len(self.rows) * self.width

    def halves(self) -> tuple[Batch, ...]:
        """Return two smaller batches; none for a single sequence."""
        middle = len(self.rows) // 2
        return (Batch(self.rows[:middle], self.width), Batch(self.rows[middle:], self.width)) if middle else ()


def whole_batches(
    lengths: Sequence[int], batch_tokens: int, rope: RopeLengths, *, pass_cost: float = math.inf
) -> list[Batch]:
    """Return `batches` that keep each sequence's own rotary frequencies."""
    groups = [rope.group(tokens) for tokens in lengths]
    found = batches(lengths, batch_tokens, pass_cost=pass_cost, groups=groups)
    return [Batch(tuple(rows), lengths[rows[0]]) for rows in found]


def pad(sequences: Sequence[Sequence[int] | np.ndarray], width: int | None = None) -> tuple[Tensor, Tensor]:
    """Return token ids (B, N), padded on the right, and lengths (B,). The padding goes to ``width``; None pads to the
    longest.
    """
    lengths = torch.tensor([len(sequence) for sequence in sequences])
    ids = torch.full((len(sequences), width or int(lengths.max())), _PADDING, dtype=torch.long)
    for row, sequence in enumerate(sequences):
        ids[row, : len(sequence)] = torch.as_tensor(np.asarray(sequence, dtype=np.int64))
    return ids, lengths
