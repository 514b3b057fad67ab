"""The verdict on one arm: the rule that decides what its results show, what is missing, and both in words."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from functools import cached_property
from math import isfinite
from typing import NamedTuple

from headscan.errors import VerdictError
from headscan.store.records import ArmKind, ArmRecord
from headscan.store.tables import ACCURACY, BITS_PER_BYTE, LOSS
from headscan.store.verdict_limits import MARGIN, MAX_LOSS, MIN_DOCUMENTS, points_words
from headscan.text_tables import counted, percent
from headscan.verdicts.controls import Controls, PrunedControls, loss_increase
from headscan.verdicts.metrics import (
    RATES,
    Increase,
    TaskMetric,
    exceeds,
    is_within,
    judged_losses,
    metric_words,
    texts_needed,
)
from headscan.verdicts.paired import Interval, PairedDifference, about
from headscan.verdicts.scope_verdicts import RecallVerdict, TaskVerdict, least_visible_loss

#: What a safe arm shows about its heads, by what replaces them.
FINDINGS = {"zero": "inactive", "mean": "constant", "resample": "independent of the input"}
#: What happens to its heads, in words.
REPLACED = {"mean": "replaced by their means", "resample": "replaced by their outputs on other texts"}

#: Maximum number of lost tasks in a sentence; the store has all of them.
_MAX_NAMED_TASKS = 3


#: Measure of `ArmVerdict.value`: the difference of the expected accuracy.
EXPECTED_ACCURACY = "expected"


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
#: Label of an arm that shows no loss of text and of recall, and was asked no other question.
NOT_ASKED = "not asked"
#: The same as `TOO_FEW_QUESTIONS` where a known number of texts, whose loss is measured, is needed, with or without
#: more questions.
TOO_FEW_TEXTS = "too few texts"
#: The same where a known number of questions would hardly show it, if the estimate of the accuracy is true.
PROBABLY_LOSES = "probably loses"
#: Chance of that, 0 to 1, below which an arm probably loses.
_LITTLE_CHANCE = 0.1


class Decision(NamedTuple):
    """A verdict: what an arm is shown to lose, or the gaps of an arm that shows no loss."""

    outcome: Outcome
    lost: tuple[Aspect, ...] = ()
    gaps: tuple[Gap, ...] = ()


@dataclass(frozen=True, kw_only=True)
class ArmVerdict:
    """Results of one arm, the decision that follows, and both in words; `RecallVerdict` explains ``judging_share`` and
    ``comparisons``.

    Attributes:
        arm: Its row of the store, with its shares and settings.
        recall: Comparisons of the recall families; empty if no recall question was asked.
        metrics: Metrics that are no accuracies, such as the loss of text.
        pruned_controls: Random and layer-drop models of about the same size; empty for other arms.
        accuracy: Comparison on all benchmark questions that have a right answer. None if there are none; then the arm
            has results, but no verdict.
        expected: The same, where answers among choices count by the probability of the right one. It judges the arm,
            which is not safe either if the count shows a loss. None without such answers.
        tasks: The same comparison for each task and group, clearest loss first.
        controls: Random arms of the same size; None if there are none.
        max_loss: Limit of the rise of the text's loss, in nats per token; without text it has no effect.
        max_points: Limit of the loss of accuracy, in percentage points.
    """

    arm: ArmRecord
    recall: tuple[RecallVerdict, ...] = ()
    metrics: tuple[TaskMetric, ...] = ()
    pruned_controls: tuple[PrunedControls, ...] = ()
    accuracy: PairedDifference | None = None
    expected: PairedDifference | None = None
    tasks: tuple[TaskVerdict, ...] = ()
    controls: Controls | None = None
    judging_share: float = 1.0
    comparisons: float = 1
    max_loss: float = MAX_LOSS
    max_points: float = MARGIN

    @property
    def name(self) -> str:
        """The name of the arm."""
        return self.arm.name

    @property
    def kind(self) -> ArmKind:
        """The kind of the arm."""
        return self.arm.kind

    @property
    def paired(self) -> PairedDifference:
        """The comparison of accuracies of a judged arm.

        Raises:
            VerdictError: The arm has no verdict.
        """
        if self.accuracy is None:
            raise VerdictError(f"no task of {self.name} has right answers, so it has no verdict. Choose other tasks")
        return self.accuracy

    @property
    def judging(self) -> PairedDifference:
        """The comparison that judges the accuracy of a judged arm: the expected one, if there is one."""
        return self.expected or self.paired

    @property
    def loses_accuracy(self) -> bool:
        """True if a loss of more than the limit is shown, by the expected accuracy or by the count."""
        return self.accuracy is not None and any(
            each.shows_loss(self.max_points) for each in (self.judging, self.paired)
        )

    @cached_property
    def decision(self) -> Decision:
        """The verdict on an arm. It loses if any aspect shows a loss, and is safe if all show that none exceeds
        its limit: the drop of accuracy, the rise of the loss of text that was read, and the loss of recall that the
        baseline has. Without accuracy it is not shown to be safe.
        """
        shows_loss = {
            Aspect.TEXT: bool(self.text_losses),
            Aspect.ACCURACY: self.loses_accuracy,
            Aspect.SINGLE_TASKS: bool(self.tasks_lost) and not self.loses_accuracy,
            Aspect.RECALL: bool(self.recall_lost),
        }
        lost_aspects = tuple(aspect for aspect, is_lost in shows_loss.items() if is_lost)
        if lost_aspects:
            return Decision(Outcome.LOSES, lost=lost_aspects)
        gaps = []
        if self.open_texts:
            gaps.append(Gap(Aspect.TEXT, max(_all_known(self.open_texts.values()), default=None)))
        if self.accuracy is None or not self.accuracy.above_chance:
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
        """The verdict as a table shows it: "safe, recall unknown" names what of recall is unknown, "safe on these
        4 documents" how few documents the questions are made from; "too few questions"
        and "too few texts" are not shown, but would be by a known number of questions, or of texts and questions;
        "probably loses" is not shown, and if the estimate is true, such a number would hardly help; "not asked" had
        recall questions alone.
        """
        gaps = self.decision.gaps
        if self.accuracy is None and gaps:
            return NOT_ASKED
        if any(gap.aspect is Aspect.ACCURACY and self._probably_loses for gap in gaps):
            return PROBABLY_LOSES
        if self.outcome is Outcome.NOT_SHOWN and all(gap.needed is not None for gap in gaps):
            return TOO_FEW_TEXTS if any(gap.aspect is Aspect.TEXT for gap in gaps) else TOO_FEW_QUESTIONS
        unknown = self.unjudged_recall if self.is_safe else ""
        outcome = f"{self.outcome}{self.of_documents}" if self.is_safe else str(self.outcome)
        return f"{outcome}, {unknown} unknown" if unknown else outcome

    @property
    def of_documents(self) -> str:
        """Words that name the documents if the questions are of so few that a verdict speaks of these alone."""
        count = self.paired.documents
        if count is None or count >= MIN_DOCUMENTS:
            return ""
        return f" on {'this document' if count == 1 else f'these {count} documents'}"

    @property
    def _probably_loses(self) -> bool:
        return self.questions_needed is not None and self.chance_of_safety < _LITTLE_CHANCE

    @property
    def too_few_questions(self) -> bool:
        """True if nothing but a known number of questions is missing to show that an arm without loss is safe."""
        return self.label == TOO_FEW_QUESTIONS

    def value(self, measure: str) -> Interval | None:
        """Return a number of the arm with its interval; None if it was not measured, or if the baseline guesses.

        Args:
            measure: ``accuracy`` (minus the baseline's, in points), ``expected`` (the same by the probability of the
                right choice), ``loss`` (minus the baseline's, per token, or per
                byte if only that was measured), or a family of recall tasks (share of the ability left, in percent).
        """
        if measure == EXPECTED_ACCURACY:
            return None if self.expected is None else self.expected.interval
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
        """True if the lower end is above the limit, the baseline is above chance, and no task is lost."""
        return self.judging.low > -self.max_points and self.paired.above_chance and not self.tasks_lost

    @property
    def tasks_lost(self) -> tuple[TaskVerdict, ...]:
        """Tasks that the arm loses, clearest loss first."""
        return tuple(task for task in self.tasks if task.failed)

    @property
    def questions_needed(self) -> int | None:
        """Number of questions that an arm without loss, with as many changed answers, needs; None if no larger number
        is known to help: these are enough, or they show a drop that may exceed one point.
        """
        judging, needed = self.judging, self.judging.questions_needed(self.comparisons, self.max_points)
        may_drop = judging.high < 0 and judging.low <= -self.max_points
        return None if judging.questions >= needed or may_drop else round(needed / self.judging_share)

    @property
    def chance_of_safety(self) -> float:
        """Probability, 0 to 1, that so many new questions show safety, if the estimate of the accuracy is true."""
        return self.judging.chance_of_safety(self.comparisons, self.max_points)

    @property
    def why(self) -> str:
        """Losses, or missing evidence, in a few words; empty if the arm is safe and its recall is known."""
        if self.decision.lost:
            return " and ".join(_loss(self, aspect) for aspect in self.decision.lost)
        gaps = [_gap(self, gap.aspect) for gap in self.decision.gaps]
        return "; ".join(filter(None, [*gaps, _questions_missing(self), self.recall_unknown]))

    @property
    def recall_unknown(self) -> str:
        """What of recall these questions cannot judge, and why; empty if they judge every family."""
        if not self.unjudged_recall:
            return ""
        if not self.recall:
            return f"{self.unjudged_recall} is unknown: it was not asked"
        several = len(self.recall) - len(self.judged_recall) > 1
        tasks = "these tasks" if several else "this task"
        return f"{self.unjudged_recall} is unknown: the model itself does not solve {tasks}"

    @property
    def other_metrics(self) -> list[str]:
        """Measures in words, without the loss that `value` returns."""
        loss = loss_increase(self.metrics)
        loss_tasks = {each.task for each in self.metrics if loss is not None and each.increase is loss}
        return metric_words(
            [each for each in self.metrics if not (each.task in loss_tasks and each.metric in (LOSS, BITS_PER_BYTE))]
        )

    def __repr__(self) -> str:
        return f"ArmVerdict({self.name}: {self.label}{f', {self.why}' if self.why else ''})"

    def sentence(self, *, name_missing_controls: bool = True) -> str:
        """Return the verdict on the arm with its numbers. Intervals are of 95 %; recall left is the share of what the
        model itself recalls beyond guessing.
        """
        said = filter(None, _sentences(self, name_missing_controls))
        return f"{self.name}{_size(self.arm)}: {'. '.join(said)}."


def _all_known(numbers: Iterable[int | None]) -> list[int]:
    """Return the numbers; none of them if one is unknown."""
    known: list[int] = []
    for number in numbers:
        if number is None:
            return []
        known.append(number)
    return known


def _loss(verdict: ArmVerdict, aspect: Aspect) -> str:
    """Return a loss with its numbers."""
    match aspect:
        case Aspect.TEXT:
            increases = (each.increase for each in verdict.text_losses)
            return " and ".join(loss_words(each, verdict.max_loss) for each in increases if each is not None)
        case Aspect.ACCURACY:
            return f"accuracy ({verdict.paired.difference:+.1f} points{_expected_points(verdict)})"
        case Aspect.SINGLE_TASKS:
            return f"accuracy in {verdict.tasks_lost[0].task}"
        case Aspect.RECALL:
            return " and ".join(each.loss_words() for each in verdict.recall if each.failed)


def _loss_clause(verdict: ArmVerdict, aspect: Aspect) -> str:
    """Return a loss in words that follow "it"."""
    match aspect:
        case Aspect.TEXT:
            rises = " and ".join(each.increase.words() for each in verdict.text_losses if each.increase is not None)
            return f"raises the loss of text by {rises}"
        case Aspect.ACCURACY:
            return f"loses more than {points_words(verdict.max_points)} of accuracy"
        case Aspect.SINGLE_TASKS:
            return f"loses more than {points_words(verdict.max_points)} in {_task_names(verdict.tasks_lost)}"
        case Aspect.RECALL:
            return f"loses recall ({verdict.recall_lost})"


def _gap(verdict: ArmVerdict, aspect: Aspect) -> str:
    """Return evidence that more questions may not give, in a few words, or the texts that would give it; at chance, the
    words on accuracy say enough.
    """
    if aspect is Aspect.TEXT:
        return "; ".join(
            _text_gap(verdict, each.increase, needed)
            if needed is None
            else f"needs about {about(needed)} texts: {_text_gap(verdict, each.increase, needed)}"
            for each, needed in verdict.open_texts.items()
        )
    if aspect is Aspect.ACCURACY:
        if verdict.accuracy is None:
            return "only the loss of text and recall were measured"
        if not verdict.paired.above_chance:
            return "the model itself is at or near chance on these questions"
        return f"may lose more than {points_words(verdict.max_points)}" if verdict.questions_needed is None else ""
    if verdict.accuracy is not None and not verdict.accuracy.above_chance:
        return ""
    families = (each for each in verdict.open_recall if each.questions_needed is None)
    return "; ".join(f"may lose {each.family} (keeps {each.share_words()})" for each in families)


def _questions_missing(verdict: ArmVerdict) -> str:
    """Return how many questions of each kind would be enough; empty if no such number is known."""
    if verdict.accuracy is not None and not verdict.accuracy.above_chance:
        return ""
    needed = []
    lacks_accuracy = any(gap.aspect is Aspect.ACCURACY for gap in verdict.decision.gaps)
    if lacks_accuracy and verdict.accuracy is not None and verdict.questions_needed is not None:
        needed.append(f"{about(verdict.questions_needed)} questions{_estimate(verdict)}")
    families = [each for each in verdict.open_recall if each.questions_needed is not None]
    needed += [f"{each.questions_needed:,} {each.family} questions" for each in families]
    return f"needs about {' and '.join(needed)}" if needed else ""


def _gap_clause(verdict: ArmVerdict, aspect: Aspect) -> str:
    """Return missing evidence in words that follow "not shown to be safe"."""
    if aspect is Aspect.TEXT:
        return " and ".join(
            _text_gap(verdict, each.increase, needed)
            + ("" if needed is None else f"; about {about(needed)} texts are needed")
            for each, needed in verdict.open_texts.items()
        )
    if aspect is Aspect.ACCURACY:
        return _accuracy_gap(verdict)
    needed_words = "".join(
        f"; about {each.questions_needed:,} {each.family} questions are needed"
        for each in verdict.open_recall
        if each.questions_needed is not None
    )
    return f"recall is not shown to be kept ({verdict.recall_open}{needed_words})"


def _accuracy_gap(verdict: ArmVerdict) -> str:
    paired = verdict.paired
    if paired.above_chance:
        return _questions_words(verdict) or f"its loss may be more than {points_words(verdict.max_points)}"
    if paired.chance is None:
        return "the model itself answers too few questions right to lose any"
    return (
        f"the model itself is at or near chance ({paired.baseline:.1f} % right, {paired.chance:.1f} % by guessing), so"
        " these questions show nothing"
    )


def _text_gap(verdict: ArmVerdict, loss: Increase | None, needed: int | None) -> str:
    """Return why a loss is not shown to be within its limit; ``needed`` is `texts_needed`."""
    if loss is None:
        return "the loss of text cannot be compared with that of the model itself"
    limit = verdict.max_loss
    if loss.high <= limit or not isfinite(loss.high):
        texts = counted(loss.documents, "text")
        gap = f"{texts} cannot show that the loss rises by at most {limit:g} nats per token"
    else:
        gap = f"the loss may rise by {loss.high:.3g} nats per token (limit {limit:g})"
    if needed is not None:
        return gap
    return f"{gap}, and more texts do not help: the estimate itself is {loss.difference:+.3g}"


def loss_words(loss: Increase, max_loss: float) -> str:
    """Return a loss increase that exceeds its limit."""
    limit = f" (limit {max_loss:g})" if loss.unit == RATES[LOSS].unit else ""
    return f"{loss.difference:+.3f} {loss.unit}{limit}"


def _size(arm: ArmRecord) -> str:
    """Return the share of heads in brackets; empty if it is unknown."""
    if arm.size is None:
        return ""
    if arm.kind.shrinks_cache:
        return f" ({percent(arm.size)} of KV heads keep less)"
    if not arm.kind.is_pruned:
        return f" ({percent(arm.size)} of heads {REPLACED.get(arm.replacement or '', 'ablated')})"
    left = [
        f"{percent(share)} of the {name}"
        for name, share in (("weights", arm.weights_left), ("KV cache", arm.cache_left))
        if share is not None
    ]
    remain = f"; {' and '.join(left)} remain" if left else ""
    return f" ({percent(arm.size)} of heads removed{remain})"


def _sentences(verdict: ArmVerdict, name_missing_controls: bool) -> list[str]:
    """Return the sentences after the arm's name; empty ones are skipped."""
    metrics = [f"Measured {each}" for each in metric_words(verdict.metrics)]
    controls = [each.words() for each in verdict.pruned_controls]
    if verdict.accuracy is None:
        aspects = [Aspect.TEXT] * bool(verdict.text_losses) + [Aspect.RECALL] * bool(verdict.recall_lost)
        losses = f"It {' and '.join(_loss_clause(verdict, aspect) for aspect in aspects)}" if aspects else ""
        return ["no task has right answers to count", *metrics, losses, _recall_words(verdict), *controls]
    accuracy = verdict.accuracy
    return [
        _conclusion(verdict),
        f"Accuracy {accuracy.arm:.2f} % against {accuracy.baseline:.2f} % on {counted(accuracy.questions, 'question')}:"
        f" {accuracy.interval.words(unit=' points')}, p = {accuracy.p_value:.3g}",
        _expected_words(verdict),
        *metrics,
        _worst_task(verdict),
        _tasks_at_chance(verdict),
        _recall_words(verdict),
        _control_words(verdict) if name_missing_controls or verdict.controls is not None else "",
        *controls,
    ]


