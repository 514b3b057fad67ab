"""What an intervention has done, and what it has to be told of the batch to come.

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
    """What an intervention did.

    Attributes:
        lengths: Real tokens (B,) of the next forward pass. A rule reads them; set them again when the batch changes.
            None takes them from the padding mask of the pass; without a mask all tokens are real.
        keys: A whole number, not negative, for each sequence (B,) of the next forward pass, the same wherever that
            sequence runs; None: the row numbers. Random heads are drawn by them; set them again when the batch changes.
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
        """Which heads were ablated in the last forward pass: bool (B, L, H), False where a layer lacks the head.

        None before the first pass. A mask's is the same for all sequences.
        """
        if not self._zeroed:
            return None
        zeroed_BLH = torch.zeros(self._rows, *self._shape, dtype=torch.bool)
        for layer, zeroed_BH in self._zeroed.items():
            zeroed_BLH[:, layer, : zeroed_BH.shape[1]] = zeroed_BH.cpu()
        return zeroed_BLH

    @property
    def zeroed_shares(self) -> Tensor:
        """Share of its heads that were ablated in each sequence of the last forward pass: (B,).

        Raises:
            InterventionError: There was none.
        """
        if (zeroed_BLH := self.zeroed) is None:
            raise InterventionError("no forward pass has run yet: run the model inside the context first")
        return zeroed_BLH.sum((1, 2)).double() / self._heads

    @property
    def zeroed_share(self) -> float:
        """Share of all (sequence, head) pairs that were ablated in the last forward pass."""
        return float(self.zeroed_shares.mean())

    def note(self, site: AttentionSite, zeroed_BH: Tensor) -> None:
        """Write down what was ablated in one layer.

        It stays where it is until somebody asks: a copy from the GPU would make the pass wait at every layer.
        """
        # A pass need not begin at the first layer, but it never goes back to a lower one.
        if self._zeroed and (site.layer <= max(self._zeroed) or len(zeroed_BH) != self._rows):
            self._zeroed = {}
        self._rows = len(zeroed_BH)
        self._zeroed[site.layer] = zeroed_BH
