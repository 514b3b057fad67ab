"""Verdict of a sweep: selection on some questions, judgement on others.

The best of many arms looks too good on the questions that selected it. On other questions its interval is as valid as
that of an arm chosen in advance. Every arm answers all questions, so the split costs no computation. Half of the
benchmark selects, but only a quarter of the recall texts: the verdict needs nearly all of them to show that recall is
kept, and the selection does not.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa

from headscan.analysis.arm_kinds import ArmKind
from headscan.analysis.schema.arm_tables import ALL_TASKS, CONFIRMATION, SELECTION, SPLIT_VERDICTS
from headscan.analysis.store.store import Store
from headscan.analysis.verdict_limits import LEAST_RETAINED
from headscan.analysis.verdicts.answer_sheets import BENCHMARK, AnswerSheets, read_answers
from headscan.analysis.verdicts.controls import controls_of, judge_controls
from headscan.analysis.verdicts.finished_arms import FinishedArm, FinishedArms, finished_arms
from headscan.analysis.verdicts.judge import ArmVerdict, Verdict, arm_outcome, benchmark_differences
from headscan.analysis.verdicts.verdict_rows import compared_by_arm, complete_rows, verdict_rows

#: A sweep selects one arm of each kind, because rules and masks are used differently.
KINDS = (ArmKind.RULE, ArmKind.MASK)


class Candidate(NamedTuple):
    """An arm that a sweep may select, judged on the selecting questions.

    Attributes:
        name: Unique among the candidates.
        curve: Equal for arms that differ only in their share.
        share: Measured share of ablated heads, above 0, at most 1.
        passes: Whether the arm may be selected.
        loses_recall: Whether the arm loses more recall than a removable one may, by the best estimate.
        low: Lower end of the interval of the difference to the baseline, in percentage points.
    """

    name: str
    curve: tuple[str | None, ...]
    share: float
    passes: bool
    loses_recall: bool
    low: float


@dataclass(frozen=True)
class Choice:
    """The selected rule or mask of a sweep, with its verdict.

    Attributes:
        candidates: Number of arms it was selected from.
        passed: Whether it passes on the selecting questions. If not, no arm qualified and this one comes closest (see
            ``best_candidate``).
        selected_on: Number of benchmark questions that selected it.
        confirmed: Whether other questions judged it.
    """

    verdict: ArmVerdict
    candidates: int
    passed: bool
    selected_on: int
    confirmed: bool

    def sentence(self) -> str:
        """Return selection, judging questions and verdict as text."""
        arms = f"{self.candidates} {self.verdict.kind}{'' if self.candidates == 1 else 's'}"
        best = f"Best of {arms}" if self.passed else f"Closest of {arms}, none of which passes"
        judged_on = self.verdict.paired.questions
        if self.confirmed:
            questions = f"selected on {self.selected_on:,} questions and judged on {judged_on:,} others"
        else:
            questions = (
                f"selected and judged on the same {judged_on:,} questions, so its interval is not corrected for the"
                " selection"
            )
        return f"{best}, {questions}: {self.verdict.sentence()}"


def best_candidate(candidates: Iterable[Candidate]) -> Candidate | None:
    """Return the arm with the largest passing share of its curve.

    All arms of the curve up to it pass.

    The highest ``low`` breaks ties. If no arm qualifies, the arm with the highest ``low`` is returned, preferably one
    that keeps recall. Without candidates the result is None.
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