def _expected_words(verdict: ArmVerdict) -> str:
    """Return the sentence on the probability of the right answer, which judges; empty without one."""
    if verdict.expected is None:
        return ""
    expected = verdict.expected
    return (
        f"Expected accuracy, by the probability of the right choice: {expected.arm:.2f} % against"
        f" {expected.baseline:.2f} %: {expected.interval.words(unit=' points')}"
    )


def _recall_words(verdict: ArmVerdict) -> str:
    if not verdict.recall:
        return "Recall was not tested"
    if not verdict.judged_recall:
        return "Recall cannot be judged: the baseline fails the recall tasks"
    left = ", ".join(each.words() for each in verdict.judged_recall)
    return f"Recall left: {left}"


def _control_words(verdict: ArmVerdict) -> str:
    if verdict.kind is ArmKind.MODEL:
        return ""
    if verdict.controls is None:
        return f"No random control with {verdict.kind.equal_size}"
    return verdict.controls.sentence(verdict.kind, verdict.arm.ablated_share)


def _conclusion(verdict: ArmVerdict) -> str:
    decision = verdict.decision
    if decision.lost:
        return f"not safe: it {' and '.join(_loss_clause(verdict, aspect) for aspect in decision.lost)}"
    if decision.gaps:
        return f"not shown to be safe: {' and '.join(_gap_clause(verdict, gap.aspect) for gap in decision.gaps)}"
    finding = f": the heads are {FINDINGS[verdict.arm.replacement]}" if verdict.arm.replacement else ""
    unknown = f"; {verdict.unjudged_recall} is unknown" if verdict.unjudged_recall else ""
    return f"safe within {points_words(verdict.max_points)}{verdict.of_documents}{finding}{unknown}"


