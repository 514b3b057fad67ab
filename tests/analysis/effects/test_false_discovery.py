"""The false discovery rate, by simulation and by the textbook's loop."""

from __future__ import annotations

import numpy as np
import pytest

from headscan.analysis.effects.false_discovery import q_values
from headscan.analysis.effects.paired_effects import Outcomes, each_effect
from headscan.analysis.schema.effect_tables import ACCURACY, FALSE_DISCOVERY_RATE, LOSS


def by_hand(p_values: list[float], level: float) -> list[bool]:
    """The step-up procedure: the largest k whose k-th smallest p-value is at most k / m times the level."""
    count = len(p_values)
    passing = [k for k in range(1, count + 1) if sorted(p_values)[k - 1] <= k / count * level]
    limit = sorted(p_values)[max(passing) - 1] if passing else -1.0
    return [p <= limit for p in p_values]


def test_q_values_decide_as_the_step_up_procedure() -> None:
    rng = np.random.default_rng(0)
    for _ in range(200):
        p_values = rng.random(int(rng.integers(1, 12))) ** rng.integers(1, 5)
        for level in (0.01, 0.05, 0.3):
            assert (q_values(p_values) <= level).tolist() == by_hand(p_values.tolist(), level)
    assert q_values(np.array([])).tolist() == []


@pytest.mark.parametrize("metric", [ACCURACY, LOSS])
def test_few_discoveries_are_null_heads(metric: str) -> None:
    """40 heads, 30 of them without any effect: the mean share of these among the discoveries is at most 5 %."""
    rng = np.random.default_rng(1)
    heads, null, rows, tables = 40, 30, 120, 20 if metric == ACCURACY else 60
    shares, powers = [], []
    for _ in range(tables):
        if metric == ACCURACY:
            baseline = (rng.random(rows) < 0.7).astype(float)
            # The ability of a null head is equal, but its answers differ.
            flips = [
                rng.permutation(baseline) if h < null else baseline * (rng.random(rows) < 0.75) for h in range(heads)
            ]
            arms = {
                str(h): np.where(rng.random(rows) < 0.3, flips[h], baseline) if h < null else flips[h]
                for h in range(heads)
            }
            sizes = np.ones(rows)
        else:
            sizes = rng.integers(20, 200, rows).astype(float)
            baseline = 3 * sizes + rng.normal(size=rows) * np.sqrt(sizes)
            arms = {
                str(h): baseline + sizes * ((0.03 if h >= null else 0.0) + 0.05 * rng.standard_t(5, rows))
                for h in range(heads)
            }
        outcomes = Outcomes.of(metric, baseline, sizes, ["t"] * rows, [f"d{n}" for n in range(rows)])
        found = [int(h) for h, row in each_effect(outcomes, arms).items() if row.q_value <= FALSE_DISCOVERY_RATE]
        shares.append(sum(h < null for h in found) / max(1, len(found)))
        powers.append(sum(h >= null for h in found) / (heads - null))
    assert np.mean(shares) <= FALSE_DISCOVERY_RATE + 2 * np.std(shares) / np.sqrt(tables)
    assert np.mean(powers) > 0.5  # a test that finds nothing would pass the line above
