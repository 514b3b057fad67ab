"""Verdict of a sweep: selection on some questions, judgement on others.

The best of many arms looks too good on the questions that selected it. On other questions its interval is as valid as
that of an arm chosen in advance. Every arm answers all questions, so the split costs no computation. Half of the
benchmark selects, but only a quarter of the recall texts: the verdict needs nearly all of them to show that recall is
kept, and the selection does not.

Questions that judge again and again are used up: of 20 arms that lose just one point, at least one passes in 39 % of
simulated sweeps (`docs/verdicts_simulated.md`). The store holds every arm that was judged, and all of them together
share the error of one, with which one passes in 2.7 %.

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

from headscan.analysis.store.records import ArmKind
from headscan.analysis.store.scan_tables import literal
from headscan.analysis.store.store import Store
from headscan.analysis.store.tables import ALL_TASKS, CONFIRMATION, SELECTION, SPLIT_VERDICTS
from headscan.analysis.store.verdict_limits import LEAST_RETAINED
from headscan.analysis.verdicts.answer_sheets import (
    BENCHMARK,
    AnswerSheets,
    FinishedArm,
    FinishedArms,
    can_be_judged,
    finished_arms,
    read_answers,
)
from headscan.analysis.verdicts.controls import SelectedRank, Standing, controls_of, judge_controls, least_controls
from headscan.analysis.verdicts.judge import ArmVerdict, Verdict, arm_verdict, benchmark_differences
from headscan.analysis.verdicts.verdict_rows import compared_by_arm, complete_rows, for_comparisons, verdict_rows

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
    passes: bool
    loses_recall: bool
    low: float


@dataclass(frozen=True)
class SweepChoice:
    """The selected rule or mask of a sweep, with its verdict.

    Attributes:
        passed: False if no arm qualified on the selecting questions; this one comes closest (see `best_candidate`).
        selected_on: Number of benchmark questions that selected it.
        confirmed: True if other questions judged it.
        comparisons: Number of arms that the store has judged on these other questions of the benchmark, for which the
            interval is widened; 1 if the same questions selected and judged it. `RecallVerdict` has that of recall.
    """

    verdict: ArmVerdict
    candidates: int
    passed: bool
    selected_on: int
    confirmed: bool
    comparisons: int = 1

    def sentence(self) -> str:
        """Return selection, judging questions and verdict as text."""
        return f"{self.origin()}: {self.verdict.sentence()}"

    def origin(self) -> str:
        """Return what the arm was selected from, and the questions that selected and judged it."""
        arms = f"{self.candidates} {self.verdict.kind}{'' if self.candidates == 1 else 's'}"
        best = f"Best of {arms}" if self.passed else f"Closest of {arms}, none of which passes"
        judged_on = self.verdict.paired.questions
        if self.confirmed:
            questions = f"selected on {self.selected_on:,} questions and judged on {judged_on:,} others"
            recall = max((each.comparisons for each in self.verdict.judged_recall), default=self.comparisons)
            if max(self.comparisons, recall) > 1:
                judged = f"{self.comparisons} arm{'s' * (self.comparisons > 1)}"
                questions += f" by intervals widened for the {judged} that they have judged"
                questions += f" ({recall} in recall)" * (recall != self.comparisons)
        else:
            questions = (
                f"selected and judged on the same {judged_on:,} questions, so its interval is not corrected for the"
                " selection"
            )
        return f"{best}, {questions}"


def best_candidate(candidates: Iterable[Candidate]) -> Candidate | None:
    """Return the candidate with the largest ``(share, low)`` of those that pass together with all smaller shares of
    their curve; without any, the one with the largest ``(not loses_recall, low)``; None without candidates.
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
    first_failed = min((candidate.share for candidate in curve if not candidate.passes), default=np.inf)
    return [candidate for candidate in curve if candidate.share < first_failed]