def judge_sweep(store: Store, verdict: Verdict, *, confirm: bool = True) -> tuple[Choice, ...]:
    """Select and judge the best rule and mask of a sweep.

    Nothing is written: comparisons that the store lacks are computed and stay in memory.

    Args:
        verdict: The arms of the sweep, judged by all questions.
        confirm: Select on one part of the questions and judge on the other (the view ``question_split``). If false, all
            questions do both, and the interval is too optimistic.

    Returns:
        At most one choice per kind; none if no arm was chosen by a score, or if there is no accuracy to compare.
    """
    arms = finished_arms(store, verdict.run_id)
    if confirm:
        return _confirmed(store, verdict.run_id, arms).choices
    judged = {arm.name: arm for arm in verdict.arms}
    return tuple(
        Choice(
            judged[best.name],
            candidates=count,
            passed=best.passes,
            selected_on=judged[best.name].paired.questions,
            confirmed=False,
        )
        for count, best in _select(_tried(arms), judged, {name: arm.removable for name, arm in judged.items()})
    )


def record_confirmation(store: Store, run_id: str) -> None:
    """Write the comparisons behind `judge_sweep` that the store lacks.

    The job that sweeps calls this at its end.

    Raises:
        VerdictError: Not exactly one finished baseline, or an arm answered other questions than the baseline.
    """
    found = _confirmed(store, run_id, finished_arms(store, run_id))
    if found.rows and not found.recorded:
        store.replace_split_verdicts(run_id, pa.Table.from_pylist(found.rows))


def _tried(arms: FinishedArms) -> list[FinishedArm]:
    """Return the arms that a sweep may select."""
    return [arm for arm in arms.others if arm.kind in KINDS and arm.score is not None and arm.zeroed_share]


def _select(
    tried: Sequence[FinishedArm], judged: Mapping[str, ArmVerdict], passes: Mapping[str, bool]
) -> list[tuple[int, Candidate]]:
    """Return number and best of the candidates of each kind.

    ``judged`` and ``passes`` have arm names as keys.
    """
    selected = []
    for kind in KINDS:
        candidates = [
            Candidate(
                arm.name,
                curve=(arm.score, arm.selection),
                share=arm.zeroed_share or 0.0,
                passes=passes[arm.name],
                loses_recall=_loses_recall(judged[arm.name]),
                low=judged[arm.name].paired.low,
            )
            for arm in tried
            if arm.kind == kind and arm.name in judged
        ]
        if (best := best_candidate(candidates)) is not None:
            selected.append((len(candidates), best))
    return selected


def _loses_recall(verdict: ArmVerdict) -> bool:
    """Return True if the estimated recall loss exceeds the limit."""
    return bool(verdict.recall_lost) or any(
        family.informative and family.paired.retained is not None and family.paired.retained.share < LEAST_RETAINED
        for family in verdict.recall
    )


def _may_be_selected(verdict: ArmVerdict) -> bool:
    return verdict.passes_benchmark and not _loses_recall(verdict)


class _Confirmed(NamedTuple):
    """The selected arms and their rows of ``split_verdicts``.

    It records whether the store has exactly these rows.
    """

    choices: tuple[Choice, ...]
    rows: list[dict[str, Any]]
    recorded: bool


def _confirmed(store: Store, run_id: str, arms: FinishedArms) -> _Confirmed:
    """Select the best arms on one part, and judge on the other."""
    tried = _tried(arms)
    if not tried:
        return _Confirmed((), [], True)
    recorded = _recorded(store, run_id)
    first = complete_rows([row for row in recorded if row["part"] == SELECTION])
    missing = _without_rows(tried, first)
    if missing:
        sheets = _sheets(store, run_id, arms.baseline, missing, SELECTION)
        first += [row for arm in missing for row in _split_rows(sheets, arms.baseline, arm, SELECTION)]
    compared = compared_by_arm(first)
    outcomes = (arm_outcome(arm, compared.get(arm.arm_id, {})) for arm in tried)
    judged = {outcome.name: outcome for outcome in outcomes if isinstance(outcome, ArmVerdict)}
    selected = _select(tried, judged, {name: _may_be_selected(arm) for name, arm in judged.items()})
    best = [next(arm for arm in tried if arm.name == candidate.name) for _, candidate in selected]
    second, verdicts = _judge_others(store, run_id, arms, best, recorded)
    choices = tuple(
        Choice(
            verdicts[candidate.name],
            candidates=count,
            passed=candidate.passes,
            selected_on=judged[candidate.name].paired.questions,
            confirmed=True,
        )
        for count, candidate in selected
        if candidate.name in verdicts
    )
    rows = [*first, *second]
    return _Confirmed(choices, rows, _by_key(rows) == _by_key(recorded))


