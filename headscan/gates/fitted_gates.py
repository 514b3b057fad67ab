"""Gates of one site's heads: their distribution, the result of a fit, and classes of heads from two fits.

The hard concrete distribution (arXiv 1712.01312; temperature and stretch of arXiv 1905.09418) is a stretched and
clipped binary concrete variable: exactly 0 or exactly 1 with a probability above 0, and differentiable in its
location ``log_a`` in between.

Shapes: L layers, H query heads of the widest layer.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from math import log
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from headscan.ablation.masks import HeadMask
from headscan.errors import GateError
from headscan.grid import Head

#: Temperature of the concrete variable.
TEMPERATURE = 0.33
#: Ends of the interval to which the concrete variable is stretched before it is clipped to 0 and 1.
LOW, HIGH = -0.1, 1.1

#: Points of the integral over a gate's values.
_POINTS = 64


def sample_gates(log_a: Tensor, noise: Tensor) -> Tensor:
    """Return gates from 0 to 1, differentiable in ``log_a``.

    Args:
        log_a: Locations of the gates.
        noise: Uniform numbers above 0 and below 1; their shape ends with that of ``log_a``.
    """
    concrete = torch.sigmoid((torch.logit(noise) + log_a) / TEMPERATURE)
    return (concrete * (HIGH - LOW) + LOW).clamp(0, 1)


def open_probability(log_a: Tensor) -> Tensor:
    """Return the probability that a gate is above 0, differentiable: sigmoid(log_a - 0.33 ln(0.1 / 1.1))."""
    return torch.sigmoid(log_a - TEMPERATURE * log(-LOW / HIGH))


def expected_gates(log_a: Tensor) -> Tensor:
    """Return the expectation of gates. It is the integral over t from 0 to 1 of the probability that the gate is above
    t.
    """
    nodes, weights = np.polynomial.legendre.leggauss(_POINTS)
    at = torch.from_numpy((nodes + 1) / 2)
    share = torch.from_numpy(weights / 2)
    above = torch.sigmoid(log_a.double()[..., None] - TEMPERATURE * torch.logit((at - LOW) / (HIGH - LOW)))
    return (above @ share).clamp(0, 1).to(log_a.dtype)


#: Class of a head by its gates in two fits (arXiv 2505.13737).
HeadClass = Literal["facilitating", "interfering", "irrelevant", "undecided"]
#: A gate above this value counts as open.
_OPEN = 0.5


@dataclass(frozen=True)
class Gates:
    """Fitted gates of one site.

    Attributes:
        site: ``self``; in encoder-decoders also ``encoder`` and ``cross``.
        log_a: Locations of the gates (L, H), NaN where a layer lacks the head.
        penalty: Penalty per open gate at the end, in nats; negative if it opened gates.
    """

    site: str
    log_a: Tensor
    penalty: float

    @cached_property
    def values(self) -> Tensor:
        """Expected gates (L, H), 0 to 1."""
        return expected_gates(self.log_a)

    @cached_property
    def open_probabilities(self) -> Tensor:
        """Probabilities that gates are above 0 (L, H)."""
        return open_probability(self.log_a)

    @property
    def ranked(self) -> tuple[Head, ...]:
        """All heads, the most closed first; layer and head break ties."""
        return tuple(sorted(self._heads, key=lambda head: (float(self.log_a[head]), head)))

    def closed(self, count: int) -> tuple[Head, ...]:
        """Return the ``count`` most closed heads, sorted by layer."""
        if not 0 <= count <= len(self._heads):
            raise GateError(f"closed heads: {count} (limit 0 to {len(self._heads)}). Change `count`")
        return tuple(sorted(self.ranked[:count]))

    def still_open(self, heads: Iterable[tuple[int, int]]) -> tuple[Head, ...]:
        """Return those of the heads whose gates the fit keeps open, above a half, sorted by layer."""
        return tuple(sorted(Head(*head) for head in heads if self.values[head] > _OPEN))

    def mask(self, *, count: int | None = None, share: float | None = None) -> HeadMask:
        """Return the mask of the most closed heads.

        Args:
            count: Number of heads; None takes a share.
            share: Share of all heads, 0 to 1, rounded to a whole number of heads; None takes a count.
        """
        if (count is None) == (share is None):
            raise GateError(f"count={count} and share={share} (limit one of them). Give exactly one")
        return HeadMask(self.closed(round((share or 0) * len(self._heads)) if count is None else count))

    @cached_property
    def _heads(self) -> tuple[Head, ...]:
        return tuple(Head(layer, head) for layer, head in self.log_a.isfinite().nonzero().tolist())


@dataclass(frozen=True)
class TwoSidedGates:
    """Gates of two fits: one that closes gates, one that opens them.

    Attributes:
        down: Fit with a penalty on open gates.
        up: Fit with the opposite penalty.
    """

    down: Gates
    up: Gates

    def class_of(self, head: tuple[int, int]) -> HeadClass:
        """Return the class of a head. A facilitating head stays open in both fits, an interfering one stays closed, an
        irrelevant one follows the penalty. One that moves against both penalties is undecided.
        """
        open_down, open_up = (bool(gates.values[head] > _OPEN) for gates in (self.down, self.up))
        if open_down == open_up:
            return "facilitating" if open_down else "interfering"
        return "irrelevant" if open_up else "undecided"

    def classes(self) -> dict[Head, HeadClass]:
        """Return the class of every head, layer by layer."""
        return {head: self.class_of(head) for head in sorted(self.down.ranked)}
