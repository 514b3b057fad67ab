"""Controls: comparison of chosen heads with as many random heads, or with whole attention layers.

A mask is compared with fixed random heads, a rule with heads drawn again for each input. Random arms vary more between
seeds than between questions, so an arm is ranked among them: by chance it would be the best of 20 in one case of 20.
The best of many arms ranks high by chance, whatever questions judge it. A sweep's choice is therefore ranked among
random curves, each with its own best share, and its p-value is corrected for the number of scores that it was chosen
from.
Dropping whole attention layers is a strong method of its own (arXiv 2406.15786), so a pruned model is compared with it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from headscan.store.records import ArmKind, ArmRecord
from headscan.store.tables import BITS_PER_BYTE, LOSS
from headscan.text_tables import counted, percent
from headscan.verdicts.metrics import Increase, TaskMetric
from headscan.verdicts.paired import PairedDifference

#: Arms have the same size if their measured shares of ablated heads differ by at most this part of the larger one.
SAME_SIZE = 0.1

#: An arm is better than chance if its rank among the controls has at most this probability by chance.
LEVEL = 0.05

#: Differences within this tolerance, in percentage points, are ties.
_EQUAL = 1e-9


def controls_needed(tried: int = 1) -> int:
    """Return the minimum number of controls with which the first rank reaches the level for the best of ``tried``."""
    return math.ceil(tried / LEVEL) - 1


#: Minimum number of controls of an arm that was chosen in advance.
MIN_CONTROLS = controls_needed()


def rank_p_value(controls: int, beaten: int, tried: int = 1) -> float:
    """Return the p-value of an arm that is better than ``beaten`` of its random controls: the probability that the best
    of ``tried`` random arms does as well. A control with an equal result is not beaten. For one arm the value is exact
    if every order of the arm and its controls is equally likely. For several it is Bonferroni's bound, which also holds
    if their results depend on each other.
    """
    return min(1.0, tried * (1 + controls - beaten) / (1 + controls))


def _reaches_level(p_value: float | None) -> bool:
    return p_value is not None and p_value <= LEVEL


class Standing(NamedTuple):
    """Result of the arm that a curve's selection takes: whether it is safe on the questions that select, the nominal
    share of its heads, and its difference to the baseline on the questions that judge, in percentage points.
    """

    safe: bool
    share: float
    difference: float

    def beats(self, other: Standing) -> bool:
        """Return True if the curve gets further: a larger safe share, or less harm at an equal one."""
        mine, theirs = (round(each.share, 9) if each.safe else 0.0 for each in (self, other))
        return mine > theirs or (mine == theirs and self.difference > other.difference + _EQUAL)


@dataclass(frozen=True)
class SelectedRank:
    """Rank of a sweep's choice among random curves that went through the same selection.

    Attributes:
        scores: Number of curves of scores from which the choice was selected.
        curves: Number of random curves, one per seed, each with an arm at every share.
        beaten: Number of random curves that get less far than the arm; None with too few to show anything.
    """

    scores: int
    curves: int
    beaten: int | None

    @classmethod
    def of(cls, selected: Standing, curves: Sequence[Standing], scores: int) -> SelectedRank:
        """Return the rank of the selected arm among the best arms of random curves."""
        return cls(scores, len(curves), sum(selected.beats(curve) for curve in curves))

    @property
    def p_value(self) -> float | None:
        """Probability of this rank by chance, counting the scores; None with too few curves."""
        return None if self.beaten is None else rank_p_value(self.curves, self.beaten, self.scores)

    @property
    def beats_chance(self) -> bool:
        """True if the choice is better than chance at `LEVEL`."""
        return _reaches_level(self.p_value)

    def words(self) -> str:
        scores = counted(self.scores, "score")
        if self.beaten is None:
            return (
                f"at least {controls_needed(self.scores):,} random controls of every share are needed to show a better"
                f" choice of heads than chance, because the arm was selected from the shares of {scores}"
            )
        claim = "a better" if self.beats_chance else "not shown to be a better"
        return (
            f"it gets further than {self.beaten:,} of {self.curves:,} random curves, each at its own best share:"
            f" p = {self.p_value:.2g} for the best of {scores}, {claim} choice of heads than chance"
        )


@dataclass(frozen=True)
class Controls:
    """Random arms of the same size as an arm.

    Attributes:
        ablated_share: Mean of their measured shares of ablated heads, 0 to 1; None if unknown.
        mean, lowest, highest: Differences to the baseline in percentage points.
        tried: Number of arms of its kind in the run that scores chose, because a reader of all of them sees the best of
            so many; 1 if no score chose the arm.
        selected: Rank of a sweep's choice, which replaces that of a single arm; None for other arms.
    """

    arms: tuple[str, ...]
    ablated_share: float | None
    mean: float
    lowest: float
    highest: float
    beaten: int
    tried: int = 1
    selected: SelectedRank | None = None

    @property
    def p_value(self) -> float | None:
        """Probability of this rank by chance, counting the arms tried; None if a sweep has too few random curves."""
        if self.selected is not None:
            return self.selected.p_value
        return rank_p_value(len(self.arms), self.beaten, self.tried)

    @property
    def beats_chance(self) -> bool:
        """True if the arm is better than chance at `LEVEL`."""
        return _reaches_level(self.p_value)

    def sentence(self, kind: ArmKind, ablated_share: float | None) -> str:
        """Return the sentence on an arm that ablates or removes ``ablated_share`` of the heads."""
        size = f"with {kind.equal_size}"
        if not (kind.shrinks_cache or same_size(ablated_share, self.ablated_share)):
            # A rule ablates another share than its quantile, so only the nominal share of the two is equal.
            size = "of its nominal share"
            if self.ablated_share is not None:
                size += f" (they {'remove' if kind.is_pruned else 'ablate'} {percent(self.ablated_share)})"
        count = len(self.arms)
        spread = f"{self.lowest:+.2f} to {self.highest:+.2f} points" if count > 1 else f"{self.mean:+.2f} points"
        controls = f"{counted(count, 'random choice')} {size}"
        verb = "loses" if self.beaten == 1 else "lose"
        return f"Of {controls}, {self.beaten} {verb} more accuracy ({spread}); {self._proof()}"

    def standing(self) -> str:
        """Return the number of controls that lose more, and the probability of that by chance if it can show a lot."""
        beaten, count = self.beaten, len(self.arms)
        if self.selected is not None and self.selected.beaten is not None:
            beaten, count = self.selected.beaten, self.selected.curves
        enough = self.p_value is not None and count >= MIN_CONTROLS
        return f"{beaten} of {count}" + (f", p = {self.p_value:.2g}" if enough else "")

    def _proof(self) -> str:
        if self.selected is not None:
            return self.selected.words()
        if len(self.arms) < MIN_CONTROLS:
            return f"at least {MIN_CONTROLS} are needed to show a better choice of heads than chance"
        if self.beats_chance:
            among = f" for the best of {self.tried} arms" if self.tried > 1 else ""
            return f"p = {self.p_value:.2g}{among}, a better choice of heads than chance"
        alone = rank_p_value(len(self.arms), self.beaten)
        if self.tried > 1 and alone <= LEVEL:
            return f"p = {alone:.2g} if the arm was chosen in advance, and no proof for the best of {self.tried} arms"
        return f"p = {alone:.2g}, not shown to be a better choice of heads than chance"


@dataclass(frozen=True)
class PrunedControls:
    """Models pruned to about the size of another one, in one way, with the same repair.

    Attributes:
        layers_dropped: Number of layers without attention; None for random heads.
        ablated_share: Share of the heads that they remove, 0 to 1; None if unknown.
        points: Differences to the baseline on the benchmark; empty if not measured.
        increases: The same of the loss of text.
    """

    layers_dropped: int | None
    ablated_share: float | None
    points: tuple[PairedDifference, ...]
    increases: tuple[Increase, ...]

    def words(self) -> str:
        """Return the sentence on their losses; empty if nothing was measured."""
        parts = []
        if self.points and self.layers_dropped is not None:  # random controls are ranked by their points
            parts.append(self.points[0].interval.words(unit=" points"))
        if len(self.increases) == 1:
            parts.append(f"loss {self.increases[0].words()}")
        elif self.increases:
            differences = [each.difference for each in self.increases]
            parts.append(f"loss {min(differences):+.4f} to {max(differences):+.4f} {self.increases[0].unit}")
        if not parts:
            return ""
        if self.layers_dropped is None:
            what = "Random heads"
        else:
            what = f"Dropping {counted(self.layers_dropped, 'whole attention layer')}"
            if self.ablated_share is not None:
                what += f" ({percent(self.ablated_share)} of heads)"
        return f"{what} with the same repair: {', '.join(parts)}"


def pruned_controls(
    arm: ArmRecord,
    others: Sequence[ArmRecord],
    differences: Mapping[str, PairedDifference],
    metrics: Mapping[str, Sequence[TaskMetric]],
) -> tuple[PrunedControls, ...]:
    """Return the controls of a pruned model, dropped layers first; empty for other arms. ``differences`` are those on
    the benchmark, by arm id.
    """
    if arm.kind is not ArmKind.PRUNED:
        return ()
    controls = []
    for kind in (ArmKind.LAYERS_DROPPED, ArmKind.RANDOM_PRUNED):
        members = [other for other in others if other.kind is kind and _alike(arm, other)]
        if members:
            losses = [loss_increase(metrics.get(member.arm_id, ())) for member in members]
            controls.append(
                PrunedControls(
                    members[0].config.get("layers_dropped") if kind is ArmKind.LAYERS_DROPPED else None,
                    members[0].ablated_share,
                    tuple(differences[member.arm_id] for member in members if member.arm_id in differences),
                    tuple(loss for loss in losses if loss is not None),
                )
            )
    return tuple(controls)


def loss_increase(metrics: Sequence[TaskMetric]) -> Increase | None:
    """Return the increase of a loss by token, else by byte; None if none was measured."""
    increase_of = {measure.metric: measure.increase for measure in metrics if measure.increase is not None}
    return increase_of.get(LOSS) or increase_of.get(BITS_PER_BYTE)


def _alike(one: ArmRecord, other: ArmRecord) -> bool:
    """Return True if two arms have the same nominal share and the same further settings."""
    same_share = one.share is not None and other.share is not None and math.isclose(one.share, other.share)
    return same_share and one.selection == other.selection


def same_size(one: float | None, other: float | None) -> bool:
    """Return True if two measured shares are known and similar."""
    return one is not None and other is not None and abs(one - other) <= SAME_SIZE * max(one, other)


def controls_of(arm: ArmRecord, others: Sequence[ArmRecord]) -> list[ArmRecord]:
    """Return the random arms of the same nominal share or size."""
    randoms = [other for other in others if other.kind is arm.kind.control and other.replacement == arm.replacement]
    if arm.kind.shrinks_cache:
        # A plan read forward is not compared with one that evicts keys, nor one by layer with one by head.
        settings = ("kv_shares", "granularity")
        alike = (arm.selection, *map(arm.config.get, settings))
        randoms = [each for each in randoms if (each.selection, *map(each.config.get, settings)) == alike]
    if arm.kind.is_pruned:  # a control has the same unit and repair
        return [other for other in randoms if _alike(arm, other)]
    same_share = [
        other
        for other in randoms
        if other.share is not None and arm.share is not None and math.isclose(other.share, arm.share)
    ]
    return same_share or [other for other in randoms if same_size(arm.ablated_share, other.ablated_share)]


def judge_controls(others: Sequence[ArmRecord], points: Mapping[str, float]) -> dict[str, Controls]:
    """Compare arms with their random controls, by arm id. ``points`` are benchmark differences to the baseline in
    percentage points; arms without controls or difference are left out.
    """
    judged = [arm for arm in others if arm.arm_id in points]
    return {
        arm.arm_id: _against(arm, controls, points, _number_tried(arm, others))
        for arm in judged
        if (controls := controls_of(arm, judged))
    }


def _number_tried(arm: ArmRecord, others: Sequence[ArmRecord]) -> int:
    """Return the number of arms like this one that scores chose; 1 for other arms."""
    if arm.criterion is None:
        return 1
    return sum(other.kind is arm.kind and other.criterion is not None for other in others)


def _against(arm: ArmRecord, controls: Sequence[ArmRecord], points: Mapping[str, float], tried: int) -> Controls:
    control_points = [points[control.arm_id] for control in controls]
    shares = [control.ablated_share for control in controls if control.ablated_share is not None]
    return Controls(
        arms=tuple(control.name for control in controls),
        ablated_share=sum(shares) / len(shares) if shares else None,
        mean=sum(control_points) / len(control_points),
        lowest=min(control_points),
        highest=max(control_points),
        beaten=sum(points[arm.arm_id] > control + _EQUAL for control in control_points),
        tried=max(1, tried),
    )
