"""The hard concrete distribution of a gate (arXiv 1712.01312; temperature and stretch of arXiv 1905.09418).

A gate is a stretched and clipped binary concrete variable: exactly 0 or exactly 1 with a probability above 0, and
differentiable in its location ``log_a`` in between.
"""

from __future__ import annotations

from math import log

import numpy as np
import torch
from torch import Tensor

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
    """Return the expectation of gates.

    It is the integral over t from 0 to 1 of the probability that the gate is above t.
    """
    nodes, weights = np.polynomial.legendre.leggauss(_POINTS)
    at = torch.from_numpy((nodes + 1) / 2)
    share = torch.from_numpy(weights / 2)
    above = torch.sigmoid(log_a.double()[..., None] - TEMPERATURE * torch.logit((at - LOW) / (HIGH - LOW)))
    return (above @ share).clamp(0, 1).to(log_a.dtype)
