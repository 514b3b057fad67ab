"""The largest safe share: shares of one kind of saving, tested from small to large until one fails.

The order is fixed before the questions are read, and a share is called safe only if all smaller ones are. So all tests
together have the error of one: the first share that is not harmless ends the tests in all but 2.5 % of runs (tests in a
fixed order: Maurer, Hothorn and Lehmacher 1995). Kinds of savings that share the questions divide that error.

Loss comes first, because its paired interval is narrow and needs few passes: a share whose interval lies above the
limit is out before any question is asked. Recall comes next, and the benchmark makes the claim, at planned looks
(`looks`): a share is asked no more once it is safe or loses, and once further questions would hardly show it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from headscan.errors import VerdictError
from headscan.verdicts.arm_verdict import ArmVerdict, Aspect, Outcome, loss_words
from headscan.verdicts.controls import loss_increase
from headscan.verdicts.judge import Verdict
from headscan.verdicts.looks import Look, is_hopeless
from headscan.verdicts.metrics import Increase, exceeds
from headscan.verdicts.paired import PairedDifference
from headscan.verdicts.scope_verdicts import RecallVerdict


@dataclass(frozen=True)
class ShareVerdict:
    """Verdict on one nominal share of heads or of KV heads, 0 to 1.

    Attributes:
        loss: Increase of the held-out loss, in nats per token; None if it was not measured.
        label: The verdict as a table shows it; see `ArmVerdict.label`.
        why: Losses, or missing evidence; empty if the share is safe and its recall is known.
        accuracy: Comparison on the benchmark; None if the loss ended the test.
        expected: The same, by the probability of the right choice, which judges; None without choices.
        recall_unknown: What of recall was not judged, and why; empty if all of it was, or if the loss ended the test.
        look: Last look that asked the arm, from 1; None if the loss ended the test, and without looks.
        texts_needed: Number of texts that would show the loss of an open share to be within its limit; 0 if no number
            is known to help, None if these texts are enough, or if the loss was not measured.
    """

    name: str
    share: float
    loss: Increase | None
    outcome: Outcome
    label: str
    why: str = ""
    accuracy: PairedDifference | None = None
    expected: PairedDifference | None = None
    recall: tuple[RecallVerdict, ...] = ()
    recall_unknown: str = ""
    texts_needed: int | None = None
    look: int | None = None

    @property
    def questions(self) -> int:
        """Number of benchmark questions that judged the share."""
        return 0 if self.accuracy is None else self.accuracy.questions


def judge_shares(
    judged: Verdict, shares: Sequence[tuple[str, float]], stopped: Mapping[str, str] | None = None
) -> list[ShareVerdict]:
    """Return the verdicts on shares of one kind, with the names of their arms, from small to large, fixed before the
    questions were read. The list ends with the first share that is not safe; it is empty if the first share has no
    answers yet. ``stopped`` holds what shares lose that are not asked, by the names of their arms.
    """
    verdicts: list[ShareVerdict] = []
    for name, share in shares:
        loss = judged.losses.get(name)
        if loss is not None and exceeds(loss, judged.max_loss):
            why = loss_words(loss, judged.max_loss)
            verdicts.append(ShareVerdict(name, share, loss, Outcome.LOSES, str(Outcome.LOSES), why))
        elif stopped and name in stopped:
            label = f"{Outcome.LOSES} (held-out prompts)"
            why = f"{stopped[name]}, on the plan's own held-out prompts"
            verdicts.append(ShareVerdict(name, share, loss, Outcome.LOSES, label, why))
        elif name in judged.by_name:
            verdicts.append(share_verdict(judged.by_name[name], share))
        else:
            return verdicts
        if verdicts[-1].outcome is not Outcome.SAFE:
            return verdicts
    return verdicts


def goes_on(judged: ArmVerdict, looks: Sequence[Look], first: int) -> bool:
    """Return True if a later look asks an arm that was asked the questions of ``arm.look`` looks: it is shown neither
    to be safe nor to lose, and may be shown to be safe. The ``first`` questions, those of the first hours, are also
    asked if texts or recall questions are too few.
    """
    asked = judged.arm.look
    if judged.outcome is not Outcome.NOT_SHOWN or asked is None or asked >= len(looks):
        return False
    look, missing = looks[asked - 1], {gap.aspect for gap in judged.decision.gaps}
    if look.questions >= first and (
        Aspect.TEXT in missing or (Aspect.RECALL in missing and look.recall >= looks[-1].recall)
    ):
        return False
    return judged.accuracy is None or not is_hopeless(
        judged.judging.difference, judged.judging.standard_error, looks, look.questions, judged.max_points
    )


def largest_safe(verdicts: Sequence[ShareVerdict]) -> ShareVerdict | None:
    """Return the largest safe share; None if the first one fails."""
    return next((each for each in reversed(verdicts) if each.outcome is Outcome.SAFE), None)


def share_verdict(judged: ArmVerdict, share: float) -> ShareVerdict:
    """Return the verdict on a share from that on its arm, whose intervals are widened already."""
    if judged.accuracy is None and not judged.recall:
        raise VerdictError("these questions have no right answers, so no share can be judged. Choose other tasks")
    return ShareVerdict(
        judged.name,
        share,
        loss_increase(judged.metrics),
        judged.outcome,
        judged.label,
        judged.why,
        accuracy=judged.accuracy,
        expected=judged.expected,
        recall=judged.judged_recall,
        recall_unknown=judged.recall_unknown,
        look=judged.arm.look,
        texts_needed=next((gap.needed or 0 for gap in judged.decision.gaps if gap.aspect is Aspect.TEXT), None),
    )
