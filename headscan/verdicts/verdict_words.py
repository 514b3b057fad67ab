"""The wording of verdicts: reasons and sentences."""

from __future__ import annotations

from collections.abc import Sequence
from math import isfinite

from headscan.store.records import ArmKind
from headscan.store.tables import BITS_PER_BYTE, LOSS
from headscan.store.verdict_limits import MARGIN, MIN_RETAINED
from headscan.verdicts.controls import loss_increase
from headscan.verdicts.decision import ArmResults, Aspect
from headscan.verdicts.metrics import RATES, Increase, metric_words
from headscan.verdicts.paired import about
from headscan.verdicts.scope_verdicts import TaskVerdict, least_visible_loss

#: What a safe arm shows about its heads, by what replaces them.
FINDINGS = {"zero": "inactive", "mean": "constant", "resample": "independent of the input"}
#: What happens to its heads, in words.
REPLACED = {"mean": "replaced by their means", "resample": "replaced by their outputs on other texts"}

#: Maximum number of lost tasks in a sentence; the store has all of them.
_MAX_NAMED_TASKS = 3


class ArmVerdict(ArmResults):
    """Results of one arm, and the verdict on it in words."""

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

    def sentence(self) -> str:
        """Return the verdict on the arm with its numbers."""
        return f"{self.name}{_size(self)}: {'. '.join(filter(None, _sentences(self)))}."


def _loss(arm: ArmResults, aspect: Aspect) -> str:
    """Return a loss with its numbers."""
    match aspect:
        case Aspect.TEXT:
            increases = (each.increase for each in arm.text_losses)
            return " and ".join(loss_words(each, arm.max_loss) for each in increases if each is not None)
        case Aspect.ACCURACY:
            return f"accuracy ({arm.paired.difference:+.1f} points)"
        case Aspect.SINGLE_TASKS:
            return f"accuracy in {arm.tasks_lost[0].task}"
        case Aspect.RECALL:
            return " and ".join(each.loss_words() for each in arm.recall if each.failed)


def _loss_clause(arm: ArmResults, aspect: Aspect) -> str:
    """Return a loss in words that follow "it"."""
    match aspect:
        case Aspect.TEXT:
            rises = " and ".join(each.increase.words() for each in arm.text_losses if each.increase is not None)
            return f"raises the loss of text by {rises}"
        case Aspect.ACCURACY:
            return "loses more than one point of accuracy"
        case Aspect.SINGLE_TASKS:
            return f"loses more than one point in {_task_names(arm.tasks_lost)}"
        case Aspect.RECALL:
            return f"loses recall ({arm.recall_lost})"


def _gap(arm: ArmResults, aspect: Aspect) -> str:
    """Return evidence that more questions may not give, in a few words, or the texts that would give it; at chance, the
    words on accuracy say enough.
    """
    if aspect is Aspect.TEXT:
        return "; ".join(
            _text_gap(arm, each.increase, needed)
            if needed is None
            else f"needs about {about(needed)} texts: {_text_gap(arm, each.increase, needed)}"
            for each, needed in arm.open_texts.items()
        )
    if aspect is Aspect.ACCURACY:
        if not arm.paired.above_chance:
            return "the model itself is at or near chance on these questions"
        return "may lose more than one point" if arm.questions_needed is None else ""
    if not arm.paired.above_chance:
        return ""
    families = (each for each in arm.open_recall if each.questions_needed is None)
    return "; ".join(f"may lose {each.family} (keeps {each.share_words()})" for each in families)


def _questions_missing(arm: ArmResults) -> str:
    """Return how many questions of each kind would be enough; empty if no such number is known."""
    if not arm.paired.above_chance:
        return ""
    needed = []
    lacks_accuracy = any(gap.aspect is Aspect.ACCURACY for gap in arm.decision.gaps)
    if arm.questions_needed is not None and lacks_accuracy:
        needed.append(f"{about(arm.questions_needed)} questions")
    families = [each for each in arm.open_recall if each.questions_needed is not None]
    needed += [f"{each.questions_needed:,} {each.family} questions" for each in families]
    return f"needs about {' and '.join(needed)}" if needed else ""


def _gap_clause(arm: ArmResults, aspect: Aspect) -> str:
    """Return missing evidence in words that follow "not shown to be safe"."""
    if aspect is Aspect.TEXT:
        return " and ".join(
            _text_gap(arm, each.increase, needed)
            + ("" if needed is None else f"; about {about(needed)} texts are needed")
            for each, needed in arm.open_texts.items()
        )
    if aspect is Aspect.ACCURACY:
        return _accuracy_gap(arm)
    needed_words = "".join(
        f"; about {each.questions_needed:,} {each.family} questions are needed"
        for each in arm.open_recall
        if each.questions_needed is not None
    )
    return f"recall is not shown to be kept ({arm.recall_open}{needed_words})"


def _accuracy_gap(arm: ArmResults) -> str:
    paired = arm.paired
    if paired.above_chance:
        return _questions_words(arm) or "its loss may be more than one point"
    if paired.chance is None:
        return "the model itself answers too few questions right to lose any"
    return (
        f"the model itself is at or near chance ({paired.baseline:.1f} % right, {paired.chance:.1f} % by guessing), so"
        " these questions show nothing"
    )


