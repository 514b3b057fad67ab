"""Random heads: the control of a rule, drawn for every sequence.

Shapes: B sequences, N tokens, L layers, H query heads, D width of a head's output.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from headscan.ablation.ablation import Ablation
from headscan.ablation.record import InterventionRecord
from headscan.attention.hooks import output_hook
from headscan.errors import InterventionError
from headscan.grid import AttentionSite
from headscan.models.loaded_model import LoadedModel


@dataclass(frozen=True)
class RandomHeads(Ablation):
    """Ablates each head of each sequence with the same probability: the control of a rule.

    The heads depend on the seed and the sequence's key only, not on the batch. With one seed, the heads of a smaller
    share are a subset of those of a larger one.

    Attributes:
        share: The probability, 0 to 1.
        seed: Integer, at least 0.

    Raises:
        InterventionError: ``share`` or ``seed`` is out of range.
    """

    share: float
    seed: int = 0

    def __post_init__(self) -> None:
        if not 0 <= self.share <= 1:
            raise InterventionError(f"share of random heads: {self.share} (limits 0 and 1). Set `share` within them")
        if self.seed < 0:
            raise InterventionError(f"seed of random heads: {self.seed} (limit 0). Set `seed` to 0 or more")

    @property
    def label(self) -> str:
        return "random heads"

    def draw(self, key: int, shape: tuple[int, int]) -> Tensor:
        """Return the ablated heads of the sequence with this key: bool (L, H)."""
        return torch.from_numpy(np.random.default_rng([self.seed, key]).random(shape) < self.share)

    def hooks(self, lm: LoadedModel, record: InterventionRecord) -> AbstractContextManager[object]:
        return output_hook(lm, _RandomHook(lm, self, record))


class _RandomHook:
    """Draws the heads of all layers of a sequence when its first layer runs."""

    def __init__(self, lm: LoadedModel, what: RandomHeads, record: InterventionRecord) -> None:
        self.shape, self.what, self.record = lm.grid.shape, what, record
        self._keys: list[int] = []
        self._drawn_BLH = torch.empty(0, *self.shape)

    def __call__(self, site: AttentionSite, heads_BNHD: Tensor) -> Tensor:
        keys = self._keys_of(len(heads_BNHD))
        if keys != self._keys:
            self._drawn_BLH = torch.stack([self.what.draw(key, self.shape) for key in keys])
            self._keys = keys
        zeroed_BH = self._drawn_BLH[:, site.layer, : site.num_attention_heads]
        self.record.note(site, zeroed_BH)
        return heads_BNHD.masked_fill(zeroed_BH.to(heads_BNHD.device)[:, None, :, None], 0.0)

    def _keys_of(self, sequences: int) -> list[int]:
        keys = self.record.keys
        if keys is None:
            return list(range(sequences))
        keys = keys.tolist() if isinstance(keys, Tensor) else [int(key) for key in keys]
        if len(keys) != sequences or min(keys) < 0:
            raise InterventionError(
                f"keys {keys[:8]} do not fit a batch of {sequences} sequences. Set `keys` (or record.keys) to one "
                "integer of 0 or more per sequence"
            )
        return keys