def judge_sweep(store: Store, verdict: Verdict, *, confirm: bool = True) -> tuple[SweepChoice, ...]:
    """Select and judge the best rule and mask of a sweep: at most one choice per kind, and none if no arm was chosen by
    a score, or if there is no accuracy to compare. Nothing is written: comparisons that the store lacks are computed
    and stay in memory. With ``confirm``, one part of the questions selects and the other judges (the view
    ``question_split``); without it all questions do both, and the interval is too optimistic.
    """
    arms = finished_arms(store, verdict.run_id)
    if confirm:
        return _confirm(store, verdict.run_id, arms).choices
    arms = _of_sweep(arms)
    scored, judged = _chosen_by_scores(arms), {arm.name: arm for arm in verdict.arms}
    curves = _random_curves(scored, arms.others)
    selected = _best_per_kind(scored, judged, {name: arm.is_safe for name, arm in judged.items()})
    choices = []
    for count, best in selected:
        chosen = judged[best.name]
        if chosen.controls is not None:
            randoms = _best_of_curves(curves[chosen.kind], judged, {name: arm.is_safe for name, arm in judged.items()})
            differences = {arm.arm_id: judged[arm.name].paired.difference for arm in arms.others if arm.name in judged}
            rank = _rank(best, scored, randoms, differences)
            chosen = replace(chosen, controls=replace(chosen.controls, selected=rank))
        asked = chosen.paired.questions
        choices.append(SweepChoice(chosen, candidates=count, passed=best.passes, selected_on=asked, confirmed=False))
    return tuple(choices)


def record_confirmation(store: Store, run_id: str) -> None:
    """Write the comparisons behind `judge_sweep` that the store lacks. The job that sweeps calls this at its end. A new
    judgement also widens those of earlier sweeps on the same questions.
    """
    confirmed = _confirm(store, run_id, finished_arms(store, run_id))
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


def _of_sweep(arms: FinishedArms) -> FinishedArms:
    """Return the arms that the sweep tried and drew: later evaluations into its run change neither its choice nor the
    rank. Runs of earlier versions do not mark them, so all of their arms count.
    """
    swept = tuple(arm for arm in arms.others if arm.swept)
    return arms._replace(others=swept) if swept else arms


def _chosen_by_scores(arms: FinishedArms) -> list[FinishedArm]:
    return [arm for arm in arms.others if arm.kind in KINDS and arm.score is not None and arm.zeroed_share]


def _random_curves(
    scored: Sequence[FinishedArm], others: Sequence[FinishedArm]
) -> dict[ArmKind, list[list[FinishedArm]]]:
    """Return each kind's random curves: the controls of one seed, one at each nominal share of the kind's arms."""
    curves_of: dict[ArmKind, list[list[FinishedArm]]] = {}
    for kind in KINDS:
        of_kind = [arm for arm in scored if arm.kind is kind]
        shares = {None if arm.share is None else round(arm.share, 9) for arm in of_kind}
        replacements = {arm.replacement for arm in of_kind}
        curves: dict[tuple[Any, ...], dict[float, FinishedArm]] = defaultdict(dict)
        for arm in others:
            if arm.kind is not kind.control or arm.seed is None or arm.share is None or not arm.zeroed_share:
                continue
            if arm.replacement in replacements and round(arm.share, 9) in shares:
                curves[arm.replacement, arm.seed][round(arm.share, 9)] = arm
        curves_of[kind] = [list(curve.values()) for curve in curves.values() if curve.keys() == shares]
    return curves_of


def _scores(scored: Sequence[FinishedArm], kind: ArmKind) -> int:
    """Return the number of curves of scores of a kind."""
    return len({(arm.score, arm.selection) for arm in scored if arm.kind is kind})


def _best_of_curves(
    curves: Sequence[Sequence[FinishedArm]], judged: Mapping[str, ArmVerdict], passes: Mapping[str, bool]
) -> list[tuple[FinishedArm, Candidate]]:
    """Return the arm that the selection takes of each random curve."""
    chosen = []
    for curve in curves:
        by_name = {arm.name: arm for arm in curve}
        best = best_candidate(_candidate(arm, judged, passes) for arm in curve if arm.name in judged)
        if best is not None:
            chosen.append((by_name[best.name], best))
    return chosen


