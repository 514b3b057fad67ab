"""Metrics of tasks without right answers, and the loss increase of an arm with its interval.

The documents of a log-likelihood are the same for the arm and the baseline, so differences are paired by document,
which verdicts and limits call a text.
"""

from __future__ import annotations

import sys
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import ceil, inf, isfinite, log, nan, sqrt
from typing import NamedTuple

import numpy as np

from headscan.errors import VerdictError
from headscan.store.records import ArmRecord
from headscan.store.store import Store
from headscan.store.tables import ACCURACY, BITS_PER_BYTE, BLEU, LOSS
from headscan.store.verdict_limits import MIN_EVIDENCE_TEXTS, MIN_TEXTS_IN_LIMIT, POWER, TAIL, z_quantile
from headscan.verdicts.answer_sheets import finished_arms
from headscan.verdicts.bounds import mean_ends
from headscan.verdicts.paired import Interval


class Rate(NamedTuple):
    """A metric that is a sum over documents, times ``factor``, divided by their tokens or bytes."""

    unit: str
    factor: float


#: Metrics whose rows of ``answers`` hold pairs of a sum and its tokens or bytes. Log-likelihoods are in nats.
RATES: Mapping[str, Rate] = {
    LOSS: Rate("nats per token", -1.0),
    BITS_PER_BYTE: Rate("bits per byte", -1 / log(2)),
    "next_token_accuracy": Rate("points", 100.0),
}


class Metric(NamedTuple):
    """How a metric of effects is shown: its ``title`` with the unit, its value times ``scale`` with ``digits`` digits
    after the point, and the ``unit`` of its changes.
    """

    title: str
    scale: float
    digits: int
    unit: str


#: Metrics of effects.
METRICS: Mapping[str, Metric] = {
    ACCURACY: Metric("accuracy in %", 100.0, 1, "points"),
    LOSS: Metric("loss in nats per token", 1.0, 3, "nats per token"),
    BITS_PER_BYTE: Metric("bits per byte", 1.0, 3, "bits per byte"),
    BLEU: Metric("BLEU", 1.0, 1, "points"),
}


#: Every finite increase is below.
_LARGEST_NUMBER = sys.float_info.max
#: How far one more document may be from the mean, over the distance of the farthest one.
REACH = 3.0


@dataclass(frozen=True)
class Increase:
    """Paired difference of a metric, arm minus baseline, with its 95 % interval over independent documents. The
    interval is unbounded with fewer than `MIN_EVIDENCE_TEXTS` documents. If an arm gives a text no probability, the
    difference and both ends of its interval are one infinity, however few the documents, and the arm loses.
    ``standard_error`` is that of the difference over documents; None if the interval is unbounded or infinite.
    """

    unit: str
    documents: int
    difference: float
    low: float
    high: float
    standard_error: float | None = None

    @property
    def interval(self) -> Interval:
        return Interval(self.low, self.difference, self.high)

    def words(self) -> str:
        return f"{self.numbers()} {self.unit}"

    def numbers(self) -> str:
        return self.interval.words(2 if self.unit == "points" else 4)


@dataclass(frozen=True)
class TaskMetric:
    """A metric of a task; None if lm-eval has no value. ``increase`` is the paired difference by document; None if the
    metric is no sum over documents.
    """

    task: str
    metric: str
    baseline: float | None
    arm: float | None
    increase: Increase | None = None

    def words(self) -> str:
        name = f"{self.task} {self.metric}"
        if self.arm is None and self.baseline is None:
            return f"{name} {'has no value' if self.increase is None else self.increase.words()}"
        text = f"{name}: {_number(self.arm)} against {_number(self.baseline)}"
        return text if self.increase is None else f"{text}: {self.increase.words()}"


def metric_words(metrics: Sequence[TaskMetric]) -> list[str]:
    """Return the metrics in words; bits per byte are left out next to the loss of the same text."""
    tasks_in_tokens = {measure.task for measure in metrics if measure.metric == LOSS}
    return [
        measure.words()
        for measure in metrics
        if not (measure.metric == BITS_PER_BYTE and measure.task in tasks_in_tokens)
    ]


def judged_losses(metrics: Sequence[TaskMetric]) -> list[TaskMetric]:
    """Return the losses that a verdict counts: nats per token, for which it has a limit, and where only bits per byte
    were measured, those that rise without any limit.
    """
    tasks_in_tokens = {measure.task for measure in metrics if measure.metric == LOSS}
    return [
        measure
        for measure in metrics
        if measure.metric == LOSS
        or (
            measure.metric == BITS_PER_BYTE
            and measure.task not in tasks_in_tokens
            and exceeds(measure.increase, _LARGEST_NUMBER)
        )
    ]