def _text_gap(arm: ArmResults, loss: Increase | None, needed: int | None) -> str:
    """Return why a loss is not shown to be within its limit; ``needed`` is `texts_needed`."""
    if loss is None:
        return "the loss of text cannot be compared with that of the model itself"
    limit = arm.max_loss
    if loss.high <= limit or not isfinite(loss.high):
        texts = f"{loss.documents:,} text{'s' * (loss.documents != 1)}"
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


def _size(arm: ArmResults) -> str:
    """Return the share of heads in brackets; empty if it is unknown."""
    if arm.size is None:
        return ""
    if arm.kind.shrinks_cache:
        return f" ({arm.size:.1%} of KV heads keep less)"
    if not arm.kind.is_pruned:
        return f" ({arm.size:.1%} of heads {REPLACED.get(arm.replacement or '', 'ablated')})"
    left = [
        f"{share:.1%} of the {name}"
        for name, share in (("weights", arm.weights_left), ("KV cache", arm.cache_left))
        if share is not None
    ]
    remain = f"; {' and '.join(left)} remain" if left else ""
    return f" ({arm.size:.1%} of heads removed{remain})"


def _sentences(arm: ArmResults) -> list[str]:
    """Return the sentences after the arm's name; empty ones are skipped."""
    metrics = [f"Measured {each}" for each in metric_words(arm.metrics)]
    controls = [each.words() for each in arm.pruned_controls]
    if arm.accuracy is None:
        aspects = [Aspect.TEXT] * bool(arm.text_losses) + [Aspect.RECALL] * bool(arm.recall_lost)
        losses = f"It {' and '.join(_loss_clause(arm, aspect) for aspect in aspects)}" if aspects else ""
        return ["no task has right answers to count", *metrics, losses, _recall_words(arm), *controls]
    accuracy = arm.accuracy
    return [
        _conclusion(arm),
        f"Accuracy {accuracy.arm:.2f} % against {accuracy.baseline:.2f} % on {accuracy.questions} questions:"
        f" {accuracy.interval.words(unit=' points')}, p = {accuracy.p_value:.3g}",
        *metrics,
        _worst_task(arm),
        _tasks_at_chance(arm),
        _recall_words(arm),
        _control_words(arm),
        *controls,
    ]


def _recall_words(arm: ArmResults) -> str:
    if not arm.recall:
        return "Recall was not tested"
    if not arm.judged_recall:
        return "Recall cannot be judged: the baseline fails the recall tasks"
    left = ", ".join(each.words() for each in arm.judged_recall)
    return (
        f"Recall left, where 100 % is what the whole model does beyond guessing: {left}"
        f" (95 % intervals; kept if at least {MIN_RETAINED:.0f} % is shown to be left, and no loss of more than"
        f" {MARGIN:.0f} point of the answers is shown)"
    )


def _control_words(arm: ArmResults) -> str:
    if arm.kind is ArmKind.MODEL:
        return ""
    if arm.controls is None:
        return f"No random control with {arm.kind.equal_size}"
    return arm.controls.sentence(arm.kind, arm.ablated_share)


def _conclusion(arm: ArmResults) -> str:
    decision = arm.decision
    if decision.lost:
        return f"not safe: it {' and '.join(_loss_clause(arm, aspect) for aspect in decision.lost)}"
    if decision.gaps:
        return f"not shown to be safe: {' and '.join(_gap_clause(arm, gap.aspect) for gap in decision.gaps)}"
    finding = f": the heads are {FINDINGS[arm.replacement]}" if arm.replacement else ""
    unknown = f"; {arm.unjudged_recall} is unknown" if arm.unjudged_recall else ""
    return f"safe within one point{finding}{unknown}"


def _questions_words(arm: ArmResults) -> str:
    """Return the number of questions that an arm without loss needs; empty if no larger number is known to help."""
    if arm.questions_needed is None:
        return ""
    paired, half = arm.paired, " in a sweep, where half of them judge" if arm.judging_share < 1 else ""
    changed = 100 * (paired.gained + paired.lost) / paired.questions
    return (
        f"too few questions ({paired.questions:,}): an arm that loses nothing and changes {changed:.1f} % of the"
        f" answers needs about {about(arm.questions_needed)}{half}"
    )


def _worst_task(arm: ArmResults) -> str:
    """Return the sentence on the worst task; empty with one task."""
    if len(arm.tasks) < 2:
        return ""
    smallest = min(arm.tasks, key=lambda task: task.paired.texts).paired
    visible = least_visible_loss(smallest, len(arm.tasks))
    return (
        f"Worst of {len(arm.tasks)} tasks and groups, with an interval widened for their number:"
        f" {arm.tasks[0].points()}; the smallest, of {smallest.questions:,} questions, shows losses from about"
        f" {visible:.0f} points"
    )


def _tasks_at_chance(arm: ArmResults) -> str:
    """Return the sentence on tasks at chance, which show nothing; empty with one task."""
    guessed = [task for task in arm.tasks if not task.paired.above_chance]
    if len(arm.tasks) < 2 or not guessed:
        return ""
    return f"The model itself is at or near chance in {_task_names(guessed)}, so these show nothing"


def _task_names(tasks: Sequence[TaskVerdict]) -> str:
    """Return the names of the first tasks and the number of others."""
    unnamed = len(tasks) - _MAX_NAMED_TASKS
    others = f" and {unnamed} other task{'s' * (unnamed > 1)}" if unnamed > 0 else ""
    return ", ".join(task.task for task in tasks[:_MAX_NAMED_TASKS]) + others
