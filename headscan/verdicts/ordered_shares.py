"""The largest safe share: shares of one kind of saving, tested from small to large until one fails.

The order is fixed before the questions are read, and a share is called safe only if all smaller ones are. So all tests
together have the error of one: the first share that is not harmless ends the tests in all but 2.5 % of runs (tests in a
fixed order: Maurer, Hothorn and Lehmacher 1995). Kinds of savings that share the questions divide that error
(``comparisons``).

Loss comes first, because its paired interval is narrow and needs few passes: a share whose interval lies above the
limit is out before any question is asked. Recall comes next, and the benchmark makes the claim.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import inf

from headscan.errors import VerdictError
from headscan.store.store import Store
from headscan.store.tables import LOSS
from headscan.store.verdict_limits import MARGIN
from headscan.verdicts.answer_sheets import finished_arms
from headscan.verdicts.arm_verdict import ArmVerdict, Aspect, Outcome, loss_words
from headscan.verdicts.controls import loss_increase
from headscan.verdicts.judge import judge
from headscan.verdicts.metrics import Increase, exceeds, read_metrics
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
    cache_left: float | None = None
    weights_left: float | None = None
    recall_unknown: str = ""
    texts_needed: int | None = None


def read_losses(store: Store, run_id: str, *, comparisons: int = 1) -> dict[str, Increase]:
    """Return the increase of the loss of ordinary text by arm name, with intervals widened for the comparisons."""
    arms = finished_arms(store, run_id)
    metrics = read_metrics(store, run_id, arms.baseline, comparisons=comparisons)
    text_losses = [
        (arm.name, measure) for arm in arms.others for measure in metrics.get(arm.arm_id, ()) if measure.metric == LOSS
    ]
    if any(measure.baseline == inf for _, measure in text_losses):
        raise VerdictError(
            f"the whole model has an infinite loss in run {run_id}, so no increase is known. Use another dtype, or"
            " other texts"
        )
    losses = {name: measure.increase for name, measure in text_losses if measure.increase is not None}
    if not losses:
        raise VerdictError(f"run {run_id} has 0 arms with a loss (limit 1). Evaluate held-out text, too")
    return losses


def judge_shares(
    store: Store,
    run_id: str,
    shares: Sequence[tuple[str, float]],
    losses: Mapping[str, Increase],
    *,
    max_loss: float,
    max_points: float = MARGIN,
    comparisons: int,
    stopped: Mapping[str, str] | None = None,
) -> list[ShareVerdict]:
    """Judge shares of one kind, with the names of their arms, from small to large, fixed before the questions were
    read. The list ends with the first share that is not safe; it is empty if the first share has no answers yet.
    ``max_loss`` is in nats per token, and ``max_points`` in percentage points. ``stopped`` holds what shares lose that
    are not asked, by the names of their arms.
    """
    judged = judge(
        store,
        run_id,
        loss_increases=losses,
        max_loss=max_loss,
        max_points=max_points,
        comparisons=comparisons,
        baseline_alone=True,
    ).by_name
    verdicts: list[ShareVerdict] = []
    for name, share in shares:
        loss = losses.get(name)
        if loss is not None and exceeds(loss, max_loss):
            why = loss_words(loss, max_loss)
            verdicts.append(ShareVerdict(name, share, loss, Outcome.LOSES, str(Outcome.LOSES), why))
        elif stopped and name in stopped:
            label = f"{Outcome.LOSES} (held-out prompts)"
            why = f"{stopped[name]}, on the plan's own held-out prompts"
            verdicts.append(ShareVerdict(name, share, loss, Outcome.LOSES, label, why))
        elif name in judged:
            verdicts.append(share_verdict(judged[name], share))
        else:
            return verdicts
        if verdicts[-1].outcome is not Outcome.SAFE:
            return verdicts
    return verdicts


def largest_safe(verdicts: Sequence[ShareVerdict]) -> ShareVerdict | None:
    """Return the largest safe share; None if the first one fails."""
    return next((each for each in reversed(verdicts) if each.outcome is Outcome.SAFE), None)


def share_verdict(judged: ArmVerdict, share: float) -> ShareVerdict:
    """Return the verdict on a share from that on its arm, whose intervals are widened already."""
    if judged.accuracy is None:
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
        cache_left=judged.arm.cache_left,
        weights_left=judged.arm.weights_left,
        recall_unknown=judged.recall_unknown,
        texts_needed=next((gap.needed or 0 for gap in judged.decision.gaps if gap.aspect is Aspect.TEXT), None),
    )