def _rank(
    best: Candidate,
    scored: Sequence[FinishedArm],
    randoms: Sequence[tuple[FinishedArm, Candidate]],
    differences: Mapping[str, float],
) -> SelectedRank:
    """Return the rank of a selected arm among the best arms of random curves, by ``differences`` to the baseline on the
    judging questions, in percentage points by arm id.
    """
    arm = next(arm for arm in scored if arm.name == best.name)
    scores = _scores(scored, arm.kind)
    if len(randoms) < least_controls(scores):
        return SelectedRank(scores, len(randoms), None)
    selected, *others = (
        Standing(candidate.passes, each.share or 0.0, differences[each.arm_id])
        for each, candidate in ((arm, best), *randoms)
    )
    return SelectedRank.of(selected, others, scores)


def _candidate(arm: FinishedArm, judged: Mapping[str, ArmVerdict], passes: Mapping[str, bool]) -> Candidate:
    return Candidate(
        arm.name,
        curve=(arm.score, arm.selection),
        share=arm.zeroed_share or 0.0,
        passes=passes[arm.name],
        loses_recall=_loses_recall(judged[arm.name]),
        low=judged[arm.name].paired.low,
    )


def _best_per_kind(
    scored: Sequence[FinishedArm], judged: Mapping[str, ArmVerdict], passes: Mapping[str, bool]
) -> list[tuple[int, Candidate]]:
    """Return number and best of each kind's candidates; ``judged`` and ``passes`` have arm names as keys."""
    selected = []
    for kind in KINDS:
        candidates = [_candidate(arm, judged, passes) for arm in scored if arm.kind == kind and arm.name in judged]
        if (best := best_candidate(candidates)) is not None:
            selected.append((len(candidates), best))
    return selected


def _loses_recall(verdict: ArmVerdict) -> bool:
    """Return True if the estimated recall loss exceeds the limit."""
    return bool(verdict.recall_lost) or any(
        each.paired.retained is not None and each.paired.retained.value < LEAST_RETAINED
        for each in verdict.judged_recall
    )


def _may_be_selected(verdict: ArmVerdict) -> bool:
    return verdict.keeps_accuracy and not _loses_recall(verdict)


class _ConfirmedChoices(NamedTuple):
    """Selected arms and their rows of ``split_verdicts``; ``recorded`` is True if the store has exactly these."""

    choices: tuple[SweepChoice, ...]
    rows: list[dict[str, Any]]
    recorded: bool


def _confirm(store: Store, run_id: str, arms: FinishedArms) -> _ConfirmedChoices:
    """Select the best arms on one part, and judge on the other."""
    finished, arms = arms.others, _of_sweep(arms)
    scored = _chosen_by_scores(arms)
    if not scored:
        return _ConfirmedChoices((), [], True)
    recorded = _recorded(store, run_id)
    selected = _select_on_first_part(store, run_id, arms, scored, recorded)
    second, differences = _judge_others(store, run_id, arms, selected, recorded)
    second += _earlier_rows(recorded, selected)
    comparisons = judged_on_same(store, run_id).comparisons({row["arm_id"] for row in second})
    second = _rejudged(second, finished, comparisons)
    choices = _choices(selected, scored, arms, second, differences, comparisons)
    rows = [*selected.rows, *second]
    return _ConfirmedChoices(choices, rows, _by_key(rows) == _by_key(recorded))


class _SelectedArms(NamedTuple):
    """What the selecting questions choose.

    Attributes:
        rows: Rows of ``split_verdicts`` on the selecting part.
        judged: Verdicts of the arms on that part, by name.
        best: Arm, candidate and number of candidates of each kind's selected arm.
        randoms: The best arms of random curves, by kind.
    """

    rows: list[dict[str, Any]]
    judged: dict[str, ArmVerdict]
    best: list[tuple[FinishedArm, Candidate, int]]
    randoms: dict[ArmKind, list[tuple[FinishedArm, Candidate]]]


