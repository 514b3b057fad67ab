"""The false discovery rate, by simulation and by the textbook's loop."""

from __future__ import annotations

import numpy as np
import pytest
from scipy import stats

from headscan.analysis.effects.head_effects import HeadEffect
from headscan.analysis.effects.paired_effects import Outcomes, each_effect, q_values
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
    heads, null, rows, tables = 40, 30, 120, 20 if metric == ACCURACY else 30
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


#: Differences of a document with mean 0 and variance 1: symmetric ones, and a harm of few documents (skew 6).
DRAWS = {
    "normal": lambda rng, shape: rng.normal(size=shape),
    "heavy tails": lambda rng, shape: rng.standard_t(5, shape) * np.sqrt(3 / 5),
    "skew 6": lambda rng, shape: 3 * rng.gamma(1 / 9, 1, shape) - 1 / 3,
    "lognormal": lambda rng, shape: (np.exp(rng.normal(size=shape)) - np.exp(0.5)) / np.sqrt(np.e * (np.e - 1)),
}


@pytest.mark.parametrize(("documents", "effect", "tables"), [(8, 2.0, 40), (24, 1.0, 40), (100, 0.5, 20)])
@pytest.mark.parametrize("kind", list(DRAWS))
def test_few_discoveries_are_null_heads_of_skewed_losses(kind: str, documents: int, effect: float, tables: int) -> None:
    """40 heads, 30 without any effect. If few documents have the harm, Student's t finds that ablation helps."""
    rng = np.random.default_rng(2)
    heads, null = 40, 30
    names = [f"d{n}" for n in range(documents)]
    base = Outcomes.of(LOSS, np.zeros(documents), np.ones(documents), ["t"] * documents, names)
    shares, powers, of_t, helped = [], [], [], 0
    for _ in range(tables):
        arms = DRAWS[kind](rng, (heads, documents))
        arms[null:] += effect
        rows = each_effect(base, {str(head): arm for head, arm in enumerate(arms)})
        found = np.array([_head(row.effect.effect, row.q_value, row.confirmed).significant for row in rows.values()])
        shares.append(found[:null].sum() / max(1, found.sum()))
        helped += (found & (arms.mean(axis=1) < 0)).sum()
        powers.append(found[null:].mean())
        by_t = q_values(stats.ttest_1samp(arms, 0, axis=1).pvalue) <= FALSE_DISCOVERY_RATE
        of_t.append((by_t[:null].sum() / max(1, by_t.sum()), by_t[null:].mean()))
    false_of_t, power_of_t = np.mean(of_t, axis=0)
    assert np.mean(shares) <= FALSE_DISCOVERY_RATE + 2 * np.std(shares) / np.sqrt(tables)
    assert helped <= 0.2 * tables
    assert np.mean(powers) > 0.5 and np.mean(powers) > power_of_t - (0.2 if documents < 20 else 0.1)
    assert (false_of_t > 0.1) == (kind in ("skew 6", "lognormal"))


def _head(effect: float, q_value: float, confirmed: bool | None) -> HeadEffect:
    numbers = {"standard_error": 1.0, "low": None, "high": None, "p_value": 1.0, "n": 8}
    return HeadEffect(
        "each", "self", 0, 0, 0, "zero", LOSS, 3.0, effect, q_value=q_value, confirmed=confirmed, **numbers
    )


def test_an_unconfirmed_help_by_loss_is_not_significant() -> None:
    for confirmed, helps in ((True, True), (False, False), (None, False)):
        assert _head(-0.1, 0.01, confirmed).significant == helps
        assert _head(0.1, 0.01, confirmed).significant
        assert not _head(0.1, 0.06, confirmed).significant
