"""The texts on which heads are chosen and projections repaired.

Shapes: B sequences, N tokens (padded on the right).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from headscan.errors import SequenceError
from headscan.models.token_means import real_tokens


@dataclass(frozen=True)
class Batch:
    """Sequences of one forward pass.

    Attributes:
        ids: Token ids (B, N), padded on the right.
        lengths: Real tokens of each sequence (B,).
    """

    ids: Tensor
    lengths: Tensor

    @property
    def real_BN(self) -> Tensor:
        """The real tokens, bool (B, N)."""
        return real_tokens(self.lengths, self.ids.shape[1])

    def by_token(self, values: Tensor) -> Tensor:
        """Return values as (B, N, ...), also from modules that are called with flat tokens."""
        return values.reshape(*self.ids.shape, -1)


@dataclass(frozen=True)
class Calibration:
    """Token ids of texts, at most a few thousand tokens in each pass.

    Attributes:
        ids: Token ids (B, N), padded on the right.
        lengths: Real tokens of each sequence (B,).
        batch_tokens: Tokens of one forward pass, padding included.

    Raises:
        SequenceError: Shapes do not fit, there is no sequence, or one has fewer than two tokens.
    """

    ids: Tensor
    lengths: Tensor
    batch_tokens: int = 8192

    def __post_init__(self) -> None:
        if self.ids.ndim != 2 or self.lengths.shape != self.ids.shape[:1]:
            raise SequenceError(
                f"shapes do not fit: ids {tuple(self.ids.shape)}, lengths {tuple(self.lengths.shape)}. Pass ids (B, N) "
                "and lengths (B,)"
            )
        if not len(self.ids) or int(self.lengths.min()) < 2 or int(self.lengths.max()) > self.ids.shape[1]:
            raise SequenceError(
                f"{len(self.ids)} calibration sequences with lengths outside 2 to {self.ids.shape[1]}. Pass at least "
                "one, each with two tokens or more"
            )

    @property
    def tokens(self) -> int:
        """Real tokens of all sequences."""
        return int(self.lengths.sum())

    def first(self, tokens: int) -> Calibration:
        """Return the first sequences with at least so many tokens together; all if they have fewer."""
        count = int((self.lengths.cumsum(0) < tokens).sum()) + 1
        return Calibration(self.ids[:count], self.lengths[:count], self.batch_tokens)

    def split(self, tokens: int) -> tuple[Calibration, Calibration]:
        """Return the last sequences with at least so many tokens together, after all others.

        The others are one sequence or more; a single sequence is both parts.
        """
        count = int((self.lengths.flip(0).cumsum(0) < tokens).sum()) + 1
        at = max(1, len(self.ids) - count) if len(self.ids) > 1 else 0
        others = slice(0, at or None)
        return (
            Calibration(self.ids[others], self.lengths[others], self.batch_tokens),
            Calibration(self.ids[at:], self.lengths[at:], self.batch_tokens),
        )

    def batches(self, device: torch.device) -> Iterator[Batch]:
        """Yield the batches, each cut to its longest sequence."""
        rows = max(1, self.batch_tokens // self.ids.shape[1])
        for start in range(0, len(self.ids), rows):
            lengths = self.lengths[start : start + rows]
            ids = self.ids[start : start + rows, : int(lengths.max())]
            yield Batch(ids.to(device), lengths.to(device))