def _select_on_first_part(
    store: Store, run_id: str, arms: FinishedArms, scored: Sequence[FinishedArm], recorded: Sequence[dict[str, Any]]
) -> _SelectedArms:
    """Select the best arm of each kind and of each random curve on the selecting part."""
    curves = {
        kind: of_one_kind if len(of_one_kind) >= least_controls(_scores(scored, kind)) else []
        for kind, of_one_kind in _random_curves(scored, arms.others).items()
    }
    compared_first = [*scored, *(arm for of_kind in curves.values() for curve in of_kind for arm in curve)]
    rows = complete_rows([row for row in recorded if row["part"] == SELECTION])
    missing = _without_rows(compared_first, rows)
    if missing:
        sheets = _sheets(store, run_id, arms.baseline, missing, SELECTION)
        rows += [row for arm in missing for row in _split_rows(sheets, arms.baseline, arm, SELECTION)]
    compared = compared_by_arm(rows)
    verdicts = (arm_verdict(arm, compared.get(arm.arm_id, {})) for arm in compared_first)
    judged = {verdict.name: verdict for verdict in verdicts if verdict.accuracy is not None}
    passes = {name: _may_be_selected(arm) for name, arm in judged.items()}
    by_name = {arm.name: arm for arm in scored}
    best = [(by_name[candidate.name], candidate, count) for count, candidate in _best_per_kind(scored, judged, passes)]
    randoms = {kind: _best_of_curves(of_kind, judged, passes) for kind, of_kind in curves.items()}
    return _SelectedArms(rows, judged, best, randoms)


def _earlier_rows(recorded: Sequence[dict[str, Any]], selected: _SelectedArms) -> list[dict[str, Any]]:
    """Return the judging part's rows of arms that were selected before, which count as comparisons, too."""
    now = {arm.arm_id for arm, _, _ in selected.best}
    return [row | {"selected": False} for row in recorded if row["part"] == CONFIRMATION and row["arm_id"] not in now]


def _choices(
    selected: _SelectedArms,
    scored: Sequence[FinishedArm],
    arms: FinishedArms,
    rows: Sequence[dict[str, Any]],
    differences: Mapping[str, float],
    comparisons: Comparisons,
) -> tuple[SweepChoice, ...]:
    """Return the selected arms with their verdicts and ranks by the rows of the judging part."""
    against = judge_controls(arms.others, differences)
    compared = compared_by_arm(rows)
    choices = []
    for arm, candidate, count in selected.best:
        controls = against.get(arm.arm_id)
        if controls is not None:
            rank = _rank(candidate, scored, selected.randoms[arm.kind], differences)
            controls = replace(controls, selected=rank)
        verdict = arm_verdict(
            arm,
            for_comparisons(compared.get(arm.arm_id, {}), *comparisons),
            controls=controls,
            confirmation=True,
            comparisons=comparisons.benchmark,
            recall_comparisons=comparisons.recall,
        )
        if verdict.accuracy is not None:
            choices.append(
                SweepChoice(
                    verdict,
                    candidates=count,
                    passed=candidate.passes,
                    selected_on=selected.judged[candidate.name].paired.questions,
                    confirmed=True,
                    comparisons=comparisons.benchmark,
                )
            )
    return tuple(choices)


