"""The record of an intervention: ablated heads of the last pass, and inputs for the next one.

Shapes: B sequences, L layers, H query heads.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from headscan.errors import InterventionError
from headscan.grid import AttentionSite
from headscan.models.loaded_model import LoadedModel


class InterventionRecord:
    """Heads that an intervention ablated, and the lengths and keys of the next batch.

    Attributes:
        lengths: Real tokens (B,) of the next forward pass. A rule reads them; set them again when the batch changes.
            None takes them from the padding mask of the pass; without a mask all tokens are real.
        keys: Integers (B,) of 0 or more that seed random heads and samples of each sequence of the next forward pass; a
            sequence keeps its key in every batch. Set them again when the batch changes. None uses the row numbers.
    """

    def __init__(
        self,
        lm: LoadedModel,
        lengths: Tensor | Sequence[int] | None,
        keys: Tensor | Sequence[int] | None = None,
    ) -> None:
        self.lengths = None if lengths is None else torch.as_tensor(lengths)
        self.keys = keys
        self._shape = lm.grid.shape
        self._zeroed: dict[int, Tensor] = {}
        self._rows = 0
        self._heads = lm.grid.total_heads

    @property
    def zeroed(self) -> Tensor | None:
        """Heads ablated in the last forward pass: bool (B, L, H), False where a layer lacks the head. None before the
        first pass. A mask ablates the same heads in all sequences.
        """
        if not self._zeroed:
            return None
        zeroed_BLH = torch.zeros(self._rows, *self._shape, dtype=torch.bool)
        for layer, zeroed_BH in self._zeroed.items():
            zeroed_BLH[:, layer, : zeroed_BH.shape[1]] = zeroed_BH.cpu()
        return zeroed_BLH

    @property
    def zeroed_shares(self) -> Tensor:
        """Share of heads ablated in each sequence of the last forward pass, 0 to 1: (B,).

        Raises:
            InterventionError: No forward pass has run.
        """
        if (zeroed_BLH := self.zeroed) is None:
            raise InterventionError("no forward pass has run yet. Run the model inside the context first")
        return zeroed_BLH.sum((1, 2)).double() / self._heads

    @property
    def zeroed_share(self) -> float:
        """Share of (sequence, head) pairs ablated in the last forward pass, 0 to 1."""
        return float(self.zeroed_shares.mean())

    def keys_of(self, sequences: int) -> list[int]:
        """Return the keys of a batch.

        Raises:
            InterventionError: `keys` do not fit the batch.
        """
        if self.keys is None:
            return list(range(sequences))
        keys = self.keys.tolist() if isinstance(self.keys, Tensor) else [int(key) for key in self.keys]
        if len(keys) != sequences or min(keys) < 0:
            raise InterventionError(
                f"keys {keys[:8]} do not fit a batch of {sequences} sequences. Set `keys` (or record.keys) to one "
                "integer of 0 or more per sequence"
            )
        return keys

    def note(self, site: AttentionSite, zeroed_BH: Tensor) -> None:
        """Record the ablated heads of one layer. The tensor stays on its device until it is read: a copy from the GPU
        would block the pass at every layer.
        """
        # A pass may start above the first layer, but never returns to a lower one.
        if self._zeroed and (site.layer <= max(self._zeroed) or len(zeroed_BH) != self._rows):
            self._zeroed = {}
        self._rows = len(zeroed_BH)
        self._zeroed[site.layer] = zeroed_BH
