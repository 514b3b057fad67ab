"""Verdict of a sweep: selection on some questions, judgement on others.

The best of many arms looks too good on the questions that selected it. On other questions its interval is as valid as
that of an arm chosen in advance. Every arm answers all questions, so the split costs no computation. Half of the
benchmark selects, but only a quarter of the recall texts: the verdict needs nearly all of them to show that recall is
kept, and the selection does not.

Questions that judge again and again are used up: of 20 arms that lose just one point, at least one is called safe in
39 % of simulated sweeps (`docs/verdicts.md`). The store holds every arm that was judged, and all of them
together share the error of one, with which one is called safe in 2.7 %.

Random controls differ by seed, not by question, so other questions do not correct a rank among them for the selection.
Random curves go through the same selection instead.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa

from headscan.store.records import ArmKind, ArmRecord
from headscan.store.scan_tables import literal
from headscan.store.store import Store
from headscan.store.tables import ALL_TASKS, CONFIRMATION, SELECTION, SPLIT_VERDICTS
from headscan.store.verdict_limits import MAX_LOSS, MIN_RETAINED
from headscan.text_tables import counted
from headscan.verdicts.answer_sheets import BENCHMARK, AnswerSheets, can_be_judged, finished_arms, read_answers
from headscan.verdicts.arm_verdict import ArmVerdict
from headscan.verdicts.controls import SelectedRank, Standing, controls_needed, controls_of, judge_controls
from headscan.verdicts.judge import Verdict, arm_verdict, benchmark_points
from headscan.verdicts.metrics import read_metrics
from headscan.verdicts.verdict_rows import differences_by_arm, rows_of_arm
from headscan.verdicts.verdict_table import verdict_text

#: A sweep selects one arm of each kind, because rules and masks are used differently.
KINDS = (ArmKind.RULE, ArmKind.MASK)


class Candidate(NamedTuple):
    """An arm that a sweep may select, judged on the selecting questions.

    Attributes:
        curve: The same for arms that differ only in their share.
        share: Measured share of ablated heads, above 0, at most 1.
        loses_recall: True if the best estimate of recall is below the limit of a safe arm.
        low: Lower end of the difference to the baseline, in percentage points.
    """

    name: str
    curve: tuple[str | None, ...]
    share: float
    safe: bool
    loses_recall: bool
    low: float


@dataclass(frozen=True)
class SweepChoice:
    """The selected rule or mask of a sweep, with its verdict.

    Attributes:
        selection_safe: False if no arm is safe on the selecting questions; this one comes closest (see
            `best_candidate`).
        selected_on: Number of benchmark questions that selected it.
        confirmed: True if other questions judged it.
        comparisons: Number of arms that the store has judged on these other questions of the benchmark, for which the
            interval is widened; 1 if the same questions selected and judged it. `RecallVerdict` has that of recall.
    """

    verdict: ArmVerdict
    candidates: int
    selection_safe: bool
    selected_on: int
    confirmed: bool
    comparisons: int = 1

    def __str__(self) -> str:
        return self.sentence()

    def sentence(self) -> str:
        """Return selection, judging questions and verdict as text."""
        return f"{self.origin()}: {self.verdict.sentence()}"

    def origin(self) -> str:
        """Return what the arm was selected from, and the questions that selected and judged it."""
        arms = counted(self.candidates, self.verdict.kind.label)
        best = f"Best of {arms}" if self.selection_safe else f"Closest of {arms}, none of which is safe"
        judged_on = self.verdict.paired.questions
        if self.confirmed:
            questions = f"selected on {counted(self.selected_on, 'question')} and judged on {judged_on:,} others"
            recall = max((each.comparisons for each in self.verdict.judged_recall), default=self.comparisons)
            if max(self.comparisons, recall) > 1:
                judged = counted(self.comparisons, "arm")
                questions += f" by intervals widened for the {judged} that they have judged"
                questions += f" ({recall} in recall)" * (recall != self.comparisons)
        else:
            questions = (
                f"selected and judged on the same {judged_on:,} questions, so its interval is not corrected for the"
                " selection"
            )
        return f"{best}, {questions}"


def choices_text(choices: Sequence[SweepChoice]) -> str:
    """Return how each arm of a sweep was selected, the verdicts, and the safe arms."""
    safe = [choice.verdict.name for choice in choices if choice.verdict.is_safe]
    confirmed = all(choice.confirmed for choice in choices)
    how = "confirmed on other questions" if confirmed else "not corrected for the selection"
    origins = "\n".join(f"{choice.verdict.name}: {choice.origin()}" for choice in choices)
    line = f"safe within one point, {how}: {', '.join(safe) or 'no arm'}"
    return "\n\n".join(filter(None, [origins, verdict_text(choice.verdict for choice in choices), line]))


def best_candidate(candidates: Iterable[Candidate]) -> Candidate | None:
    """Return the candidate with the largest ``(share, low)`` of those that are safe together with all smaller shares
    of their curve; without any, the one with the largest ``(not loses_recall, low)``; None without candidates.
    """
    curves: dict[tuple[str | None, ...], list[Candidate]] = defaultdict(list)
    for candidate in candidates:
        curves[candidate.curve].append(candidate)
    qualified = [candidate for curve in curves.values() for candidate in _up_to_the_first_failure(curve)]
    if qualified:
        return max(qualified, key=lambda candidate: (candidate.share, candidate.low))
    everything = (candidate for curve in curves.values() for candidate in curve)
    return max(everything, key=lambda candidate: (not candidate.loses_recall, candidate.low), default=None)


def _up_to_the_first_failure(curve: Sequence[Candidate]) -> list[Candidate]:
    first_failed = min((candidate.share for candidate in curve if not candidate.safe), default=np.inf)
    return [candidate for candidate in curve if candidate.share < first_failed]


def judge_sweep(store: Store, verdict: Verdict, *, confirm: bool = True) -> tuple[SweepChoice, ...]:
    """Select and judge the best rule and mask of a sweep: at most one choice per kind, and none if no arm was chosen by
    a score, or if there is no accuracy to compare. Nothing is written: comparisons that the store lacks are computed
    and stay in memory. With ``confirm``, one part of the questions selects and the other judges (the view
    ``question_split``); without it all questions do both, and the interval is too optimistic. The loss of text, which
    has no parts, counts in the verdict and not in the selection, except without ``confirm``.
    """
    sweep = SweepConfirmation(store, verdict.run_id, verdict.max_loss)
    return sweep.confirm().choices if confirm else sweep.judge_on_the_same(verdict)


def record_confirmation(store: Store, run_id: str) -> None:
    """Write the comparisons behind `judge_sweep` that the store lacks. The job that sweeps calls this at its end. A new
    judgement also widens those of earlier sweeps on the same questions.
    """
    confirmed = SweepConfirmation(store, run_id).confirm()
    if confirmed.rows and not confirmed.recorded:
        store.replace_split_verdicts(run_id, pa.Table.from_pylist(confirmed.rows))
    for other in sorted(judged_on_same(store, run_id).runs - {run_id}):
        if not can_be_judged(store, other):
            continue
        recorded, arms = _recorded(store, other), finished_arms(store, other).others
        # Its questions overlap with those of other runs than this run's do.
        rows = _rejudged(recorded, arms, judged_on_same(store, other).comparisons())
        if rows != recorded:
            store.replace_split_verdicts(other, pa.Table.from_pylist(rows))


class Comparisons(NamedTuple):
    """Numbers of arms that the judging questions of a sweep have judged, in the benchmark and in recall."""

    benchmark: int
    recall: int


class JudgedArms(NamedTuple):
    """Recorded arms, by run, that were judged on the questions that judge a run's arms."""

    benchmark: dict[str, set[str]]
    recall: dict[str, set[str]]

    @property
    def runs(self) -> set[str]:
        return self.benchmark.keys() | self.recall.keys()

    def comparisons(self, more: Iterable[str] = ()) -> Comparisons:
        """Return the number of arms, with those whose ids are in ``more``."""
        return Comparisons(*(len(set(more).union(*judged.values())) for judged in self))