def _judge_others(
    store: Store,
    run_id: str,
    arms: FinishedArms,
    selected: _SelectedArms,
    recorded: Sequence[dict[str, Any]],
) -> tuple[list[dict[str, Any]], dict[str, float]]:
    """Judge the selected arms on the other part. Return their rows of ``split_verdicts``, and the benchmark differences
    by arm id of these arms and of their controls.
    """
    best = [arm for arm, _, _ in selected.best]
    randoms = [arm for of_kind in selected.randoms.values() for arm, _ in of_kind]
    chosen = {arm.arm_id for arm in best}
    rows = complete_rows([row for row in recorded if row["part"] == CONFIRMATION and row["arm_id"] in chosen])
    missing = _without_rows(best, rows)
    against = {control for arm in best for control in controls_of(arm, arms.others)} | set(randoms)
    controls = [arm for arm in arms.others if arm in against]
    differences: dict[str, float] = {}
    if missing or controls:
        sheets = _sheets(store, run_id, arms.baseline, [*missing, *controls], CONFIRMATION)
        rows += [row for arm in missing for row in _split_rows(sheets, arms.baseline, arm, CONFIRMATION)]
        if BENCHMARK in sheets.scopes:
            baseline = sheets.correct[arms.baseline.arm_id]
            differences = {c.arm_id: sheets.difference(BENCHMARK, baseline, sheets.correct[c.arm_id]) for c in controls}
    rows = [row | {"selected": True} for row in rows]
    return rows, differences | benchmark_differences(compared_by_arm(rows))


def _rejudged(
    rows: Sequence[dict[str, Any]], arms: Sequence[FinishedArm], comparisons: Comparisons
) -> list[dict[str, Any]]:
    """Return rows of ``split_verdicts`` whose verdicts on the confirmation part count the comparisons."""
    by_id = {arm.arm_id: arm for arm in arms}
    compared = compared_by_arm([row for row in rows if row["part"] == CONFIRMATION])
    rejudged = []
    for row in rows:
        if row["part"] == CONFIRMATION and row["task"] == ALL_TASKS and row["arm_id"] in by_id:
            verdict = arm_verdict(by_id[row["arm_id"]], for_comparisons(compared[row["arm_id"]], *comparisons))
            if verdict.accuracy is not None:
                wide = {"passes": verdict.is_safe, "wide_low": verdict.accuracy.low / 100}
                row = row | {"comparisons": comparisons.benchmark, **wide}
        rejudged.append(row)
    return rejudged


def _sheets(store: Store, run_id: str, baseline: FinishedArm, others: Sequence[FinishedArm], part: str) -> AnswerSheets:
    with store.reading():
        parts = store.query("SELECT part FROM all_question_split WHERE run_id = ? ORDER BY task, question", [run_id])
        answers = read_answers(store, baseline, others)
    return answers.only(np.array([of_question == part for of_question in parts["part"].to_pylist()], dtype=bool))


def _without_rows(arms: Sequence[FinishedArm], rows: Sequence[Mapping[str, Any]]) -> list[FinishedArm]:
    known = {row["arm_id"] for row in rows}
    return [arm for arm in arms if arm.arm_id not in known]


def _by_key(rows: Sequence[dict[str, Any]]) -> dict[tuple[Any, ...], dict[str, Any]]:
    return {tuple(row[key] for key in SPLIT_VERDICTS.keys[0]): row for row in rows}


def _split_rows(sheets: AnswerSheets, baseline: FinishedArm, arm: FinishedArm, part: str) -> list[dict[str, Any]]:
    """Return an arm's rows of ``split_verdicts`` on one part; `_rejudged` judges those of the confirmation part."""
    rows = verdict_rows(sheets, baseline, arm)
    verdict = arm_verdict(arm, compared_by_arm(rows).get(arm.arm_id, {}))
    known = dict.fromkeys(("passes", "comparisons", "wide_low", "selected")) | {"part": part}
    passes = _may_be_selected(verdict) if part == SELECTION and verdict.accuracy is not None else None
    return [row | known | {"passes": passes if row["task"] == ALL_TASKS else None} for row in rows]


def _recorded(store: Store, run_id: str) -> list[dict[str, Any]]:
    return store.query(
        "SELECT v.* FROM split_verdicts v JOIN arms USING (arm_id) WHERE run_id = ?"
        " ORDER BY arm_id, part, task, recall",
        [run_id],
    ).to_pylist()