def _questions_words(verdict: ArmVerdict) -> str:
    """Return the number of questions that an arm without loss needs; empty if no larger number is known to help."""
    if verdict.questions_needed is None:
        return ""
    paired, half = verdict.paired, " in a sweep, where half of them judge" if verdict.judging_share < 1 else ""
    changed = 100 * (paired.gained + paired.lost) / paired.questions
    return (
        f"too few questions ({paired.questions:,}): an arm that loses nothing and changes {changed:.1f} % of the"
        f" answers needs about {about(verdict.questions_needed)}{half}{_estimate(verdict)}"
    )


def _estimate(verdict: ArmVerdict) -> str:
    """Return in brackets how often the needed questions show safety if the estimate is true; empty without a loss."""
    difference = verdict.judging.difference
    if round(difference, 2) >= 0:
        return ""
    passing = percent(round(verdict.chance_of_safety, 2))
    return f" (if it loses nothing; at the estimate, {difference:+.2f} points, {passing} pass)"


def _expected_points(verdict: ArmVerdict) -> str:
    return "" if verdict.expected is None else f", {verdict.expected.difference:+.1f} expected"


def _worst_task(verdict: ArmVerdict) -> str:
    """Return the sentence on the worst task; empty with one task."""
    if len(verdict.tasks) < 2:
        return ""
    smallest = min(verdict.tasks, key=lambda task: task.paired.texts).paired
    visible = least_visible_loss(smallest, len(verdict.tasks))
    return (
        f"Worst of {len(verdict.tasks)} tasks and groups, with an interval widened for their number:"
        f" {verdict.tasks[0].points()}; the smallest, of {smallest.questions:,} questions, shows losses from about"
        f" {visible:.0f} points"
    )


def _tasks_at_chance(verdict: ArmVerdict) -> str:
    """Return the sentence on tasks at chance, which show nothing; empty with one task."""
    guessed = [task for task in verdict.tasks if not task.paired.above_chance]
    if len(verdict.tasks) < 2 or not guessed:
        return ""
    return f"The model itself is at or near chance in {_task_names(guessed)}, so these show nothing"


def _task_names(tasks: Sequence[TaskVerdict]) -> str:
    """Return the names of the first tasks and the number of others."""
    unnamed = len(tasks) - _MAX_NAMED_TASKS
    others = f" and {counted(unnamed, 'other task')}" if unnamed > 0 else ""
    return ", ".join(task.task for task in tasks[:_MAX_NAMED_TASKS]) + others