def judged_on_same(store: Store, run_id: str) -> JudgedArms:
    """Return the arms that were judged on the same questions as the arms of a run. The runs have the same model, and
    their judging parts of the benchmark, or of recall, have a question in common: a document of a task, or a recall
    question with the same seed, whose text the seed, the task and the number decide.
    """
    with store.reading():
        judged: dict[str, set[str]] = defaultdict(set)
        for row in store.query(
            "SELECT DISTINCT r.run_id, v.arm_id FROM split_verdicts v JOIN arms a ON a.arm_id = v.arm_id"
            " JOIN runs r ON r.run_id = a.run_id JOIN runs own ON own.run_id = $1"
            f" WHERE v.part = {literal(CONFIRMATION)} AND (r.run_id = own.run_id"
            " OR (r.weights_hash IS NOT DISTINCT FROM own.weights_hash"
            " AND r.model_config_hash IS NOT DISTINCT FROM own.model_config_hash"
            " AND (own.weights_hash IS NOT NULL OR r.model = own.model)))",
            [run_id],
        ).to_pylist():
            judged[row["run_id"]].add(row["arm_id"])
        others = judged.keys() - {run_id}
        overlapping = []
        if others:
            overlapping = store.query(
                "WITH asked AS (SELECT s.run_id, s.recall, s.task,"
                " CASE WHEN s.recall THEN concat_ws(' ', r.config ->> '$.recall.seed', s.question)"
                " ELSE coalesce(q.doc_hash, s.question::VARCHAR) END AS document"
                " FROM all_question_split s JOIN runs r ON r.run_id = s.run_id"
                " JOIN arms a ON a.run_id = s.run_id AND a.kind = 'baseline'"
                " JOIN answers q ON q.arm_id = a.arm_id AND q.task = s.task AND q.question = s.question"
                f" WHERE s.part = {literal(CONFIRMATION)} AND list_contains($2, s.run_id))"
                " SELECT DISTINCT o.recall, o.run_id FROM asked o JOIN asked own USING (recall, task, document)"
                " WHERE own.run_id = $1",
                [run_id, [run_id, *others]],
            ).to_pylist()
    shared = {(row["recall"], row["run_id"]) for row in overlapping}
    return JudgedArms(
        *(
            {run: arms for run, arms in judged.items() if run == run_id or (recall, run) in shared}
            for recall in (False, True)
        )
    )