def exceeds(loss: Increase | None, max_loss: float) -> bool:
    """Return True if a loss increase is shown to exceed the limit."""
    return loss is not None and loss.low > max_loss


def is_within(loss: Increase | None, max_loss: float) -> bool:
    """Return True if a loss increase is shown to be within the limit, by enough texts."""
    return loss is not None and loss.high <= max_loss and loss.documents >= MIN_TEXTS_IN_LIMIT


def texts_needed(loss: Increase | None, max_loss: float, comparisons: float = 1) -> int | None:
    """Return the number of texts that would show, in four of five cases, that a rise of the loss is within its limit.

    The increase and the spread of the texts are assumed to be the true ones. With the number of texts ``n``, the part
    of the interval that the standard error makes narrows as ``n**-0.5``, and what the added text makes as ``1 / n``;
    without a standard error, all of it is of the first kind. The number is at least `MIN_TEXTS_IN_LIMIT`, and exactly
    that if the texts are too few for an interval.
    None if no number is known to help: the increase is unknown, or is itself at or above the limit. ``comparisons`` is
    the number of arms or kinds of savings for which the interval is widened.
    """
    if loss is None:
        return None
    if loss.high <= max_loss:
        return MIN_TEXTS_IN_LIMIT
    if loss.difference >= max_loss:
        return None
    if not isfinite(loss.high):
        return MIN_TEXTS_IN_LIMIT
    half, quantile = loss.high - loss.difference, z_quantile(TAIL / comparisons)
    sampled = half if loss.standard_error is None else min(half, quantile * loss.standard_error)
    reach = (1 + z_quantile(1 - POWER) / quantile) * sampled
    # reach * x + (half - sampled) * x**2 = the room below the limit, where x**2 is documents / n.
    root = (
        2
        * (max_loss - loss.difference)
        / (reach + sqrt(reach**2 + 4 * (half - sampled) * (max_loss - loss.difference)))
    )
    return max(MIN_TEXTS_IN_LIMIT, ceil(loss.documents / root**2))


def rate_increase(
    rate: Rate,
    baseline: np.ndarray,
    arm: np.ndarray,
    sizes: np.ndarray,
    documents: np.ndarray,
    *,
    comparisons: float = 1,
) -> Increase:
    """Return the paired difference of two rates, ``rate.factor * sum(arm - baseline) / sum(sizes)``, with its interval
    (`bounds`): documents are the unit, and one more document changes `REACH` times as far from the mean as the farthest
    one. The interval is unbounded with fewer than `MIN_EVIDENCE_TEXTS` documents, which may all change in one direction
    by chance. An infinite amount of one document makes the difference infinite, and its interval has no width: a mean
    that can be infinite is. Infinite amounts of both signs show nothing.

    In percent of 300 simulations of rises that are truly at the limit, the upper end of the interval is below, of one
    comparison and of any of three that are widened for their number:

    ============= ========= ======== ========
    rises         20 texts  48 texts 64 texts
    ============= ========= ======== ========
    normal        0.0, 0.3  0.0, 0.0 0.0, 0.0
    lognormal 1   0.0, 1.0  0.0, 0.3 0.3, 0.0
    lognormal 1.5 2.3, 4.7  2.7, 2.3 2.7, 1.0
    ============= ========= ======== ========

    The lognormal's logarithm has the deviation that is named. If a few documents in a thousand have most of the rise,
    they are missing from many samples, which no interval shows.

    ``baseline`` and ``arm`` are sums (rows,), ``sizes`` (rows,) their tokens or bytes, and ``documents`` (rows,) their
    documents, within which rows are correlated. The interval is widened for ``comparisons`` arms (Bonferroni).
    """
    amounts = (arm - baseline) * rate.factor
    document = np.unique(documents, return_inverse=True)[1]
    amount, size = np.bincount(document, amounts), np.bincount(document, sizes)
    count = len(size)
    if (infinite := np.unique(amounts[np.isinf(amounts)])).size:
        if len(infinite) > 1:
            return Increase(rate.unit, count, nan, -inf, inf)
        return Increase(rate.unit, count, *(3 * [float(infinite[0])]))
    ratio = float(amount.sum() / size.sum())
    if count < MIN_EVIDENCE_TEXTS:
        return Increase(rate.unit, count, ratio, -inf, inf)
    changes = ratio + (amount - ratio * size) / size.mean()  # linearised for documents of different sizes
    least, most = (float(ratio + REACH * (end - ratio)) for end in (changes.min(), changes.max()))
    (low,), (high,) = mean_ends(changes, least, most, comparisons)
    return Increase(rate.unit, count, ratio, float(low), float(high), float(changes.std(ddof=1)) / sqrt(count))


