"""Verdicts on arms, from accuracy, recall, the loss of text and random controls."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from math import isfinite
from typing import Any, Literal, NamedTuple

from headscan.analysis.errors import VerdictError
from headscan.analysis.store.records import ArmKind
from headscan.analysis.store.store import Store
from headscan.analysis.store.tables import ACCURACY, BITS_PER_BYTE, LOSS
from headscan.analysis.store.verdict_limits import BENCHMARK_PARTS, LEAST_RETAINED, MARGIN, MAX_LOSS, RECALL_PARTS
from headscan.analysis.verdicts.answer_sheets import BENCHMARK, FinishedArm, Scope, finished_arms
from headscan.analysis.verdicts.controls import (
    Controls,
    PrunedControls,
    equal_size,
    judge_controls,
    loss_increase,
    pruned_controls,
)
from headscan.analysis.verdicts.metrics import (
    RATES,
    Increase,
    TaskMetric,
    enough_texts,
    exceeds,
    judged_losses,
    metric_words,
    read_metrics,
)
from headscan.analysis.verdicts.paired import Interval, PairedDifference, about
from headscan.analysis.verdicts.verdict_rows import (
    RecallVerdict,
    StoredRows,
    TaskVerdict,
    least_visible_loss,
    task_verdicts,
)

#: The claim that an arm tests, by what replaces its heads; zero tests whether they are removable.
CLAIMS = {"mean": "constant", "resample": "independent of the input"}
#: What happens to its heads, in words.
REPLACED = {"mean": "replaced by their means", "resample": "replaced by their outputs on other texts"}

#: Maximum number of lost tasks in a sentence; the store has all of them.
_MOST_NAMED = 3


class Outcome(StrEnum):
    """The verdict in one word. An arm is ``NOT_SHOWN`` if it is shown neither to be safe nor to lose: the questions
    or texts are too few, the model itself is at chance on them, or the loss is about its limit. `ArmVerdict.why` says
    which.
    """

    SAFE = "safe"
    LOSES = "loses"
    NOT_SHOWN = "not shown"


#: Label of an arm that is not shown to be safe, where a known number of questions could show it.
TOO_FEW_QUESTIONS = "too few questions"
#: The same where a known number of texts, whose loss is measured, is needed, with or without more questions.
TOO_FEW_TEXTS = "too few texts"


class Gap(NamedTuple):
    """Missing evidence of an arm that shows no loss.

    Attributes:
        short: A few words; empty if another gap says enough.
        words: Words that follow "not shown to be removable".
        needed: Number of questions or texts that would give the evidence; None if no number is known to help.
        unit: What is counted.
    """

    short: str
    words: str
    needed: int | None
    unit: Literal["questions", "texts"] = "questions"


@dataclass(frozen=True, kw_only=True)
class ArmVerdict:
    """Results of one arm, and the verdict on it; `RecallVerdict` explains ``judging_share`` and ``comparisons``.

    Attributes:
        zeroed_share: Measured share of ablated or removed heads, 0 to 1.
        share: Nominal share, 0 to 1.
        selection: How the heads were selected, or the mode of a plan.
        recall: Comparisons of the recall families; empty if no recall question was asked.
        metrics: Metrics that are no accuracies, such as the loss of text.
        weights_left: Share of the weights' bytes that a pruned model keeps; None for other arms.
        cache_left: Share of the KV cache that a pruned model keeps; None for other arms, and if it cannot be sized.
        pruned_controls: Random and layer-drop models of about the same size; empty for other arms.
        replacement: What replaces the output of ablated heads; None for other arms.
        accuracy: Comparison on all benchmark questions that have a right answer. None if there are none; then the arm
            has results, but no verdict.
        tasks: The same comparison for each task and group, clearest loss first.
        controls: Random arms of the same size; None if there are none.
        max_loss: Limit of the loss of text, in nats per token; without text it has no effect.
    """

    name: str
    kind: ArmKind
    zeroed_share: float | None
    share: float | None = None
    selection: str | None = None
    recall: tuple[RecallVerdict, ...] = ()
    metrics: tuple[TaskMetric, ...] = ()
    weights_left: float | None = None
    cache_left: float | None = None
    pruned_controls: tuple[PrunedControls, ...] = ()
    replacement: str | None = None
    accuracy: PairedDifference | None = None
    tasks: tuple[TaskVerdict, ...] = ()
    controls: Controls | None = None
    judging_share: float = 1.0
    comparisons: int = 1
    max_loss: float = MAX_LOSS

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
    def is_random(self) -> bool:
        return self.kind.is_random

    @property
    def is_control(self) -> bool:
        return self.kind.is_control

    @property
    def recall_lost(self) -> str:
        """Names of the recall families that the arm loses."""
        return ", ".join(each.family for each in self.recall if each.failed)

    @property
    def recall_open(self) -> str:
        """Names of the recall families that are shown neither lost nor kept."""
        return ", ".join(each.family for each in self.judged_recall if not (each.failed or each.kept))

    @property
    def unjudged_recall(self) -> str:
        """Names of the recall families that these questions cannot judge, "recall" for all; empty if there is none."""
        guessed = [each.family for each in self.recall if not each.informative]
        return "recall" if len(guessed) == len(self.recall) else " and ".join(guessed)

    @property
    def recall_unknown(self) -> str:
        """What of recall these questions cannot judge, and why; empty if they judge every family."""
        if not self.unjudged_recall:
            return ""
        several = len(self.recall) - len(self.judged_recall) > 1
        why = f"the model itself does not solve {'these tasks' if several else 'this task'}"
        return f"{self.unjudged_recall} is unknown: {why if self.recall else 'it was not asked'}"

    @property
    def other_metrics(self) -> list[str]:
        """Measures in words, without the loss that `value` returns."""
        loss = loss_increase(self.metrics)
        shown = {each.task for each in self.metrics if loss is not None and each.increase is loss}
        metrics = [each for each in self.metrics if not (each.task in shown and each.metric in (LOSS, BITS_PER_BYTE))]
        return metric_words(metrics)

    @property
    def judged_recall(self) -> tuple[RecallVerdict, ...]:
        """Verdicts on the recall families that the baseline solves; the numbers of the others show nothing."""
        return tuple(each for each in self.recall if each.informative)

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
        return next((each.left for each in self.judged_recall if each.family == measure), None)

    def sentence(self) -> str:
        """Return the verdict on the arm with its numbers."""
        return f"{self.name}{self._size()}: {'. '.join(filter(None, self._parts()))}."

    def _size(self) -> str:
        """Return the share of heads in brackets; empty if it is unknown."""
        if self.kind.shrinks_cache:
            return "" if self.share is None else f" ({self.share:.1%} of KV heads keep less)"
        if self.zeroed_share is None or self.kind is ArmKind.MODEL:
            return ""
        if not self.kind.is_pruned:
            return f" ({self.zeroed_share:.1%} of heads {REPLACED.get(self.replacement or '', 'ablated')})"
        left = [
            f"{share:.1%} of the {name}"
            for name, share in (("weights", self.weights_left), ("KV cache", self.cache_left))
            if share is not None
        ]
        remain = f"; {' and '.join(left)} remain" if left else ""
        return f" ({self.zeroed_share:.1%} of heads removed{remain})"

    def _parts(self) -> list[str]:
        """Return the sentences after the arm's name; empty ones are skipped."""
        metrics = metric_words(self.metrics)
        controls = [each.words() for each in self.pruned_controls]
        if self.accuracy is None:
            lost = " and ".join(words for _, words in [*self._text_losses(), *self._recall_losses()])
            lost = f"It {lost}" if lost else ""
            return ["no task has right answers to count", *metrics, lost, self._recall_words(), *controls]
        p = self.accuracy
        return [
            self._conclusion(),
            f"Accuracy {p.arm:.2f} % against {p.baseline:.2f} % on {p.questions} questions:"
            f" {p.interval.words(unit=' points')}, p = {p.p_value:.3g}",
            *metrics,
            self._worst_task(),
            self._tasks_at_chance(),
            self._recall_words(),
            self._control_words(),
            *controls,
        ]

    def _recall_words(self) -> str:
        if not self.recall:
            return "Recall was not tested"
        if not self.judged_recall:
            return "Recall cannot be judged: the baseline fails the recall tasks"
        left = ", ".join(each.words() for each in self.judged_recall)
        return (
            f"Recall left, where 100 % is what the whole model does beyond guessing: {left}"
            f" (95 % intervals; kept if at least {LEAST_RETAINED:.0f} % is shown to be left, and no loss of more than"
            f" {MARGIN:.0f} point of the answers is shown)"
        )

    @property
    def keeps_accuracy(self) -> bool:
        """True if the lower end is above -1 point, on enough questions, and no task is lost."""
        return self.paired.low > -MARGIN and self.paired.can_show_loss and not self.tasks_lost

    @property
    def tasks_lost(self) -> tuple[TaskVerdict, ...]:
        """Tasks that the arm loses, clearest loss first."""
        return tuple(task for task in self.tasks if task.failed)

    @property
    def questions_needed(self) -> int:
        """Number of questions that an arm without loss, with as many changed answers, needs; 0 if these are enough, or
        show a drop that may exceed one point.
        """
        paired, needed = self.paired, self.paired.questions_needed(self.comparisons)
        drops = paired.high < 0 and paired.low <= -MARGIN
        return 0 if paired.questions >= needed or drops else round(needed / self.judging_share)

    @property
    def is_safe(self) -> bool:
        """True if accuracy, the loss of text that was read, and every recall family that the baseline solves are kept;
        recall may be unknown.
        """
        return self.outcome is Outcome.SAFE

    @property
    def outcome(self) -> Outcome:
        """The verdict in one word."""
        if self.losses():
            return Outcome.LOSES
        return Outcome.NOT_SHOWN if self.gaps() else Outcome.SAFE

    @property
    def too_few_questions(self) -> bool:
        """True if nothing but a known number of questions is missing to show that an arm without loss is safe."""
        return self.label == TOO_FEW_QUESTIONS

    @property
    def label(self) -> str:
        """The verdict as a table shows it: "safe, recall unknown" names what of recall is unknown; "too few questions"
        and "too few texts" are not shown, but would be by a known number of questions, or of texts and questions.
        """
        if self.outcome is Outcome.NOT_SHOWN and all(gap.needed is not None for gap in self.gaps()):
            return TOO_FEW_TEXTS if any(gap.unit == "texts" for gap in self.gaps()) else TOO_FEW_QUESTIONS
        unknown = self.unjudged_recall if self.outcome is Outcome.SAFE else ""
        return f"{self.outcome}, {unknown} unknown" if unknown else str(self.outcome)

    @property
    def why(self) -> str:
        """Losses, or missing evidence, in a few words; empty if the arm is safe and its recall is known."""
        if losses := self.losses():
            return " and ".join(short for short, _ in losses)
        return "; ".join(filter(None, [*(gap.short for gap in self.gaps()), self.recall_unknown]))

    def losses(self) -> list[tuple[str, str]]:
        """Return the losses that the questions show, each as a text with numbers and as words that follow "it"."""
        losses = self._text_losses()
        if self.paired.shows_loss:
            losses.append((f"accuracy ({self.paired.difference:+.1f} points)", "loses more than one point of accuracy"))
        elif self.tasks_lost:
            words = f"loses more than one point in {_names(self.tasks_lost)}"
            losses.append((f"accuracy in {self.tasks_lost[0].task}", words))
        return losses + self._recall_losses()

    def _text_losses(self) -> list[tuple[str, str]]:
        return [
            (loss_words(each.increase, self.max_loss), f"raises the loss of text by {each.increase.words()}")
            for each in judged_losses(self.metrics)
            if each.increase is not None and exceeds(each.increase, self.max_loss)
        ]

    def _recall_losses(self) -> list[tuple[str, str]]:
        if not self.recall_lost:
            return []
        numbers = " and ".join(each.loss_words() for each in self.recall if each.failed)
        return [(numbers, f"loses recall ({self.recall_lost})")]

    def gaps(self) -> list[Gap]:
        """Return the missing evidence of an arm that shows no loss; at chance, the short words name only that."""
        losses = judged_losses(self.metrics)
        of_text = (loss_gap(each.increase, self.max_loss, len(losses) * self.comparisons) for each in losses)
        gaps = [gap for gap in of_text if gap is not None]
        paired = self.paired
        if not paired.above_chance:
            words = (
                "the model itself answers too few questions right to lose any"
                if paired.chance is None
                else f"the model itself is at or near chance ({paired.baseline:.1f} % right, {paired.chance:.1f} % by"
                " guessing), so these questions show nothing"
            )
            gaps.append(Gap("the model itself is at or near chance on these questions", words, None))
        elif paired.low <= -MARGIN or not paired.can_show_loss:
            needed = self.questions_needed
            short = f"needs about {about(needed)} questions" if needed else "may lose more than one point"
            words = self._questions_words() or "its loss may be more than one point"
            gaps.append(Gap(short, words, needed or None))
        if open_recall := [each for each in self.judged_recall if not (each.failed or each.kept)]:
            shorts, needed_words = [], ""
            for each in open_recall:
                if each.questions_needed:
                    needs = f"about {each.questions_needed:,} {each.family} questions"
                    shorts.append(f"needs {needs}")
                    needed_words += f"; {needs} are needed"
                else:
                    shorts.append(f"may lose {each.family} (keeps {each.share_left()})")
            numbers = [each.questions_needed for each in open_recall]
            gaps.append(
                Gap(
                    "; ".join(shorts) if paired.above_chance else "",
                    f"recall is not shown to be kept ({self.recall_open}{needed_words})",
                    sum(numbers) if all(numbers) else None,
                )
            )
        return gaps

    def _control_words(self) -> str:
        if self.kind is ArmKind.MODEL:
            return ""
        if self.controls is None:
            return f"No random control with {equal_size(self.kind)}"
        return self.controls.sentence(self.kind, self.zeroed_share)

    def _conclusion(self) -> str:
        word = CLAIMS.get(self.replacement or "", self.kind.passing_word)
        if losses := self.losses():
            return f"not {word}: it {' and '.join(words for _, words in losses)}"
        if gaps := self.gaps():
            return f"not shown to be {word}: {' and '.join(gap.words for gap in gaps)}"
        inactive = ": the heads are inactive" if self.replacement == "zero" else ""
        unknown = f"; {self.unjudged_recall} is unknown" if self.unjudged_recall else ""
        return f"{word} within one point{inactive}{unknown}"

    def _questions_words(self) -> str:
        """Return the number of questions that an arm without loss needs; empty if they are enough."""
        if not self.questions_needed:
            return ""
        paired, half = self.paired, " in a sweep, where half of them judge" if self.judging_share < 1 else ""
        changed = 100 * (paired.gained + paired.lost) / paired.questions
        return (
            f"not enough questions ({paired.questions:,}): an arm that loses nothing and changes {changed:.1f} % of the"
            f" answers needs about {about(self.questions_needed)}{half}"
        )

    def _worst_task(self) -> str:
        """Return the sentence on the worst task; empty with one task."""
        if len(self.tasks) < 2:
            return ""
        smallest = min(self.tasks, key=lambda task: task.paired.texts).paired
        visible = least_visible_loss(smallest, len(self.tasks))
        return (
            f"Worst of {len(self.tasks)} tasks and groups, with an interval widened for their number:"
            f" {self.tasks[0].points()}; the smallest, of {smallest.questions:,} questions, shows losses from about"
            f" {visible:.0f} points"
        )

    def _tasks_at_chance(self) -> str:
        """Return the sentence on tasks at chance, which show nothing; empty with one task."""
        guessed = [task for task in self.tasks if not task.paired.above_chance]
        if len(self.tasks) < 2 or not guessed:
            return ""
        return f"The model itself is at or near chance in {_names(guessed)}, so these show nothing"


