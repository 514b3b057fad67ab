"""Random controls: comparison of chosen heads with as many random heads.

A mask is compared with fixed random heads, a rule with heads drawn again for each input. Random arms vary more between
seeds than between questions, so an arm is ranked among them: by chance it would be the best of 20 in one case of 20.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from headscan.analysis.verdicts.finished_arms import FinishedArm

#: Arms have the same size if their measured shares of ablated heads differ by at most this part of the larger one.
SAME_SIZE = 0.1

#: An arm is better than chance if its rank among the controls has at most this probability by chance.
LEVEL = 0.05

#: Minimum number of controls with which the first rank reaches that level.
LEAST_CONTROLS = math.ceil(1 / LEVEL) - 1

#: Differences within this tolerance, in percentage points, are ties.
_EQUAL = 1e-9


@dataclass(frozen=True)
class Controls:
    """Random arms of the same size as an arm.

    Attributes:
        arms: Their names.
        zeroed_share: Mean of their measured shares of ablated heads, 0 to 1; None if unknown.
        mean: Mean of their differences to the baseline, in percentage points.
        lowest: Difference of the worst seed.
        highest: Difference of the best seed.
        beaten: Number of controls that the arm beats.
    """

    arms: tuple[str, ...]
    zeroed_share: float | None
    mean: float
    lowest: float
    highest: float
    beaten: int

    @property
    def p_value(self) -> float:
        """Probability that another random arm ranks at least as high.

        Ties count against the arm.
        """
        return (1 + len(self.arms) - self.beaten) / (1 + len(self.arms))

    @property
    def better(self) -> bool:
        """True if the arm is better than chance at `LEVEL`."""
        return self.p_value <= LEVEL

    def sentence(self, zeroed_share: float | None, *, of_bytes: bool = False) -> str:
        """Return the sentence on an arm that ablates ``zeroed_share`` of the heads.

        Args:
            of_bytes: The controls are plans whose KV caches have the bytes of the arm's.
        """
        size = "with as many bytes" if of_bytes else "with as many heads"
        if not (of_bytes or same_size(zeroed_share, self.zeroed_share)):
            # A rule ablates another share than its quantile, so only the nominal share of the two is equal.
            size = "of its nominal share"
            if self.zeroed_share is not None:
                size += f" (they ablate {self.zeroed_share:.1%})"
        count = len(self.arms)
        if self.better:
            proof = f"p = {self.p_value:.2g}, a better choice of heads than chance"
        elif count < LEAST_CONTROLS:
            proof = f"at least {LEAST_CONTROLS} controls are needed to show a better choice of heads than chance"
        else:
            proof = f"p = {self.p_value:.2g}, not shown to be a better choice of heads than chance"
        spread = f"{self.lowest:+.2f} to {self.highest:+.2f} points" if count > 1 else f"{self.mean:+.2f} points"
        return f"Better than {self.beaten} of {count} random control{'s' * (count > 1)} {size}, {spread}; {proof}"


def same_size(one: float | None, other: float | None) -> bool:
    """Return True if two measured shares are known and similar."""
    return one is not None and other is not None and abs(one - other) <= SAME_SIZE * max(one, other)


def controls_of(arm: FinishedArm, others: Sequence[FinishedArm]) -> list[FinishedArm]:
    """Return the random arms of the same nominal share or size."""
    randoms = [other for other in others if other.kind is arm.kind.control]
    if arm.kind.shrinks_cache:  # a plan read forward is not compared with one that evicts keys
        alike = (arm.selection, arm.kv_shares)
        randoms = [other for other in randoms if (other.selection, other.kv_shares) == alike]
    named = [r for r in randoms if r.share is not None and arm.share is not None and math.isclose(r.share, arm.share)]
    return named or [r for r in randoms if same_size(arm.zeroed_share, r.zeroed_share)]


def judge_controls(others: Sequence[FinishedArm], differences: Mapping[str, float]) -> dict[str, Controls]:
    """Compare arms with their random controls, by arm id.

    Arms without controls or difference are left out.

    Args:
        others: Arms and random controls of one run.
        differences: Benchmark difference to the baseline in percentage points, by arm id.
    """
    judged = [arm for arm in others if arm.arm_id in differences]
    return {
        arm.arm_id: _against(arm, controls, differences) for arm in judged if (controls := controls_of(arm, judged))
    }


def _against(arm: FinishedArm, controls: Sequence[FinishedArm], differences: Mapping[str, float]) -> Controls:
    found = [differences[control.arm_id] for control in controls]
    shares = [control.zeroed_share for control in controls if control.zeroed_share is not None]
    return Controls(
        arms=tuple(control.name for control in controls),
        zeroed_share=sum(shares) / len(shares) if shares else None,
        mean=sum(found) / len(found),
        lowest=min(found),
        highest=max(found),
        beaten=sum(differences[arm.arm_id] > difference + _EQUAL for difference in found),
    )
