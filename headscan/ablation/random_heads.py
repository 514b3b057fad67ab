"""Random heads: the control of a rule, drawn for every sequence.

Shapes: B sequences, N tokens, L layers, H query heads, D width of a head's output.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from headscan.ablation.ablation import Ablation
from headscan.ablation.record import InterventionRecord
from headscan.ablation.replacements import ZERO, Filler, Replacement
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
        replacement: What takes the place of a head's output: zero, `HeadMeans` or `HeadSamples`.

    Raises:
        InterventionError: ``share`` or ``seed`` is out of range.
    """

    share: float
    seed: int = 0
    replacement: Replacement = ZERO

    def __post_init__(self) -> None:
        if not 0 <= self.share <= 1:
            raise InterventionError(f"share of random heads: {self.share} (limits 0 and 1). Set `share` within them")
        if self.seed < 0:
            raise InterventionError(f"seed of random heads: {self.seed} (limit 0). Set `seed` to 0 or more")

    @property
    def label(self) -> str:
        return "random heads"

    @property
    def replaces_by(self) -> Replacement:
        return self.replacement

    def draw(self, key: int, shape: tuple[int, int]) -> Tensor:
        """Return the ablated heads of the sequence with this key: bool (L, H)."""
        return torch.from_numpy(np.random.default_rng([self.seed, key]).random(shape) < self.share)

    @contextmanager
    def hooks(self, lm: LoadedModel, record: InterventionRecord) -> Iterator[None]:
        hook = _RandomHook(lm, self, record)
        with self.replacement.watching(lm), output_hook(lm, hook):
            yield


class _RandomHook:
    """Draws the heads of all layers of a sequence when its first layer runs."""

    def __init__(self, lm: LoadedModel, what: RandomHeads, record: InterventionRecord) -> None:
        what.check_values(lm.grid)
        self.shape, self.what, self.record = lm.grid.shape, what, record
        self._fill = Filler(what.replacement, record)
        self._keys: list[int] = []
        self._drawn_BLH = torch.empty(0, *self.shape)

    def __call__(self, site: AttentionSite, heads_BNHD: Tensor) -> Tensor:
        keys = self.record.keys_of(len(heads_BNHD))
        if keys != self._keys:
            self._drawn_BLH = torch.stack([self.what.draw(key, self.shape) for key in keys])
            self._keys = keys
        zeroed_BH = self._drawn_BLH[:, site.layer, : site.num_attention_heads]
        self.record.note(site, zeroed_BH)
        return self._fill(site, heads_BNHD, zeroed_BH)