def loss_words(loss: Increase, max_loss: float) -> str:
    """Return a loss increase that exceeds its limit."""
    limit = f" (limit {max_loss:g})" if loss.unit == RATES[LOSS].unit else ""
    return f"{loss.difference:+.3f} {loss.unit}{limit}"


def loss_gap(loss: Increase | None, max_loss: float, comparisons: int) -> Gap | None:
    """Return the evidence that is missing to show that a loss is within its limit; None if it is shown."""
    if loss is None:
        unknown = "the loss of text cannot be compared with that of the model itself"
        return Gap(unknown, unknown, None, "texts")
    if (needed := enough_texts(loss, max_loss, comparisons)) is None:
        return None
    found = f"the loss may rise by {loss.high:.3g} nats per token (limit {max_loss:g})"
    if not needed:
        found += f", and more texts do not help: the estimate itself is {loss.difference:+.3g}"
        return Gap(found, found, None, "texts")
    if loss.high <= max_loss or not isfinite(loss.high):
        of = f"{loss.documents:,} text{'s' * (loss.documents != 1)}"
        found = f"{of} cannot show that the loss rises by at most {max_loss:g} nats per token"
    number = f"about {about(needed)} texts"
    return Gap(f"needs {number}: {found}", f"{found}; {number} are needed", needed, "texts")