def _judge_others(
    store: Store, run_id: str, arms: FinishedArms, best: Sequence[FinishedArm], recorded: Sequence[dict[str, Any]]
) -> tuple[list[dict[str, Any]], dict[str, ArmVerdict]]:
    """Judge the selected arms on the other part.

    Returns rows of ``split_verdicts``, and verdicts by name.
    """
    chosen = {arm.arm_id for arm in best}
    rows = complete_rows([row for row in recorded if row["part"] == CONFIRMATION and row["arm_id"] in chosen])
    missing = _without_rows(best, rows)
    randoms = {control for arm in best for control in controls_of(arm, arms.others)}
    controls = [arm for arm in arms.others if arm in randoms]
    differences: dict[str, float] = {}
    if missing or controls:
        sheets = _sheets(store, run_id, arms.baseline, [*missing, *controls], CONFIRMATION)
        rows += [row for arm in missing for row in _split_rows(sheets, arms.baseline, arm, CONFIRMATION)]
        if BENCHMARK in sheets.scopes:
            baseline = sheets.correct[arms.baseline.arm_id]
            differences = {c.arm_id: sheets.difference(BENCHMARK, baseline, sheets.correct[c.arm_id]) for c in controls}
    compared = compared_by_arm(rows)
    against = judge_controls([*best, *controls], differences | benchmark_differences(compared))
    outcomes = (
        arm_outcome(a, compared.get(a.arm_id, {}), controls=against.get(a.arm_id), confirmation=True) for a in best
    )
    return rows, {outcome.name: outcome for outcome in outcomes if isinstance(outcome, ArmVerdict)}


def _sheets(store: Store, run_id: str, baseline: FinishedArm, others: Sequence[FinishedArm], part: str) -> AnswerSheets:
    """Return the answers of arms to one part of the questions."""
    parts = store.query("SELECT part FROM all_question_split WHERE run_id = ? ORDER BY task, question", [run_id])
    kept = np.array([of_question == part for of_question in parts["part"].to_pylist()], dtype=bool)
    return read_answers(store, baseline, others).only(kept)


def _without_rows(arms: Sequence[FinishedArm], rows: Sequence[Mapping[str, Any]]) -> list[FinishedArm]:
    known = {row["arm_id"] for row in rows}
    return [arm for arm in arms if arm.arm_id not in known]


def _by_key(rows: Sequence[dict[str, Any]]) -> dict[tuple[Any, ...], dict[str, Any]]:
    return {tuple(row[key] for key in SPLIT_VERDICTS.keys[0]): row for row in rows}


def _split_rows(sheets: AnswerSheets, baseline: FinishedArm, arm: FinishedArm, part: str) -> list[dict[str, Any]]:
    """Return rows of ``split_verdicts`` of an arm on one part."""
    rows = verdict_rows(sheets, baseline, arm)
    outcome = arm_outcome(arm, compared_by_arm(rows).get(arm.arm_id, {}))
    passes = None
    if isinstance(outcome, ArmVerdict):
        passes = _may_be_selected(outcome) if part == SELECTION else outcome.removable
    return [row | {"part": part, "passes": passes if row["task"] == ALL_TASKS else None} for row in rows]


def _recorded(store: Store, run_id: str) -> list[dict[str, Any]]:
    return store.query(
        "SELECT v.* FROM split_verdicts v JOIN arms USING (arm_id) WHERE run_id = ?"
        " ORDER BY arm_id, part, task, recall",
        [run_id],
    ).to_pylist()
