"""Verdicts on the arms of a run, from accuracy, recall, the loss of text and random controls."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from html import escape
from typing import Any

from headscan.errors import VerdictError
from headscan.store.records import ArmRecord
from headscan.store.store import Store
from headscan.store.tables import LOSS
from headscan.store.verdict_limits import BENCHMARK_SPLITS, MARGIN, MAX_LOSS, RECALL_SPLITS
from headscan.text_tables import counted
from headscan.verdicts.answer_sheets import BENCHMARK, EXPECTED, Scope, finished_arms
from headscan.verdicts.arm_verdict import ArmVerdict
from headscan.verdicts.controls import Controls, PrunedControls, judge_controls, pruned_controls
from headscan.verdicts.looks import Look
from headscan.verdicts.metrics import Increase, TaskMetric, read_losses, read_metrics
from headscan.verdicts.paired import PairedDifference
from headscan.verdicts.scope_verdicts import RecallVerdict, task_verdicts, widened_differences
from headscan.verdicts.verdict_rows import differences_by_arm, read_verdict_rows
from headscan.verdicts.verdict_table import verdict_html, verdict_text


@dataclass(frozen=True)
class Verdict:
    """Verdicts on the finished arms of an evaluate run.

    Attributes:
        finished: All finished arms but the baseline, controls last.
        unrecorded: Rows of ``arm_verdicts`` that were computed because the store lacks them.
        max_loss: Limit of the rise of the text's loss, in nats per token.
        losses: Increases of the loss of text that another run measured, by arm, also of arms that were not asked.
        looks: The planned looks of a study's run, whose arms may have been asked different numbers of questions.
    """

    run_id: str
    model: str
    finished: tuple[ArmVerdict, ...]
    unfinished: int = 0
    unrecorded: tuple[Mapping[str, Any], ...] = field(default=(), repr=False)
    max_loss: float = MAX_LOSS
    looks: tuple[Look, ...] = ()
    losses: Mapping[str, Increase] = field(default_factory=dict)

    def __repr__(self) -> str:
        outcomes = Counter(str(arm.outcome) for arm in self.finished if not arm.kind.is_control)
        counts = ", ".join(f"{count} {outcome}" for outcome, count in outcomes.items())
        finished = self.progress or counted(len(self.finished), "arm")
        return f"Verdict(run {self.run_id} of {self.model}: {finished}; {counts})"

    def __str__(self) -> str:
        """Return the progress if arms are unfinished, and the verdicts as a table."""
        table = verdict_text(self.by_name.values()) or "no arms but the baseline and controls"
        return "\n\n".join(filter(None, [self.progress, table]))

    def _repr_html_(self) -> str:
        head = ": ".join(filter(None, [f"run {self.run_id}", self.progress]))
        return f"<p>{escape(head)}</p>{verdict_html(self.by_name.values())}"

    @property
    def arms(self) -> tuple[ArmVerdict, ...]:
        """The judged arms: none if no benchmark task has right answers (perplexity)."""
        return tuple(arm for arm in self.finished if arm.accuracy is not None)

    @property
    def by_name(self) -> dict[str, ArmVerdict]:
        """All finished arms by name; those without accuracy come last."""
        return {arm.name: arm for arm in sorted(self.finished, key=lambda arm: arm.accuracy is None)}

    @property
    def progress(self) -> str:
        """Number of finished arms in words, the baseline included; empty if all are finished."""
        finished = 1 + len(self.finished)
        return f"{finished} of {finished + self.unfinished} arms finished" if self.unfinished else ""

    def sentences(self) -> list[str]:
        """Return one sentence per arm that is no control, after the progress if arms are unfinished. A last one says
        that none of several arms has a random control.
        """
        arms = [arm for arm in self.by_name.values() if not arm.kind.is_control]
        lone = len(arms) > 1 and all(arm.controls is None for arm in arms)
        lines = [arm.sentence(name_missing_controls=not lone) for arm in arms]
        lines += ["No arm has a random control."] * lone
        return [f"{self.progress}.", *lines] if self.progress else lines


def judge(
    store: Store,
    run_id: str,
    *,
    max_loss: float | None = None,
    max_points: float | None = None,
    loss_increases: Mapping[str, Increase] | None = None,
    comparisons: float | None = None,
    baseline_alone: bool = False,
) -> Verdict:
    """Judge every finished arm of an evaluate run. Comparisons that the store lacks are computed, not written.

    What is None is that by which the run's job judged, so that one run has one verdict: limits, kinds of savings,
    planned looks, and the run that measured the loss of text. Without such a record it is the default.

    Args:
        max_loss: Maximum increase of the loss of held-out text of a safe arm, in nats per token. An arm loses if the
            interval lies above the limit, and is not shown to be safe if the interval reaches above it.
        max_points: Maximum loss of accuracy of a safe arm, in percentage points.
        loss_increases: Increase of the loss of text of each arm, by its name, if another run measured them; None reads
            the judged run's own. The increases must be widened for ``comparisons`` already.
        comparisons: Number of arms, or of kinds of savings, that are judged together. The intervals of accuracy and
            recall are widened so that all hold at once with 95 % probability, at all looks.
        baseline_alone: True returns a verdict without arms if the baseline is the only finished arm; False raises.

    Raises:
        VerdictError: The run has no finished baseline or, without ``baseline_alone``, no other finished arm, or a loss
            of its own next to ``loss_increases``.
    """
    with store.reading():
        run = store.resolve_run(run_id, "evaluate")
        run_id, by = run["run_id"], judged_by(run)
        looks = tuple(Look(*each) for each in by.get("looks", ()))
        kinds = by.get("kinds", 1) if comparisons is None else comparisons
        max_loss = by.get("max_loss", MAX_LOSS) if max_loss is None else max_loss
        max_points = by.get("max_points", MARGIN) if max_points is None else max_points
        if loss_increases is None and "losses" in by:
            loss_increases = read_losses(store, by["losses"], comparisons=kinds)
        loss_increases = loss_increases or {}
        arms = finished_arms(store, run_id)
        if not arms.others:
            if baseline_alone:
                return Verdict(run_id, run["model"], (), arms.unfinished, (), max_loss, looks, loss_increases)
            raise VerdictError(
                f"run {run_id} has 0 finished arms in addition to the baseline (limit 1). Ablate heads with"
                " `headscan evaluate`"
            )
        metrics = read_metrics(store, run_id, arms.baseline, comparisons=kinds)
    has_own_loss = any(measure.metric == LOSS for arm_metrics in metrics.values() for measure in arm_metrics)
    if loss_increases and has_own_loss:
        raise VerdictError(
            f"run {run_id} has a loss of text of its own (limit 1 loss per arm). Leave out `loss_increases`"
        )
    rows = read_verdict_rows(store, run_id)
    differences = differences_by_arm([*rows.stored, *rows.computed])
    benchmark_differences = {arm_id: scopes[BENCHMARK] for arm_id, scopes in differences.items() if BENCHMARK in scopes}
    controls = judge_controls(arms.others, benchmark_points(differences))
    by_look = [look[2:] for look in looks] if comparisons is None else []
    widened = {arm.arm_id: by_look[arm.look - 1] if by_look and arm.look else (kinds, kinds) for arm in arms.others}
    verdicts = tuple(
        arm_verdict(
            arm,
            differences.get(arm.arm_id, {}),
            metrics=(*metrics.get(arm.arm_id, ()), *_loss_metric(loss_increases.get(arm.name))),
            controls=controls.get(arm.arm_id),
            pruned=pruned_controls(arm, arms.others, benchmark_differences, metrics),
            comparisons=widened[arm.arm_id][0],
            recall_comparisons=widened[arm.arm_id][1],
            max_loss=max_loss,
            max_points=max_points,
        )
        for arm in arms.others
    )
    return Verdict(
        run_id, run["model"], verdicts, arms.unfinished, tuple(rows.computed), max_loss, looks, loss_increases
    )


def judged_by(run: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return what the job of an evaluate run judges by, of a row of the store: ``max_loss``, ``max_points``, ``kinds``,
    ``looks`` (fields of `Look`) and ``losses``, the id of the run that measured the loss of text; what is missing has
    its default.
    """
    found: Mapping[str, Any] = (run["report"] or {}).get("judging", {}) | run["config"].get("judging", {})
    return found