def _names(tasks: Sequence[TaskVerdict]) -> str:
    """Return the names of the first tasks and the number of others."""
    more = len(tasks) - _MOST_NAMED
    others = f" and {more} other task{'s' * (more > 1)}" if more > 0 else ""
    return ", ".join(task.task for task in tasks[:_MOST_NAMED]) + others


@dataclass(frozen=True)
class Verdict:
    """Verdicts on the finished arms of an evaluate run.

    Attributes:
        finished: All finished arms, controls last.
        unrecorded: Rows of ``arm_verdicts`` that were computed because the store lacks them.
        max_loss: Limit of the loss of text, in nats per token.
    """

    run_id: str
    model: str
    finished: tuple[ArmVerdict, ...]
    unfinished: int = 0
    unrecorded: tuple[Mapping[str, Any], ...] = field(default=(), repr=False)
    max_loss: float = MAX_LOSS

    @property
    def arms(self) -> tuple[ArmVerdict, ...]:
        """The judged arms: none if no benchmark task has right answers (perplexity)."""
        return tuple(arm for arm in self.finished if arm.accuracy is not None)

    @property
    def outcomes(self) -> dict[str, ArmVerdict]:
        """All finished arms by name; those without accuracy come last."""
        return {arm.name: arm for arm in sorted(self.finished, key=lambda arm: arm.accuracy is None)}

    @property
    def progress(self) -> str:
        """Number of finished arms in words, the baseline included; empty if all are finished."""
        finished = 1 + len(self.finished)
        return f"{finished} of {finished + self.unfinished} arms finished" if self.unfinished else ""

    def sentences(self) -> list[str]:
        """Return one sentence per arm that is no control, after the progress if arms are unfinished."""
        lines = [arm.sentence() for arm in self.outcomes.values() if not arm.is_control]
        return [f"{self.progress}.", *lines] if self.progress else lines


