"""The rule of verdicts: what the results of an arm show, and what is missing."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum
from functools import cached_property
from typing import NamedTuple

from headscan.errors import VerdictError
from headscan.store.tables import ACCURACY, LOSS
from headscan.store.verdict_limits import MARGIN, MAX_LOSS
from headscan.verdicts.answer_sheets import FinishedArm
from headscan.verdicts.controls import Controls, PrunedControls, loss_increase
from headscan.verdicts.metrics import TaskMetric, exceeds, is_within, judged_losses, texts_needed
from headscan.verdicts.paired import Interval, PairedDifference
from headscan.verdicts.scope_verdicts import RecallVerdict, TaskVerdict


class Outcome(StrEnum):
    """The verdict in one word. An arm is ``NOT_SHOWN`` if it is shown neither to be safe nor to lose: the questions
    or texts are too few, the model itself is at chance on them, or the rise of the text's loss is about its limit.
    `ArmVerdict.why` says which.
    """

    SAFE = "safe"
    LOSES = "loses"
    NOT_SHOWN = "not shown"


class Aspect(StrEnum):
    """What a verdict counts. ``SINGLE_TASKS`` are lost where the accuracy on all questions is not."""

    TEXT = "text"
    ACCURACY = "accuracy"
    SINGLE_TASKS = "single tasks"
    RECALL = "recall"


class Gap(NamedTuple):
    """An aspect without enough evidence.

    Attributes:
        needed: Number of questions, or of texts whose loss is measured, that would be enough; None if no larger number
            is known to help.
    """

    aspect: Aspect
    needed: int | None


#: Label of an arm that is not shown to be safe, where a known number of questions could show it.
TOO_FEW_QUESTIONS = "too few questions"
#: The same where a known number of texts, whose loss is measured, is needed, with or without more questions.
TOO_FEW_TEXTS = "too few texts"


class Decision(NamedTuple):
    """A verdict: what an arm is shown to lose, or the gaps of an arm that shows no loss."""

    outcome: Outcome
    lost: tuple[Aspect, ...] = ()
    gaps: tuple[Gap, ...] = ()


@dataclass(frozen=True, kw_only=True)
class ArmResults(FinishedArm):
    """Results of one arm, and the decision that follows; `RecallVerdict` explains ``judging_share`` and
    ``comparisons``. The subclass `ArmVerdict` adds words.

    Attributes:
        recall: Comparisons of the recall families; empty if no recall question was asked.
        metrics: Metrics that are no accuracies, such as the loss of text.
        pruned_controls: Random and layer-drop models of about the same size; empty for other arms.
        accuracy: Comparison on all benchmark questions that have a right answer. None if there are none; then the arm
            has results, but no verdict.
        tasks: The same comparison for each task and group, clearest loss first.
        controls: Random arms of the same size; None if there are none.
        max_loss: Limit of the rise of the text's loss, in nats per token; without text it has no effect.
    """

    recall: tuple[RecallVerdict, ...] = ()
    metrics: tuple[TaskMetric, ...] = ()
    pruned_controls: tuple[PrunedControls, ...] = ()
    accuracy: PairedDifference | None = None
    tasks: tuple[TaskVerdict, ...] = ()
    controls: Controls | None = None
    judging_share: float = 1.0
    comparisons: int = 1
    max_loss: float = MAX_LOSS

    @property
    def is_random(self) -> bool:
        return self.kind.is_random

    @property
    def is_control(self) -> bool:
        return self.kind.is_control

    @property
    def paired(self) -> PairedDifference:
        """The comparison of accuracies of a judged arm.

        Raises:
            VerdictError: The arm has no verdict.
        """
        if self.accuracy is None:
            raise VerdictError(f"no task of {self.name} has right answers, so it has no verdict. Choose other tasks")
        return self.accuracy

    @cached_property
    def decision(self) -> Decision:
        """The verdict on a judged arm. It loses if any aspect shows a loss, and is safe if all show that none exceeds
        its limit: the drop of accuracy, the rise of the loss of text that was read, and the loss of recall that the
        baseline has.
        """
        shows_loss = {
            Aspect.TEXT: bool(self.text_losses),
            Aspect.ACCURACY: self.paired.shows_loss,
            Aspect.SINGLE_TASKS: bool(self.tasks_lost) and not self.paired.shows_loss,
            Aspect.RECALL: bool(self.recall_lost),
        }
        lost_aspects = tuple(aspect for aspect, is_lost in shows_loss.items() if is_lost)
        if lost_aspects:
            return Decision(Outcome.LOSES, lost=lost_aspects)
        gaps = []
        if self.open_texts:
            gaps.append(Gap(Aspect.TEXT, max(_all_known(self.open_texts.values()), default=None)))
        if not self.paired.above_chance:
            gaps.append(Gap(Aspect.ACCURACY, None))
        elif not self.keeps_accuracy:
            gaps.append(Gap(Aspect.ACCURACY, self.questions_needed))
        if self.open_recall:
            needed = _all_known(family.questions_needed for family in self.open_recall)
            gaps.append(Gap(Aspect.RECALL, sum(needed) if needed else None))
        return Decision(Outcome.NOT_SHOWN if gaps else Outcome.SAFE, gaps=tuple(gaps))

    @property
    def outcome(self) -> Outcome:
        """The verdict in one word."""
        return self.decision.outcome

    @property
    def is_safe(self) -> bool:
        """True if accuracy, the loss of text that was read, and every recall family that the baseline solves are kept;
        recall may be unknown.
        """
        return self.outcome is Outcome.SAFE

    @property
    def label(self) -> str:
        """The verdict as a table shows it: "safe, recall unknown" names what of recall is unknown; "too few questions"
        and "too few texts" are not shown, but would be by a known number of questions, or of texts and questions.
        """
        gaps = self.decision.gaps
        if self.outcome is Outcome.NOT_SHOWN and all(gap.needed is not None for gap in gaps):
            return TOO_FEW_TEXTS if any(gap.aspect is Aspect.TEXT for gap in gaps) else TOO_FEW_QUESTIONS
        unknown = self.unjudged_recall if self.is_safe else ""
        return f"{self.outcome}, {unknown} unknown" if unknown else str(self.outcome)

    @property
    def too_few_questions(self) -> bool:
        """True if nothing but a known number of questions is missing to show that an arm without loss is safe."""
        return self.label == TOO_FEW_QUESTIONS

    def value(self, measure: str) -> Interval | None:
        """Return a number of the arm with its interval; None if it was not measured, or if the baseline guesses.

        Args:
            measure: ``accuracy`` (minus the baseline's, in points), ``loss`` (minus the baseline's, per token, or per
                byte if only that was measured), or a family of recall tasks (share of the ability left, in percent).
        """
        if measure == ACCURACY:
            return None if self.accuracy is None else self.accuracy.interval
        if measure == LOSS:
            increase = loss_increase(self.metrics)
            return None if increase is None else increase.interval
        return next((each.retained for each in self.judged_recall if each.family == measure), None)

    @property
    def judged_recall(self) -> tuple[RecallVerdict, ...]:
        """Verdicts on the recall families that the baseline solves; the numbers of the others show nothing."""
        return tuple(each for each in self.recall if each.informative)

    @property
    def recall_lost(self) -> str:
        """Names of the recall families that the arm loses."""
        return ", ".join(each.family for each in self.recall if each.failed)

    @property
    def open_recall(self) -> tuple[RecallVerdict, ...]:
        """The recall families that are shown neither lost nor kept."""
        return tuple(each for each in self.judged_recall if not (each.failed or each.kept))

    @property
    def recall_open(self) -> str:
        """Names of the recall families that are shown neither lost nor kept."""
        return ", ".join(each.family for each in self.open_recall)

    @property
    def unjudged_recall(self) -> str:
        """Names of the recall families that these questions cannot judge, "recall" for all; empty if there is none."""
        guessed = [each.family for each in self.recall if not each.informative]
        return "recall" if len(guessed) == len(self.recall) else " and ".join(guessed)

    @property
    def text_losses(self) -> tuple[TaskMetric, ...]:
        """Measured losses of text whose rise is shown to exceed its limit."""
        return tuple(each for each in judged_losses(self.metrics) if exceeds(each.increase, self.max_loss))

    @property
    def open_texts(self) -> dict[TaskMetric, int | None]:
        """Measured losses of text whose rise is not shown to be within its limit, with the number of texts that would
        be enough; None if no larger number is known to help.
        """
        losses = judged_losses(self.metrics)
        return {
            loss: texts_needed(loss.increase, self.max_loss, len(losses) * self.comparisons)
            for loss in losses
            if not is_within(loss.increase, self.max_loss)
        }

    @property
    def keeps_accuracy(self) -> bool:
        """True if the lower end is above -1 point, on enough questions, and no task is lost."""
        return self.paired.low > -MARGIN and self.paired.can_show_safety and not self.tasks_lost

    @property
    def tasks_lost(self) -> tuple[TaskVerdict, ...]:
        """Tasks that the arm loses, clearest loss first."""
        return tuple(task for task in self.tasks if task.failed)

    @property
    def questions_needed(self) -> int | None:
        """Number of questions that an arm without loss, with as many changed answers, needs; None if no larger number
        is known to help: these are enough, or they show a drop that may exceed one point.
        """
        paired, needed = self.paired, self.paired.questions_needed(self.comparisons)
        may_drop = paired.high < 0 and paired.low <= -MARGIN
        return None if paired.questions >= needed or may_drop else round(needed / self.judging_share)


def _all_known(numbers: Iterable[int | None]) -> list[int]:
    """Return the numbers; none of them if one is unknown."""
    known: list[int] = []
    for number in numbers:
        if number is None:
            return []
        known.append(number)
    return known
