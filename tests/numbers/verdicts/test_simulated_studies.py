"""Whole studies err as rarely as promised, and show what they can: few runs of some cases, and many of all (slow)."""

from __future__ import annotations

import pytest

from tests.numbers.verdicts.simulated_studies import CASES, error_and_power


@pytest.mark.parametrize(
    ("case", "size", "kinds", "error", "power"),
    [
        ("partial credit, jitter 0.02", 400, 1, 2.5, 75),
        ("partial credit, jitter 0.02", 750, 3, 2.5, 90),
        ("their probabilities", 750, 3, 2.5, 60),
        ("rises, lognormal 1", 20, 3, 2.5, 70),
        ("rises, lognormal 1.5", 48, 1, 2.5, 60),
    ],
)
def test_few_studies_err_and_harmless_kinds_are_shown(
    case: str, size: int, kinds: int, error: float, power: float
) -> None:
    """Of 40 studies two may err, where the intervals of Student's t and of a bootstrap let up to six do."""
    erred, shown = error_and_power(CASES[case][0], size, kinds, 40)
    assert erred <= error + 2.5 and shown >= power


@pytest.mark.slow
@pytest.mark.parametrize("kinds", [1, 3])
@pytest.mark.parametrize("case", CASES)
def test_studies_err_as_rarely_as_promised(case: str, kinds: int) -> None:
    """With few documents, or few texts of very skewed rises, more err, as the documentation says."""
    known = {"8 documents": 25.0, "40 documents": 4.0, "rises, lognormal 1.5": 5.0}
    for size in CASES[case][1]:
        erred, _ = error_and_power(CASES[case][0], size, kinds, 300)
        assert erred <= known.get(case, 2.5) + 1.8, size