def judge(store: Store, run_id: str, *, max_loss: float = MAX_LOSS) -> Verdict:
    """Judge every finished arm of an evaluate run. Comparisons that the store lacks are computed, not written.

    Args:
        max_loss: Maximum increase of the loss of held-out text of a safe arm, in nats per token. An arm loses if the
            interval lies above the limit, and is not shown to be safe if the interval reaches above it.
    """
    with store.reading():
        run = store.resolve_run(run_id, "evaluate")
        run_id = run["run_id"]
        arms = finished_arms(store, run_id)
        if not arms.others:
            raise VerdictError(
                f"run {run_id} has 0 finished arms in addition to the baseline (limit 1). Ablate heads with"
                " `headscan evaluate`"
            )
        metrics = read_metrics(store, run_id, arms.baseline)
        stored = StoredRows.read(store, run_id, arms)
    rows = stored.with_missing()
    compared = rows.by_arm()
    controls = judge_controls(arms.others, benchmark_differences(compared))
    points = {arm_id: scopes[BENCHMARK] for arm_id, scopes in compared.items() if BENCHMARK in scopes}
    judged = tuple(
        arm_verdict(
            arm,
            compared.get(arm.arm_id, {}),
            metrics=metrics.get(arm.arm_id, ()),
            controls=controls.get(arm.arm_id),
            pruned=pruned_controls(arm, arms.others, points, metrics),
            max_loss=max_loss,
        )
        for arm in arms.others
    )
    return Verdict(run_id, run["model"], judged, arms.unfinished, tuple(rows.computed), max_loss)


