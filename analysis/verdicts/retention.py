"""Share of a model's recall that an arm retains, with its interval.

Recall is counted above chance: a model that guesses is right on a quarter of the needles and cannot lose recall.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from headscan.analysis.verdict_limits import TAIL

#: Accuracy of guessing in percent, by family: needles have four choices, copied tokens a whole vocabulary.
CHANCE = {"needle": 25.0, "copying": 0.0}

#: Shares are clipped to these limits in percent, because a model near chance would make them unbounded.
_LOWEST, _HIGHEST = -100.0, 200.0

_DRAWS = 4000


@dataclass(frozen=True)
class Retained:
    """Share of the baseline's ability that an arm retains, in percent.

    Ability is accuracy above chance.

    Attributes:
        share: Estimate; above 100 if the arm recalls more than the baseline.
        low: Lower end of its 95 % interval, at least -100.
        high: Upper end, at most 200.
    """

    share: float
    low: float
    high: float


def retained(baseline: np.ndarray, arm: np.ndarray, texts: np.ndarray, chance: float, *, seed: int = 0) -> Retained:
    """Return the share of ability above chance that an arm retains.

    The interval is a Bayesian bootstrap of whole texts with one added text: the worst possible for the lower end, the
    best possible for the upper end (Gaffke's bound; arXiv 1905.06208). Identical answers to few questions therefore
    give a wide interval, for any correlation within texts. If each text is retained or lost as a whole, the result is
    Clopper and Pearson's interval. The lower end is at most that of identical answers: gained answers do not show that
    others are kept.

    Args:
        baseline: (questions,) 0 to 1 per question.
        arm: (questions,) the same questions in the same order.
        texts: (questions,) the text of each question.
        chance: Accuracy of guessing in percent.
    """
    text = np.unique(texts, return_inverse=True)[1]
    sizes = np.bincount(text)
    # (2, texts): accuracy of the baseline and of the arm in each text, above chance.
    ability = np.stack([np.bincount(text, answers) / sizes for answers in (baseline, arm)]) - chance / 100
    weights = np.random.default_rng(seed).standard_exponential((_DRAWS, len(sizes) + 1))
    known, unknown = weights[:, 1:] @ ability.T, weights[:, :1]
    worst, best = np.array([1.0, 0.0]) - chance / 100, np.array([0.0, 1.0]) - chance / 100
    lows, highs = _shares(known + unknown * worst, _LOWEST), _shares(known + unknown * best, _HIGHEST)
    identical = _shares(known[:, [0, 0]] + unknown * worst, _LOWEST)
    return Retained(
        share=float(_shares(ability.mean(axis=1)[None], _HIGHEST)[0]),
        low=float(min(np.quantile(lows, TAIL), np.quantile(identical, TAIL))),
        high=float(np.quantile(highs, 1 - TAIL)),
    )


def _shares(ability: np.ndarray, without: float) -> np.ndarray:
    """Return the arm's share of the baseline's ability, in percent.

    It is ``without`` if the baseline has none.

    Args:
        ability: (draws, 2) of the baseline and of the arm.
    """
    baseline, arm = ability.T
    able = baseline > 0
    shares = np.full(len(ability), without)
    shares[able] = np.clip(100 * arm[able] / baseline[able], _LOWEST, _HIGHEST)
    return shares