class _ConfirmedChoices(NamedTuple):
    """Selected arms and their rows of ``split_verdicts``; ``recorded`` is True if the store has exactly these."""

    choices: tuple[SweepChoice, ...]
    rows: list[dict[str, Any]]
    recorded: bool


class _Selected(NamedTuple):
    """What the selecting questions choose: arm, candidate and number of candidates of each kind's selected arm, and the
    best arms of random curves, by kind; ``judged`` are the verdicts of the arms on these questions, by name.
    """

    judged: Mapping[str, ArmVerdict]
    best: list[tuple[ArmRecord, Candidate, int]]
    randoms: dict[ArmKind, list[tuple[ArmRecord, Candidate]]]


class SweepConfirmation:
    """The selection of a sweep's best arms and their judgement, from the finished arms of a run."""

    def __init__(self, store: Store, run_id: str, max_loss: float = MAX_LOSS) -> None:
        self._store, self._run_id, self._max_loss = store, run_id, max_loss
        finished = finished_arms(store, run_id)
        self._baseline, self._finished = finished.baseline, finished.others
        # Later evaluations into the run change neither the choice nor its rank. In a run that no sweep made, all arms
        # count.
        self._arms = tuple(arm for arm in finished.others if arm.config.get("swept")) or finished.others
        self._scored = [
            arm for arm in self._arms if arm.kind in KINDS and arm.criterion is not None and arm.ablated_share
        ]
        self._recorded = _recorded(store, run_id)

    def judge_on_the_same(self, verdict: Verdict) -> tuple[SweepChoice, ...]:
        """Return the choices that all questions select and judge."""
        judged = {arm.name: arm for arm in verdict.arms}
        curves = {kind: self._random_curves(kind) for kind in KINDS}
        selected = self._select(judged, {name: arm.is_safe for name, arm in judged.items()}, curves)
        points = {arm.arm_id: judged[arm.name].paired.difference for arm in self._arms if arm.name in judged}
        return self._choices(selected, judged, points)

    def confirm(self) -> _ConfirmedChoices:
        """Select the best arms on one part of the questions, and judge them on the other."""
        if not self._scored:
            return _ConfirmedChoices((), [], True)
        first, selected = self._select_on_first_part()
        second, points = self._judge_on_second_part(selected)
        comparisons = judged_on_same(self._store, self._run_id).comparisons({row["arm_id"] for row in second})
        second = _rejudged(second, self._finished, comparisons)
        judged = self._verdicts(selected, second, points, comparisons)
        choices = self._choices(selected, judged, points, confirmed=True, comparisons=comparisons.benchmark)
        recorded = _by_key(self._recorded)
        rows = recorded | _by_key([*first, *second])
        return _ConfirmedChoices(choices, list(rows.values()), rows == recorded)

    def _select_on_first_part(self) -> tuple[list[dict[str, Any]], _Selected]:
        """Return the rows of ``split_verdicts`` on the selecting part, and the arms that it selects."""
        curves = {kind: self._random_curves(kind) for kind in KINDS}
        # Fewer random curves give no rank, so they are not compared.
        ranked = {
            kind: kind_curves if len(kind_curves) >= controls_needed(self._scores(kind)) else []
            for kind, kind_curves in curves.items()
        }
        arms = [*self._scored, *(arm for kind_curves in ranked.values() for curve in kind_curves for arm in curve)]
        rows = self._rows_of_part(arms, SELECTION)
        differences = differences_by_arm(rows)
        verdicts = (arm_verdict(arm, differences.get(arm.arm_id, {})) for arm in arms)
        judged = {verdict.name: verdict for verdict in verdicts if verdict.accuracy is not None}
        return rows, self._select(judged, {name: _may_be_selected(arm) for name, arm in judged.items()}, ranked)

    def _select(
        self,
        judged: Mapping[str, ArmVerdict],
        safe: Mapping[str, bool],
        curves: Mapping[ArmKind, Sequence[Sequence[ArmRecord]]],
    ) -> _Selected:
        """Return the best arm of each kind and of each random curve; ``judged`` and ``safe`` are by arm name."""

        def best_of(arms: Sequence[ArmRecord]) -> list[tuple[ArmRecord, Candidate, int]]:
            candidates = [
                Candidate(
                    arm.name,
                    curve=(arm.criterion, arm.selection),
                    share=arm.ablated_share or 0.0,
                    safe=safe[arm.name],
                    loses_recall=_loses_recall(judged[arm.name]),
                    low=judged[arm.name].judging.low,
                )
                for arm in arms
                if arm.name in judged
            ]
            best = best_candidate(candidates)
            return [(arm, best, len(candidates)) for arm in arms if best is not None and arm.name == best.name]

        best = [each for kind in KINDS for each in best_of([arm for arm in self._scored if arm.kind is kind])]
        randoms = {
            kind: [(arm, candidate) for curve in kind_curves for arm, candidate, _ in best_of(curve)]
            for kind, kind_curves in curves.items()
        }
        return _Selected(judged, best, randoms)

    def _judge_on_second_part(self, selected: _Selected) -> tuple[list[dict[str, Any]], dict[str, float]]:
        """Return the rows of ``split_verdicts`` of the selected arms on the judging part, and of those that were
        selected before, which count as comparisons, too; and the benchmark differences by arm id of the selected arms
        and of their controls.
        """
        best = [arm for arm, _, _ in selected.best]
        best_ids = {arm.arm_id for arm in best}
        randoms = {control for arm in best for control in controls_of(arm, self._arms)}
        randoms |= {arm for kind_randoms in selected.randoms.values() for arm, _ in kind_randoms}
        controls = [arm for arm in self._arms if arm in randoms]
        rows = [row | {"selected": True} for row in self._rows_of_part(best, CONFIRMATION)]
        points = self._points(controls) | benchmark_points(differences_by_arm(rows))
        rows += [
            row | {"selected": False}
            for row in self._recorded
            if row["part"] == CONFIRMATION and row["arm_id"] not in best_ids
        ]
        return rows, points

    def _verdicts(
        self, selected: _Selected, rows: Sequence[dict[str, Any]], points: Mapping[str, float], comparisons: Comparisons
    ) -> dict[str, ArmVerdict]:
        """Return the verdicts on the selected arms by name, from rows of the judging part."""
        controls, differences = judge_controls(self._arms, points), differences_by_arm(rows)
        metrics = read_metrics(
            self._store,
            self._run_id,
            self._baseline,
            comparisons=comparisons.benchmark,
            arm_ids=[arm.arm_id for arm, _, _ in selected.best],
        )
        verdicts = (
            arm_verdict(
                arm,
                differences.get(arm.arm_id, {}),
                metrics=metrics.get(arm.arm_id, ()),
                controls=controls.get(arm.arm_id),
                confirmation=True,
                comparisons=comparisons.benchmark,
                recall_comparisons=comparisons.recall,
                max_loss=self._max_loss,
            )
            for arm, _, _ in selected.best
        )
        return {verdict.name: verdict for verdict in verdicts if verdict.accuracy is not None}

    def _choices(
        self,
        selected: _Selected,
        judged: Mapping[str, ArmVerdict],
        points: Mapping[str, float],
        *,
        confirmed: bool = False,
        comparisons: int = 1,
    ) -> tuple[SweepChoice, ...]:
        """Return the selected arms with their verdicts, which are ranked by ``points``, their differences to the
        baseline on the judging questions by arm id.
        """
        choices = []
        for arm, candidate, count in selected.best:
            verdict = judged.get(arm.name)
            if verdict is None:
                continue
            if verdict.controls is not None:
                rank = self._rank(arm, candidate, selected.randoms[arm.kind], points)
                verdict = replace(verdict, controls=replace(verdict.controls, selected=rank))
            choices.append(
                SweepChoice(
                    verdict,
                    candidates=count,
                    selection_safe=candidate.safe,
                    selected_on=selected.judged[arm.name].paired.questions,
                    confirmed=confirmed,
                    comparisons=comparisons,
                )
            )
        return tuple(choices)

    def _rank(
        self,
        arm: ArmRecord,
        best: Candidate,
        randoms: Sequence[tuple[ArmRecord, Candidate]],
        points: Mapping[str, float],
    ) -> SelectedRank:
        """Return the rank of a selected arm among the best arms of random curves."""
        scores = self._scores(arm.kind)
        if len(randoms) < controls_needed(scores):
            return SelectedRank(scores, len(randoms), None)
        standing, *random_standings = (
            Standing(candidate.safe, each.share or 0.0, points[each.arm_id])
            for each, candidate in ((arm, best), *randoms)
        )
        return SelectedRank.of(standing, random_standings, scores)

    def _scores(self, kind: ArmKind) -> int:
        """Return the number of curves of scores of a kind."""
        return len({(arm.criterion, arm.selection) for arm in self._scored if arm.kind is kind})

    def _random_curves(self, kind: ArmKind) -> list[list[ArmRecord]]:
        """Return a kind's random curves: the controls of one seed, one at each nominal share of the kind's arms."""
        scored = [arm for arm in self._scored if arm.kind is kind]
        shares = {None if arm.share is None else round(arm.share, 9) for arm in scored}
        replacements = {arm.replacement for arm in scored}
        curves: dict[tuple[Any, ...], dict[float, ArmRecord]] = defaultdict(dict)
        for arm in self._arms:
            if arm.kind is not kind.control or arm.seed is None or arm.share is None or not arm.ablated_share:
                continue
            if arm.replacement in replacements and round(arm.share, 9) in shares:
                curves[arm.replacement, arm.seed][round(arm.share, 9)] = arm
        return [list(curve.values()) for curve in curves.values() if curve.keys() == shares]

    def _rows_of_part(self, arms: Sequence[ArmRecord], part: str) -> list[dict[str, Any]]:
        """Return the rows of ``split_verdicts`` of arms on one part; those that the store lacks are computed."""
        arm_ids = {arm.arm_id for arm in arms}
        rows = [row for row in self._recorded if row["part"] == part and row["arm_id"] in arm_ids]
        stored_ids = {row["arm_id"] for row in rows}
        arms_without_rows = [arm for arm in arms if arm.arm_id not in stored_ids]
        if arms_without_rows:
            answers = self._answers(arms_without_rows, part)
            rows += [row for arm in arms_without_rows for row in _split_rows(answers, self._baseline, arm, part)]
        return rows

    def _points(self, arms: Sequence[ArmRecord]) -> dict[str, float]:
        """Return the benchmark differences of arms on the judging part, in percentage points by arm id; empty without a
        benchmark.
        """
        if not arms:
            return {}
        answers = self._answers(arms, CONFIRMATION)
        if BENCHMARK not in answers.scopes:
            return {}
        baseline = answers.correct[self._baseline.arm_id]
        return {arm.arm_id: answers.difference(BENCHMARK, baseline, answers.correct[arm.arm_id]) for arm in arms}

    def _answers(self, arms: Sequence[ArmRecord], part: str) -> AnswerSheets:
        with self._store.reading():
            parts = self._store.query(
                "SELECT part FROM all_question_split WHERE run_id = ? ORDER BY task, question", [self._run_id]
            )
            answers = read_answers(self._store, self._baseline, arms)
        return answers.only(np.array([each == part for each in parts["part"].to_pylist()], dtype=bool))


