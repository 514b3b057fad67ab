"""Effects of ablated heads on one metric, paired by question or document, and their false discovery rate."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import inf
from typing import NamedTuple

import numpy as np

from headscan.analysis.store.arm_tables import ACCURACY, FALSE_DISCOVERY_RATE
from headscan.analysis.store.verdict_limits import TAIL
from headscan.analysis.verdicts.measures import ratio_with_error, studentised
from headscan.analysis.verdicts.paired import Interval, compare


def q_values(p_values: np.ndarray) -> np.ndarray:
    """Return the p-values (tests,) adjusted by Benjamini and Hochberg (1995). Among the tests with a q-value of at most
    q, the expected share of true null hypotheses is at most q, if the tests are independent or positively dependent.
    """
    from scipy.stats import false_discovery_control  # slow to import, and stored effects are read without it

    return np.asarray(false_discovery_control(p_values)) if len(p_values) else np.empty(0)


#: Least questions or documents in each half of a split.
_LEAST_HALF = 2

#: Resamples beyond an effect of which the tail is counted; with fewer it is extrapolated.
_COUNTED = 10


class Effect(NamedTuple):
    """Change of a metric by an ablation, in the metric's unit.

    Attributes:
        baseline: The metric without ablation.
        effect: The metric with ablation, minus the baseline.
        standard_error: Standard error of the effect; infinite with one document.
        low: Lower end of the 95 % interval; minus infinity with too few documents.
        high: Upper end; infinity with too few documents.
        p_value: Two-sided p-value; 1 with one document.
        n: Number of questions, or of documents.
    """

    baseline: float
    effect: float
    standard_error: float
    low: float
    high: float
    p_value: float
    n: int

    @property
    def interval(self) -> Interval:
        """The effect with its interval."""
        return Interval(self.low, self.effect, self.high)


@dataclass(frozen=True)
class Outcomes:
    """Outcomes of a baseline, and what pairs them with those of other arms.

    Attributes:
        metric: Accuracy, or a loss.
        baseline: (rows,) 0 to 1 for accuracy, otherwise losses summed over a text.
        sizes: (rows,) tokens or bytes of a text; 1 for accuracy.
        strata: (rows,) number of the task.
        documents: (rows,) number of the document; its rows are correlated, and in the same half.
        selecting: (rows,) bool, rows of the half that selects; the other half judges.
    """

    metric: str
    baseline: np.ndarray
    sizes: np.ndarray
    strata: np.ndarray
    documents: np.ndarray
    selecting: np.ndarray

    @classmethod
    def of(
        cls, metric: str, baseline: np.ndarray, sizes: np.ndarray, tasks: Sequence[str], documents: Sequence[str]
    ) -> Outcomes:
        """Return outcomes of tasks and documents with names (rows,)."""
        strata, numbers = (np.unique(names, return_inverse=True)[1] for names in (tasks, documents))
        return cls(metric, baseline, sizes, strata, numbers, halves(documents, tasks))

    @property
    def can_split(self) -> bool:
        """True if each half has enough documents."""
        return all(len(np.unique(self.documents[part])) >= _LEAST_HALF for part in (self.selecting, ~self.selecting))

    @property
    def better(self) -> int:
        """1 if more of the metric is better, otherwise -1."""
        return 1 if self.metric == ACCURACY else -1

    def effect(self, arm: np.ndarray, rows: np.ndarray | None = None) -> Effect:
        """Return the effect of an arm.

        Args:
            arm: (rows,) outcomes of the arm.
            rows: (rows,) bool, rows to use; None uses all.
        """
        kept = self._kept(rows)
        base, own, sizes = self.baseline[kept], arm[kept], self.sizes[kept]
        effect, error, count = ratio_with_error(own - base, sizes, self.documents[kept])
        level = float(base.sum() / sizes.sum())
        if self.metric == ACCURACY:
            paired = compare(base, own, self.strata[kept], self.documents[kept])
            return Effect(level, effect, error, paired.low / 100, paired.high / 100, paired.p_value, len(base))
        if count < 2:
            return Effect(level, effect, inf, -inf, inf, 1.0, count)
        if error == 0:
            return Effect(level, effect, error, effect, effect, 1.0 if effect == 0 else 0.0, count)
        ratios = studentised(own - base, sizes, self.documents[kept])
        # Resamples far above the effect show how far the truth may be below it, and the other way round.
        most, least = np.quantile(ratios, [1 - TAIL, TAIL], method="inverted_cdf")
        p_value = min(1.0, 2 * min(_tail(ratios, effect / error, count), _tail(-ratios, -effect / error, count)))
        return Effect(level, effect, error, effect - float(most) * error, effect - float(least) * error, p_value, count)

    def change(self, arm: np.ndarray, rows: np.ndarray | None = None) -> float:
        """Return the change of the metric; `effect` also computes its interval."""
        kept = self._kept(rows)
        return float((arm[kept] - self.baseline[kept]).sum() / self.sizes[kept].sum())

    def _kept(self, rows: np.ndarray | None) -> np.ndarray:
        return np.ones(len(self.baseline), dtype=bool) if rows is None else rows


def _tail(ratios: np.ndarray, ratio: float, documents: int) -> float:
    """Return the share of resamples at or below ``ratio``.

    A correction over hundreds of heads needs smaller shares than resamples can be counted. Below the tenth resample the
    tail is that of Student's t, stretched to agree with it there.
    """
    below = int((ratios <= ratio).sum())
    counted = (1 + max(below, _COUNTED)) / (1 + len(ratios))
    if below >= _COUNTED:
        return counted
    edge = float(np.partition(ratios, _COUNTED - 1)[_COUNTED - 1])
    if edge == -inf:
        return counted
    from scipy.special import stdtr, stdtrit  # slow to import, and stored effects are read without it

    return min(counted, float(stdtr(documents - 1, ratio * stdtrit(documents - 1, counted) / edge)))


def halves(documents: Sequence[str], tasks: Sequence[str]) -> np.ndarray:
    """Return which rows select (rows,); the others judge. Whole documents are split, alternating by hash within each
    task, so that the order of rows decides nothing.
    """
    first: dict[str, str] = {}
    for document, task in zip(documents, tasks, strict=True):
        first[document] = min(first.get(document, task), task)
    members: dict[str, list[str]] = {}
    for document in sorted(first, key=lambda text: (hashlib.md5(text.encode()).hexdigest(), text)):
        members.setdefault(first[document], []).append(document)
    chosen = {document for of_task in members.values() for document in of_task[1::2]}
    return np.array([document in chosen for document in documents], dtype=bool)


class TableEffect(NamedTuple):
    """An effect in a table of effects.

    Attributes:
        q_value: p-value adjusted for the number of effects in the table.
        confirmed: See the column of ``head_effects``.
    """

    effect: Effect
    q_value: float
    confirmed: bool | None


def each_effect(outcomes: Outcomes, arms: Mapping[str, np.ndarray]) -> dict[str, TableEffect]:
    """Return the effects of arms on all rows, and whether halves agree.

    Args:
        arms: (rows,) outcomes by arm.
    """
    found = {name: outcomes.effect(arm) for name, arm in arms.items()}
    q = q_values(np.array([effect.p_value for effect in found.values()]))
    confirmed: dict[str, bool | None] = dict.fromkeys(arms)
    if outcomes.can_split:
        confirmed = dict(_confirmed(outcomes, arms))
    return {
        name: TableEffect(effect, float(adjusted), confirmed[name])
        for (name, effect), adjusted in zip(found.items(), q, strict=True)
    }


def _confirmed(outcomes: Outcomes, arms: Mapping[str, np.ndarray]) -> dict[str, bool]:
    """Return which arms are significant in one half and judged alike by the other."""
    selecting = outcomes.selecting
    chosen = {name: outcomes.effect(arm, selecting) for name, arm in arms.items()}
    q = q_values(np.array([effect.p_value for effect in chosen.values()]))
    found = {}
    for (name, effect), adjusted in zip(chosen.items(), q, strict=True):
        found[name] = bool(adjusted <= FALSE_DISCOVERY_RATE)
        if found[name]:
            other = outcomes.effect(arms[name], ~selecting)
            found[name] = other.low > 0 if effect.effect > 0 else other.high < 0
    return found


def best_of_each(
    outcomes: Outcomes, groups: Mapping[object, Mapping[str, np.ndarray]]
) -> dict[object, tuple[str, TableEffect]]:
    """Return the best arm of each group, chosen by one half and judged by the other. If there are too few documents to
    split, all rows do both and the result is not confirmed. The first arm wins ties.

    Args:
        groups: (rows,) outcomes by arm, by group.
    """
    split = outcomes.can_split
    choosing, judging = (outcomes.selecting, ~outcomes.selecting) if split else (None, None)
    best: dict[object, tuple[str, Effect]] = {}
    for group, arms in groups.items():
        by_metric = {name: outcomes.better * outcomes.change(arm, choosing) for name, arm in arms.items()}
        name = max(by_metric, key=lambda each: by_metric[each])
        best[group] = (name, outcomes.effect(arms[name], judging))
    q = q_values(np.array([effect.p_value for _, effect in best.values()]))
    return {
        group: (name, TableEffect(effect, float(adjusted), True if split else None))
        for (group, (name, effect)), adjusted in zip(best.items(), q, strict=True)
    }
