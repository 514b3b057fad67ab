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

from headscan.analysis.errors import VerdictError
from headscan.analysis.store.store import Store
from headscan.analysis.store.tables import LOSS
from headscan.analysis.verdicts.answer_sheets import finished_arms
from headscan.analysis.verdicts.judge import ArmVerdict, Outcome, arm_verdict, outcome_label
from headscan.analysis.verdicts.metrics import Increase, read_metrics
from headscan.analysis.verdicts.paired import PairedDifference
from headscan.analysis.verdicts.verdict_rows import RecallVerdict, StoredRows, widened


@dataclass(frozen=True)
class ShareVerdict:
    """Verdict on one nominal share of heads or of KV heads, 0 to 1.

    Attributes:
        loss: Increase of the held-out loss, in nats per token; None if it was not measured.
        why: Losses, or missing evidence; empty if the share is safe and its recall is known.
        accuracy: Comparison on the benchmark; None if the loss ended the test.
        recall_unknown: What of recall was not judged, and why; empty if all of it was, or if the loss ended the test.
        unjudged_recall: Only the names of what was not judged.
        too_few_questions: True if more questions could show all that is missing.
    """

    name: str
    share: float
    loss: Increase | None
    outcome: Outcome
    why: str = ""
    accuracy: PairedDifference | None = None
    recall: tuple[RecallVerdict, ...] = ()
    cache_left: float | None = None
    weights_left: float | None = None
    recall_unknown: str = ""
    unjudged_recall: str = ""
    too_few_questions: bool = False

    @property
    def label(self) -> str:
        """The verdict as a table shows it."""
        return outcome_label(self.outcome, self.too_few_questions, self.unjudged_recall)


def read_losses(store: Store, run_id: str, *, comparisons: int = 1) -> dict[str, Increase]:
    """Return the increase of the loss of ordinary text by arm name, with intervals widened for the comparisons."""
    arms = finished_arms(store, run_id)
    metrics = read_metrics(store, run_id, arms.baseline, comparisons=comparisons)
    losses = {
        arm.name: measure.increase
        for arm in arms.others
        for measure in metrics.get(arm.arm_id, ())
        if measure.metric == LOSS and measure.increase is not None
    }
    if not losses:
        raise VerdictError(f"run {run_id} has 0 arms with a loss (limit 1). Evaluate held-out text, too")
    return losses


def exceeds(loss: Increase | None, max_loss: float) -> bool:
    """Return True if a loss increase is shown to exceed the limit."""
    return loss is not None and loss.low > max_loss


def judge_shares(
    store: Store,
    run_id: str,
    shares: Sequence[tuple[str, float]],
    losses: Mapping[str, Increase],
    *,
    max_loss: float,
    comparisons: int,
) -> list[ShareVerdict]:
    """Judge shares of one kind, with the names of their arms, from small to large, fixed before the questions were
    read. The list ends with the first share that is not safe; it is empty if the first share has no answers yet.
    ``max_loss`` is in nats per token.
    """
    with store.reading():
        arms = finished_arms(store, run_id)
        stored = StoredRows.read(store, run_id, arms)
    by_name = {arm.name: arm for arm in arms.others}
    compared = stored.with_missing().by_arm()
    verdicts: list[ShareVerdict] = []
    for name, share in shares:
        loss = losses.get(name)
        if exceeds(loss, max_loss):
            assert loss is not None
            why = f"{loss.difference:+.3f} nats per token (limit {max_loss:g})"
            verdicts.append(ShareVerdict(name, share, loss, Outcome.LOSES, why))
        elif name in by_name:
            arm = by_name[name]
            outcome = arm_verdict(arm, widened(compared.get(arm.arm_id, {}), comparisons), comparisons=comparisons)
            verdicts.append(share_verdict(outcome, share, loss))
        else:
            return verdicts
        if verdicts[-1].outcome is not Outcome.SAFE:
            return verdicts
    return verdicts


def largest_safe(verdicts: Sequence[ShareVerdict]) -> ShareVerdict | None:
    """Return the largest safe share; None if the first one fails."""
    return next((each for each in reversed(verdicts) if each.outcome is Outcome.SAFE), None)


def share_verdict(outcome: ArmVerdict, share: float, loss: Increase | None) -> ShareVerdict:
    """Return the verdict on an arm whose interval is widened already."""
    if outcome.accuracy is None:
        raise VerdictError("these questions have no right answers, so no share can be judged. Choose other tasks")
    return ShareVerdict(
        outcome.name,
        share,
        loss,
        outcome.outcome,
        outcome.why,
        accuracy=outcome.accuracy,
        recall=outcome.judged_recall,
        cache_left=outcome.cache_left,
        weights_left=outcome.weights_left,
        recall_unknown=outcome.recall_unknown,
        unjudged_recall=outcome.unjudged_recall,
        too_few_questions=outcome.too_few_questions,
    )
