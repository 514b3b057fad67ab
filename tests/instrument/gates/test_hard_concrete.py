"""Samples, probabilities and expectations of gates agree with each other and with finite differences."""

from __future__ import annotations

import math

import pytest
import torch

from headscan.gates.fit_gates import expected_gates, open_probability, sample_gates

LOCATIONS = torch.tensor([-3.0, -1.0, 0.0, 0.7, 2.5], dtype=torch.float64)
SAMPLES = 200_000


def noise() -> torch.Tensor:
    # Midpoints of equal intervals: the mean over them is an integral over the uniform distribution.
    return ((torch.arange(SAMPLES, dtype=torch.float64) + 0.5) / SAMPLES)[:, None].expand(-1, len(LOCATIONS))


def test_probability_and_expectation_equal_those_of_samples() -> None:
    samples = sample_gates(LOCATIONS, noise())
    assert ((samples > 0).double().mean(0) - open_probability(LOCATIONS)).abs().max() < 1e-4
    assert (samples.mean(0) - expected_gates(LOCATIONS)).abs().max() < 1e-4
    assert samples.min() == 0 and samples.max() == 1


def test_probability_is_the_papers_formula() -> None:
    expected = [1 / (1 + math.exp(-(a - 0.33 * math.log(0.1 / 1.1)))) for a in LOCATIONS.tolist()]
    assert open_probability(LOCATIONS).tolist() == pytest.approx(expected, abs=1e-12)


def test_derivatives_equal_finite_differences() -> None:
    some = torch.tensor([[0.2, 0.6, 0.45, 0.3, 0.05]], dtype=torch.float64)
    locations = LOCATIONS.clone().requires_grad_()
    with torch.enable_grad():
        assert torch.autograd.gradcheck(lambda a: sample_gates(a, some), locations)
        assert torch.autograd.gradcheck(open_probability, locations)
