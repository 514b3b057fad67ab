"""Effects on corpus BLEU, by a paired bootstrap over sentences (arXiv 1905.10650; Koehn 2004).

A sentence has ten counts: matches and n-grams of orders 1 to 4, and the lengths of the output and of the reference.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from statistics import NormalDist

import numpy as np

from headscan.analysis.effects.paired_effects import Effect, Outcomes
from headscan.analysis.verdict_limits import TAIL

#: Counts of a sentence.
COUNTS = 10
#: Resamples of the bootstrap.
RESAMPLES = 1000


def bleu(counts: np.ndarray) -> np.ndarray:
    """Return BLEU, 0 to 100, of summed counts (..., 10); orders without a match are smoothed as in sacrebleu.

    The smoothing is exponential: the k-th order without a match counts as 1 / 2^k matches.
    """
    matches, grams = counts[..., :4].astype(float), counts[..., 4:8].astype(float)
    empty = (matches == 0) & (grams > 0)
    smoothed = np.where(empty, 0.5 ** np.cumsum(empty, -1), matches)
    with np.errstate(divide="ignore", invalid="ignore"):
        precision = np.log(np.where(grams > 0, smoothed / grams, 0)).mean(-1)
        brevity = np.minimum(0, 1 - counts[..., 9] / counts[..., 8])
        score = 100 * np.exp(precision + brevity)
    # Without any matching word, or without 4-grams in the whole output, BLEU is 0.
    usable = (counts[..., 8] > 0) & (matches.sum(-1) > 0) & (grams > 0).all(-1)
    return np.where(usable, score, 0.0)


@dataclass(frozen=True)
class BleuOutcomes(Outcomes):
    """Outputs of a baseline, as counts of sentences (rows, 10), and what pairs them with those of other arms."""

    @property
    def better(self) -> int:
        return 1

    def effect(self, arm: np.ndarray, rows: np.ndarray | None = None) -> Effect:
        kept = self._kept(rows)
        base, own = (_by_document(counts[kept], self.documents[kept]) for counts in (self.baseline, arm))
        level = float(bleu(base.sum(0)))
        effect = float(bleu(own.sum(0))) - level
        sentences = int(kept.sum())
        if len(base) < 2:
            return Effect(level, effect, np.inf, -np.inf, np.inf, 1.0, sentences)
        if np.array_equal(base, own):
            return Effect(level, 0.0, 0.0, 0.0, 0.0, 1.0, sentences)
        drawn = _weights(len(base))
        changes = bleu(drawn @ own) - bleu(drawn @ base)
        from scipy.special import stdtr, stdtrit  # slow to import, and stored effects are read without it

        freedom, error = len(base) - 1, float(changes.std(ddof=1))
        quantile = float(stdtrit(freedom, 1 - TAIL))
        # With few sentences a percentile is too near: the ends move out by the ratio of the t to the normal quantile.
        low, high = effect + quantile / NormalDist().inv_cdf(1 - TAIL) * (
            np.quantile(changes, [TAIL, 1 - TAIL]) - effect
        )
        low, high = min(low, effect - quantile * error), max(high, effect + quantile * error)
        # Counted resamples cannot give the small p-values that a correction over hundreds of heads needs.
        p_value = 2 * float(stdtr(freedom, -abs(effect) / error)) if error else 1.0
        return Effect(level, effect, error, float(low), float(high), p_value, sentences)

    def change(self, arm: np.ndarray, rows: np.ndarray | None = None) -> float:
        kept = self._kept(rows)
        return float(bleu(arm[kept].sum(0)) - bleu(self.baseline[kept].sum(0)))


def _by_document(counts: np.ndarray, documents: np.ndarray) -> np.ndarray:
    """Return the counts of each document (documents, 10); equal sentences are one."""
    number = np.unique(documents, return_inverse=True)[1]
    total = np.zeros((number.max() + 1, COUNTS))
    np.add.at(total, number, counts)
    return total


def _weights(documents: int) -> np.ndarray:
    """Return how often each resample draws each document (resamples, documents), the same for all arms.

    Each draws one document fewer than there are, because drawing all would make the variance too small (Rao and Wu
    1988).
    """
    seed = int.from_bytes(hashlib.sha256(f"bleu {documents}".encode()).digest()[:8], "little")
    even = np.full(documents, 1 / documents)
    return np.random.default_rng(seed).multinomial(documents - 1, even, size=RESAMPLES).astype(float)