def _loss_metric(loss: Increase | None) -> tuple[TaskMetric, ...]:
    """Return the loss increase that another run measured, as a metric of an arm; none if it measured none."""
    return () if loss is None else (TaskMetric("text", LOSS, None, None, loss),)


def benchmark_points(differences: Mapping[str, Mapping[Scope, PairedDifference]]) -> dict[str, float]:
    """Return the benchmark difference by arm id, in percentage points."""
    return {arm_id: scopes[BENCHMARK].difference for arm_id, scopes in differences.items() if BENCHMARK in scopes}


def arm_verdict(
    arm: ArmRecord,
    differences: Mapping[Scope, PairedDifference],
    *,
    metrics: tuple[TaskMetric, ...] = (),
    controls: Controls | None = None,
    pruned: tuple[PrunedControls, ...] = (),
    confirmation: bool = False,
    comparisons: float = 1,
    recall_comparisons: float | None = None,
    max_loss: float = MAX_LOSS,
    max_points: float = MARGIN,
) -> ArmVerdict:
    """Judge one arm by its differences from the baseline.

    Args:
        differences: Differences by scope, of one arm alone; an arm without one on the benchmark has no accuracy.
        confirmation: True if the questions are the judging part of a sweep.
        comparisons: Number of arms for which the intervals are to be widened; ``recall_comparisons`` in recall, None
            uses the same number.
        max_loss: Limit of the rise of the text's loss, in nats per token.
        max_points: Limit of the loss of accuracy, in percentage points.
    """
    recall_share = 1 - 1 / RECALL_SPLITS if confirmation else 1.0
    recall_comparisons = comparisons if recall_comparisons is None else recall_comparisons
    widened = widened_differences(differences, comparisons, recall_comparisons)
    return ArmVerdict(
        arm=arm,
        recall=tuple(
            RecallVerdict(scope.task, paired, recall_share, recall_comparisons)
            for scope, paired in widened.items()
            if scope.is_recall_family
        ),
        metrics=metrics,
        pruned_controls=pruned,
        accuracy=widened.get(BENCHMARK),
        expected=widened.get(EXPECTED),
        tasks=task_verdicts(widened, max_points),
        controls=controls,
        judging_share=1 - 1 / BENCHMARK_SPLITS if confirmation else 1.0,
        comparisons=comparisons,
        max_loss=max_loss,
        max_points=max_points,
    )