def read_metrics(
    store: Store, run_id: str, baseline: ArmRecord, *, comparisons: float = 1, arm_ids: Sequence[str] | None = None
) -> Mapping[str, tuple[TaskMetric, ...]]:
    """Return the metrics of tasks without right answers, by arm id. The interval of a loss is widened for the number of
    tasks with a loss, because a verdict counts each of them; None as ``arm_ids`` reads all arms.
    """
    rows = store.query(
        "SELECT r.arm_id, task, metric, r.value AS arm, b.value AS baseline"
        " FROM arm_results r JOIN arms a ON a.arm_id = r.arm_id"
        " LEFT JOIN (FROM arm_results WHERE arm_id = $2) b USING (task, metric, filter)"
        " WHERE a.run_id = $1 AND NOT r.is_group AND ($3 IS NULL OR list_contains($3, r.arm_id))"
        " AND task NOT IN (SELECT task FROM answers WHERE arm_id = $2 AND correct IS NOT NULL)"
        " ORDER BY r.arm_id, task, metric, filter",
        [run_id, baseline.arm_id, arm_ids],
    ).to_pylist()
    measured = dict.fromkeys((row["task"], row["metric"]) for row in rows)
    loss_tasks = sum(metric == LOSS for _, metric in measured)
    increases = {
        (task, metric): _increases(
            store, run_id, baseline, task, metric, comparisons * (loss_tasks if metric == LOSS else 1), arm_ids
        )
        for task, metric in measured
        if metric in RATES
    }
    metrics: dict[str, list[TaskMetric]] = defaultdict(list)
    for row in rows:
        increase = increases.get((row["task"], row["metric"]), {}).get(row["arm_id"])
        metrics[row["arm_id"]].append(
            TaskMetric(row["task"], row["metric"], row["baseline"], row["arm"], increase=increase)
        )
    return {arm_id: tuple(arm_metrics) for arm_id, arm_metrics in metrics.items()}


def read_losses(store: Store, run_id: str, *, comparisons: float = 1) -> dict[str, Increase]:
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


def _increases(
    store: Store,
    run_id: str,
    baseline: ArmRecord,
    task: str,
    metric: str,
    comparisons: float,
    arm_ids: Sequence[str] | None,
) -> dict[str, Increase]:
    """Return the increase of a rate by arm id; arms whose documents differ from the baseline's have none. A sum of an
    arm may be infinite: the arm gives a document no probability, and its loss rises without limit.
    """
    sum_, size = (f"(metrics ->> '$.{metric}[{index}]')::DOUBLE" for index in (0, 1))
    table = store.query(
        f"SELECT arm_id, coalesce(doc_hash, question::VARCHAR) AS document, {sum_} AS sum, {size} AS size"
        " FROM answers JOIN arms USING (arm_id) WHERE run_id = $1 AND task = $2 AND status = 'finished'"
        " AND ($3 IS NULL OR list_contains($3, arm_id)) ORDER BY arm_id, question",
        [run_id, task, None if arm_ids is None else [baseline.arm_id, *arm_ids]],
    )
    arm_ids = table["arm_id"].to_numpy()
    columns = {name: table[name].to_numpy() for name in ("document", "sum", "size")}
    rates: dict[str, dict[str, np.ndarray]] = {
        arm_id: {name: values[arm_ids == arm_id] for name, values in columns.items()} for arm_id in np.unique(arm_ids)
    }
    base = rates.pop(baseline.arm_id, None)
    if base is None or not _is_rate(base) or np.isinf(base["sum"]).any():
        return {}
    return {
        arm_id: rate_increase(
            RATES[metric], base["sum"], rate["sum"], base["size"], base["document"], comparisons=comparisons
        )
        for arm_id, rate in rates.items()
        if _is_rate(rate) and all(np.array_equal(base[name], rate[name]) for name in ("document", "size"))
    }


def _is_rate(values: Mapping[str, np.ndarray]) -> bool:
    """Return True if every row has a sum, and a size above 0."""
    sums, sizes = values["sum"].astype(np.float64), values["size"].astype(np.float64)
    return bool(len(sums) and not np.isnan(sums).any() and np.isfinite(sizes).all() and (sizes > 0).all())


def _number(value: float | None) -> str:
    return "no value" if value is None else f"{value:.4g}"