def benchmark_differences(compared: Mapping[str, Mapping[Scope, PairedDifference]]) -> dict[str, float]:
    """Return the benchmark difference by arm id, in percentage points."""
    return {arm_id: scopes[BENCHMARK].difference for arm_id, scopes in compared.items() if BENCHMARK in scopes}


def arm_verdict(
    arm: FinishedArm,
    scopes: Mapping[Scope, PairedDifference],
    *,
    metrics: tuple[TaskMetric, ...] = (),
    controls: Controls | None = None,
    pruned: tuple[PrunedControls, ...] = (),
    confirmation: bool = False,
    comparisons: int = 1,
    recall_comparisons: int | None = None,
    max_loss: float = MAX_LOSS,
) -> ArmVerdict:
    """Judge one arm by its comparisons.

    Args:
        scopes: Comparisons by scope; an arm without one on the benchmark has no accuracy.
        confirmation: True if the questions are the judging part of a sweep.
        comparisons: Number of arms for which the intervals are widened; ``recall_comparisons`` in recall, None if it is
            the same.
        max_loss: Limit of the loss of text, in nats per token.
    """
    recall_comparisons = comparisons if recall_comparisons is None else recall_comparisons
    return ArmVerdict(
        name=arm.name,
        kind=arm.kind,
        zeroed_share=arm.zeroed_share,
        share=arm.share,
        selection=arm.selection,
        recall=_families(scopes, 1 - 1 / RECALL_PARTS if confirmation else 1.0, recall_comparisons),
        metrics=metrics,
        weights_left=arm.weights_left,
        cache_left=arm.cache_left,
        pruned_controls=pruned,
        replacement=arm.replacement,
        accuracy=scopes.get(BENCHMARK),
        tasks=task_verdicts(scopes),
        controls=controls,
        judging_share=1 - 1 / BENCHMARK_PARTS if confirmation else 1.0,
        comparisons=comparisons,
        max_loss=max_loss,
    )


def _families(
    scopes: Mapping[Scope, PairedDifference], judging_share: float, comparisons: int
) -> tuple[RecallVerdict, ...]:
    return tuple(
        RecallVerdict(scope.task, paired, judging_share, comparisons)
        for scope, paired in scopes.items()
        if scope.is_recall_family
    )
