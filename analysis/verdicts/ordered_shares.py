"""The largest safe share: shares of one kind of saving, tested from small to large until one fails.

The order is fixed before the questions are read, and a share is called safe only if all smaller ones are. So all tests
together have the error of one: the first share that is not harmless ends the tests in all but 2.5 % of runs (tests in a
fixed order: Maurer, Hothorn and Lehmacher 1995). Kinds of savings that share the questions divide that error
(``comparisons``).

Loss comes first, because its paired interval is narrow and needs few passes: a share whose interval lies above the
limit is out before any question is asked, and one whose interval reaches above it is not safe, whatever the answers.
Recall comes next, and the benchmark makes the claim.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import ceil, inf, isfinite
from statistics import NormalDist

from headscan.analysis.errors import VerdictError
from headscan.analysis.store.store import Store
from headscan.analysis.store.tables import LOSS
from headscan.analysis.store.verdict_limits import LEAST_LOSS_TEXTS, POWER, TAIL
from headscan.analysis.verdicts.answer_sheets import finished_arms
from headscan.analysis.verdicts.judge import ArmVerdict, Outcome, arm_verdict
from headscan.analysis.verdicts.metrics import Increase, read_metrics
from headscan.analysis.verdicts.paired import PairedDifference, about
from headscan.analysis.verdicts.verdict_rows import RecallVerdict, StoredRows, for_comparisons

#: Label of a share that more texts, whose loss is measured, could show to be safe.
TOO_FEW_TEXTS = "too few texts"


@dataclass(frozen=True)
class ShareVerdict:
    """Verdict on one nominal share of heads or of KV heads, 0 to 1.

    Attributes:
        loss: Increase of the held-out loss, in nats per token; None if it was not measured.
        label: The verdict as a table shows it; see `ArmVerdict.label`.
        why: Losses, or missing evidence; empty if the share is safe and its recall is known.
        accuracy: Comparison on the benchmark; None if the loss ended the test.
        recall_unknown: What of recall was not judged, and why; empty if all of it was, or if the loss ended the test.
        texts_needed: Number of texts that would show the loss of an open share to be within its limit; 0 if no number
            is known to, None if these texts are enough, or if the loss was not measured.
    """

    name: str
    share: float
    loss: Increase | None
    outcome: Outcome
    label: str
    why: str = ""
    accuracy: PairedDifference | None = None
    recall: tuple[RecallVerdict, ...] = ()
    cache_left: float | None = None
    weights_left: float | None = None
    recall_unknown: str = ""
    texts_needed: int | None = None


def read_losses(store: Store, run_id: str, *, comparisons: int = 1) -> dict[str, Increase]:
    """Return the increase of the loss of ordinary text by arm name, with intervals widened for the comparisons."""
    arms = finished_arms(store, run_id)
    metrics = read_metrics(store, run_id, arms.baseline, comparisons=comparisons)
    of_text = [
        (arm.name, measure) for arm in arms.others for measure in metrics.get(arm.arm_id, ()) if measure.metric == LOSS
    ]
    if any(measure.baseline == inf for _, measure in of_text):
        raise VerdictError(
            f"the whole model has an infinite loss in run {run_id}, so no increase is known. Use another dtype, or"
            " other texts"
        )
    losses = {name: measure.increase for name, measure in of_text if measure.increase is not None}
    if not losses:
        raise VerdictError(f"run {run_id} has 0 arms with a loss (limit 1). Evaluate held-out text, too")
    return losses


def exceeds(loss: Increase | None, max_loss: float) -> bool:
    """Return True if a loss increase is shown to exceed the limit."""
    return loss is not None and loss.low > max_loss


def enough_texts(loss: Increase, max_loss: float, comparisons: int = 1) -> int | None:
    """Return the number of texts with which the loss is shown to be within its limit in four of five cases, if this
    increase and the spread of the texts are the true ones: the interval narrows with the root of their number. At least
    `LEAST_LOSS_TEXTS`; None if these texts show it; 0 if no number is known to, because the increase itself exceeds the
    limit.

    Args:
        comparisons: Number of kinds of savings for which the interval is widened.
    """
    if loss.high <= max_loss and loss.documents >= LEAST_LOSS_TEXTS:
        return None
    if loss.difference >= max_loss:
        return 0
    if loss.high <= max_loss or not isfinite(loss.high):
        return LEAST_LOSS_TEXTS
    normal = NormalDist()
    spare = 1 + normal.inv_cdf(POWER) / normal.inv_cdf(1 - TAIL / comparisons)
    needed = loss.documents * (spare * (loss.high - loss.difference) / (max_loss - loss.difference)) ** 2
    return max(LEAST_LOSS_TEXTS, ceil(needed))


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
            verdicts.append(ShareVerdict(name, share, loss, Outcome.LOSES, str(Outcome.LOSES), why))
        elif name in by_name:
            arm = by_name[name]
            outcome = arm_verdict(
                arm, for_comparisons(compared.get(arm.arm_id, {}), comparisons), comparisons=comparisons
            )
            verdicts.append(share_verdict(outcome, share, loss, max_loss=max_loss))
        else:
            return verdicts
        if verdicts[-1].outcome is not Outcome.SAFE:
            return verdicts
    return verdicts


def largest_safe(verdicts: Sequence[ShareVerdict]) -> ShareVerdict | None:
    """Return the largest safe share; None if the first one fails."""
    return next((each for each in reversed(verdicts) if each.outcome is Outcome.SAFE), None)


def share_verdict(outcome: ArmVerdict, share: float, loss: Increase | None, *, max_loss: float = inf) -> ShareVerdict:
    """Return the verdict on an arm whose intervals are widened already. An arm that shows no loss is safe only if the
    upper end of its loss is at most ``max_loss``, in nats per token.
    """
    if outcome.accuracy is None:
        raise VerdictError("these questions have no right answers, so no share can be judged. Choose other tasks")
    judged, label, why, texts = outcome.outcome, outcome.label, outcome.why, None
    if judged is not Outcome.LOSES and loss is not None:
        texts = enough_texts(loss, max_loss, outcome.comparisons)
    if loss is not None and texts is not None:
        # More texts help only if nothing else stands in the way for which no number of questions does.
        label = TOO_FEW_TEXTS if texts and label != Outcome.NOT_SHOWN else str(Outcome.NOT_SHOWN)
        judged, why = Outcome.NOT_SHOWN, "; ".join(filter(None, [_loss_gap(loss, max_loss, texts), why]))
    return ShareVerdict(
        outcome.name,
        share,
        loss,
        judged,
        label,
        why,
        accuracy=outcome.accuracy,
        recall=outcome.judged_recall,
        cache_left=outcome.cache_left,
        weights_left=outcome.weights_left,
        recall_unknown=outcome.recall_unknown,
        texts_needed=texts,
    )


def _loss_gap(loss: Increase, max_loss: float, needed: int) -> str:
    """Return why a loss is not shown to be within its limit; ``needed`` is `enough_texts`."""
    of = f"{loss.documents:,} text{'s' * (loss.documents != 1)}"
    if not needed:
        high = f"the loss may rise by {loss.high:.3g} nats per token (limit {max_loss:g})"
        return f"{high}, and more texts do not help: the estimate itself is {loss.difference:+.3g}"
    if loss.high <= max_loss or not isfinite(loss.high):
        found = f"{of} cannot show that the loss rises by at most {max_loss:g} nats per token"
    else:
        found = f"the loss may rise by {loss.high:.3g} nats per token (limit {max_loss:g})"
    return f"needs about {about(needed)} texts: {found}"
