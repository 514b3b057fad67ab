"""The false discovery rate of many tests."""

from __future__ import annotations

import numpy as np


def q_values(p_values: np.ndarray) -> np.ndarray:
    """Return the p-values (tests,) adjusted by Benjamini and Hochberg (1995).

    Among the tests with a q-value of at most q, the expected share of true null hypotheses is at most q, if the tests
    are independent or positively dependent.
    """
    from scipy.stats import false_discovery_control  # slow to import, and stored effects are read without it

    return np.asarray(false_discovery_control(p_values)) if len(p_values) else np.empty(0)
