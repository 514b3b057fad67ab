"""Random controls: whether heads chosen by a score are better let go than as many chosen by chance.

A mask is held against fixed random heads, a rule against heads drawn anew for each input.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from analysis.answer_sheets import BENCHMARK, AnswerSheets, Scope, read_answers
from analysis.finished_arms import FinishedArm, FinishedArms
from analysis.paired import PairedDifference
from analysis.store import Store

#: Two arms are of one size when their realised shares of silenced heads differ by at most this part of the larger.
SAME_SIZE = 0.1

_CONTROL_OF = {"mask": "random_mask", "rule": "random_rule"}


@dataclass(frozen=True)
class Controls:
    """The random arms of one arm's size.

    Attributes:
        arms: Their names.
        zeroed_share: Share of heads they really silenced, 0 to 1, on average; None where that is not known.
        mean: Mean of their differences to the baseline, in percentage points.
        lowest: The worst seed's difference.
        highest: The best seed's difference.
        advantage: The arm against the mean of its controls, per question.
    """

    arms: tuple[str, ...]
    zeroed_share: float | None
    mean: float
    lowest: float
    highest: float
    advantage: PairedDifference

    @property
    def beaten(self) -> bool:
        """Whether the arm does better than their mean: the whole interval of the advantage is above zero."""
        return self.advantage.low > 0

    def sentence(self, zeroed_share: float | None) -> str:
        """The comparison in words, for an arm that silences ``zeroed_share`` of the heads."""
        word = "better than" if self.beaten else "worse than" if self.advantage.high < 0 else "not told apart from"
        drawn = f"the mean of {len(self.arms)} random controls" if len(self.arms) > 1 else "1 random control"
        size = "of its size"
        if not same_size(zeroed_share, self.zeroed_share):
            # A rule silences more or less than its quantile says: then the two are alike by name alone.
            size = "of its nominal share"
            if self.zeroed_share is not None:
                size += f", which silence {self.zeroed_share:.1%}"
        return f"{word} {drawn} {size} ({self.mean:+.2f} points, {self.lowest:+.2f} to {self.highest:+.2f})"


def same_size(one: float | None, other: float | None) -> bool:
    """Whether two realised shares of silenced heads (0 to 1) are alike; unknown ones are not."""
    return one is not None and other is not None and abs(one - other) <= SAME_SIZE * max(one, other)


def controls_of(arm: FinishedArm, others: Sequence[FinishedArm]) -> list[FinishedArm]:
    """The random arms of the same nominal share, or else those that silenced as many heads."""
    randoms = [other for other in others if other.kind == _CONTROL_OF.get(arm.kind)]
    named = [r for r in randoms if r.share is not None and arm.share is not None and math.isclose(r.share, arm.share)]
    return named or [r for r in randoms if same_size(arm.zeroed_share, r.zeroed_share)]


def judge_controls(
    store: Store, arms: FinishedArms, verdicts: Mapping[str, Mapping[Scope, PairedDifference]]
) -> dict[str, Controls]:
    """Of each arm id that has random controls and an accuracy, how it does against them in the benchmark."""
    judged = [arm for arm in arms.others if BENCHMARK in verdicts.get(arm.arm_id, {})]
    found = {arm: controls for arm in judged if (controls := controls_of(arm, judged))}
    if not found:
        return {}
    needed = {arm.arm_id: arm for arm in (*found, *(control for controls in found.values() for control in controls))}
    sheets = read_answers(store, arms.baseline, list(needed.values()))
    return {arm.arm_id: _against(arm, controls, sheets, verdicts) for arm, controls in found.items()}


def _against(
    arm: FinishedArm,
    controls: Sequence[FinishedArm],
    sheets: AnswerSheets,
    verdicts: Mapping[str, Mapping[Scope, PairedDifference]],
) -> Controls:
    pooled = np.mean([sheets.correct[control.arm_id] for control in controls], axis=0)
    losses = [verdicts[control.arm_id][BENCHMARK].difference for control in controls]
    shares = [control.zeroed_share for control in controls if control.zeroed_share is not None]
    return Controls(
        arms=tuple(control.name for control in controls),
        zeroed_share=sum(shares) / len(shares) if shares else None,
        mean=sum(losses) / len(losses),
        lowest=min(losses),
        highest=max(losses),
        advantage=sheets.compare(BENCHMARK, pooled, sheets.correct[arm.arm_id]),
    )
