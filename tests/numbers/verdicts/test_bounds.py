"""The bound of every interval, against drawn bootstrap means and Clopper and Pearson's interval."""

from __future__ import annotations

import numpy as np
import pytest
from scipy.stats import binomtest

from headscan.store.verdict_limits import TAIL
from headscan.verdicts.bounds import LEVELS, end_for, mean_ends


def plain_ends(changes: np.ndarray, clusters: np.ndarray, tail: float = TAIL) -> tuple[float, float]:
    """Return the ends of the mean of changes (questions,) by clusters, as they are defined: quantiles of means with
    drawn exponential weights, and one more cluster as large as the largest, of -1 or 1.
    """
    distinct = np.unique(clusters)
    sums = np.array([[changes[clusters == each].sum(), (clusters == each).sum()] for each in distinct])
    mean, size = changes.mean(), sums[:, 1].mean()
    values = mean + (sums[:, 0] - mean * sums[:, 1]) / size
    weights = np.random.default_rng(0).standard_exponential((20_000, len(values) + 1))
    weights /= weights.sum(1, keepdims=True)
    added = mean + sums[:, 1].max() / size * (np.array([-1.0, 1.0]) - mean)
    ends = zip(added, (tail, 1 - tail), strict=True)
    low, high = (np.quantile(weights @ np.append(values, end), at) for end, at in ends)
    return max(-1.0, float(low)), min(1.0, float(high))


@pytest.mark.parametrize("numbers", [6, 64, 750])
@pytest.mark.parametrize("kind", ["few lost", "both", "jitter", "jitter and losses", "skewed"])
def test_the_ends_are_those_of_drawn_means(numbers: int, kind: str) -> None:
    rng = np.random.default_rng(numbers)
    few = max(1, numbers // 50)
    values = {
        "few lost": -1.0 * (np.arange(numbers) < few),
        "both": 1.0 * (np.arange(numbers) < few) - (np.arange(numbers) >= numbers - few),
        "jitter": rng.uniform(-0.1, 0.1, numbers),
        "jitter and losses": np.where(np.arange(numbers) < few, -0.6, rng.uniform(-0.02, 0.02, numbers)),
        "skewed": -np.minimum(1.0, 0.02 * rng.lognormal(size=numbers)),
    }[kind]
    lows, highs = mean_ends(values, -1.0, 1.0)
    for place, level in ((0, 1), (2, 3)):
        low, high = plain_ends(values, np.arange(numbers), TAIL / level)
        assert (lows[place], highs[place]) == pytest.approx((low, high), abs=0.02 * (high - low))
    assert (np.diff(lows) < 0).all() and (np.diff(highs) > 0).all()


def test_of_zeros_and_ones_the_ends_are_clopper_and_pearsons() -> None:
    for right in (0, 1, 5, 40):
        values = 1.0 * (np.arange(40) < right)
        (low,), (high,) = mean_ends(values, 0.0, 1.0, comparisons=1)
        expected = binomtest(right, 40).proportion_ci(0.95, method="exact")
        assert (low, high) == pytest.approx((expected.low, expected.high), abs=0.003)


def test_ends_of_other_numbers_of_comparisons_lie_between_and_are_hardly_too_wide() -> None:
    values = np.repeat([-1.0, 0.0, 1.0], [12, 380, 8])
    lows, highs = mean_ends(values, -1.0, 1.0)
    assert [end_for(lows, level) for level in LEVELS] == pytest.approx(lows)
    for comparisons in (4, 7, 57, 2000):
        (low,), (high,) = mean_ends(values, -1.0, 1.0, comparisons)
        found = end_for(lows, comparisons), end_for(highs, comparisons)
        assert found == pytest.approx((low, high), rel=0.01)
        assert found[0] <= low + 1e-4 and found[1] >= high - 1e-4


def test_equal_numbers_differ_from_the_added_one_alone() -> None:
    assert mean_ends(np.full(8, 0.3), 0.3, 0.3).ravel() == pytest.approx(np.full(2 * len(LEVELS), 0.3))
    (low,), (high,) = mean_ends(np.zeros(100), -1.0, 0.5, comparisons=1)
    assert (low, high) == pytest.approx((-(1 - TAIL**0.01), 0.5 * (1 - TAIL**0.01)))


def test_large_samples_have_ends_at_every_level() -> None:
    values = np.random.default_rng(0).normal(0, 0.1, 100_000).clip(-1, 1)
    lows, _ = mean_ends(values, -1.0, 1.0)
    error = values.std() / len(values) ** 0.5
    assert lows[[0, 4]] == pytest.approx(values.mean() - np.array([1.96, 2.807]) * error, abs=0.2 * error)