def _loses_recall(verdict: ArmVerdict) -> bool:
    """Return True if the estimated recall loss exceeds the limit."""
    return bool(verdict.recall_lost) or any(
        each.paired.retained is not None and each.paired.retained.value < MIN_RETAINED for each in verdict.judged_recall
    )


def _may_be_selected(verdict: ArmVerdict) -> bool:
    return verdict.keeps_accuracy and not _loses_recall(verdict)


def _rejudged(
    rows: Sequence[dict[str, Any]], arms: Sequence[ArmRecord], comparisons: Comparisons
) -> list[dict[str, Any]]:
    """Return rows of ``split_verdicts`` whose verdicts on the confirmation part count the comparisons."""
    by_id = {arm.arm_id: arm for arm in arms}
    differences = differences_by_arm([row for row in rows if row["part"] == CONFIRMATION])
    rejudged = []
    for row in rows:
        if row["part"] == CONFIRMATION and row["task"] == ALL_TASKS and row["arm_id"] in by_id:
            verdict = arm_verdict(
                by_id[row["arm_id"]],
                differences[row["arm_id"]],
                comparisons=comparisons.benchmark,
                recall_comparisons=comparisons.recall,
            )
            if verdict.accuracy is not None:
                widened = {"safe": verdict.is_safe, "wide_low": verdict.judging.low / 100}
                row = row | {"comparisons": comparisons.benchmark, **widened}
        rejudged.append(row)
    return rejudged


def _by_key(rows: Sequence[dict[str, Any]]) -> dict[tuple[Any, ...], dict[str, Any]]:
    return {tuple(row[key] for key in SPLIT_VERDICTS.keys[0]): row for row in rows}


def _split_rows(answers: AnswerSheets, baseline: ArmRecord, arm: ArmRecord, part: str) -> list[dict[str, Any]]:
    """Return an arm's rows of ``split_verdicts`` on one part; `_rejudged` judges those of the confirmation part."""
    rows = rows_of_arm(answers, baseline, arm)
    verdict = arm_verdict(arm, differences_by_arm(rows).get(arm.arm_id, {}))
    split_columns = dict.fromkeys(("safe", "comparisons", "wide_low", "selected")) | {"part": part}
    safe = _may_be_selected(verdict) if part == SELECTION and verdict.accuracy is not None else None
    return [row | split_columns | {"safe": safe if row["task"] == ALL_TASKS else None} for row in rows]


def _recorded(store: Store, run_id: str) -> list[dict[str, Any]]:
    return store.query(
        "SELECT v.* FROM split_verdicts v JOIN arms USING (arm_id) WHERE run_id = ?"
        " ORDER BY arm_id, part, task, recall",
        [run_id],
    ).to_pylist()
