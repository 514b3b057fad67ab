from __future__ import annotations

import pytest

from analysis.paired import PairedDifference
from analysis.recall import RecallVerdict


def _verdict(
    family: str, *, baseline: float = 90.0, questions: int = 100, difference: float = 0.0, high: float = 0.0
) -> RecallVerdict:
    paired = PairedDifference(
        questions=questions,
        baseline=baseline,
        arm=baseline + difference,
        difference=difference,
        low=difference - 10,
        high=high,
        gained=0,
        lost=0,
        p_value=1.0,
    )
    return RecallVerdict(family, paired)


@pytest.mark.parametrize(
    ("difference", "high", "failed"),
    [
        (0.0, 2.0, False),
        (-5.0, 2.0, False),  # not below five points, and the interval reaches above
        (-5.1, 2.0, True),
        (-3.0, -1.0, False),
        (-3.0, -1.1, True),
    ],
)
def test_an_arm_fails_by_a_large_loss_or_a_proven_one(difference: float, high: float, failed: bool) -> None:
    assert _verdict("needle", difference=difference, high=high).failed is failed
    assert _verdict("copying", difference=difference, high=high).failed is failed


@pytest.mark.parametrize(
    ("family", "baseline", "questions", "informative"),
    [
        # Wilson's lower ends: 39 of 100 0.3002, 38 of 100 0.291, 330 of 1000 0.3016, 4 of 10 0.168.
        ("needle", 39.0, 100, True),
        ("needle", 38.0, 100, False),
        ("needle", 40.0, 10, False),
        ("needle", 33.0, 1000, True),
        ("needle", 25.0, 10_000, False),
        ("copying", 10.0, 10, True),
        ("copying", 9.9, 10_000, False),
    ],
)
def test_a_baseline_at_chance_tells_nothing(family: str, baseline: float, questions: int, informative: bool) -> None:
    verdict = _verdict(family, baseline=baseline, questions=questions, difference=-9.0, high=-8.0)
    assert (verdict.informative, verdict.failed) == (informative, informative)


def test_points_are_signed() -> None:
    assert _verdict("needle", difference=-31.96).points() == "needle (-32.0 points)"
    assert _verdict("copying").points() == "copying (+0.0 points)"
