"""The views of evaluations: what arms answered, and the curves that sweeps draw.

``arm_summary`` and ``question_split`` read answers. The others read ``arm_verdicts`` and ``split_verdicts``, where
``verdict_rows`` and ``confirmation`` compare each arm with its baseline. Accuracies and differences
are shares, 0 to 1 (differences -1 to 1).
"""

from __future__ import annotations

from headscan.analysis.schema.arm_tables import ALL_TASKS, ARM_VERDICTS, ARMS, CONFIRMATION, PART, SELECTION
from headscan.analysis.schema.ddl import literal
from headscan.analysis.verdict_limits import LEAST_BASELINE, LEAST_QUESTIONS, MARGIN, QUESTIONS_PER_TEXT

#: A curve reaches a nominal share when the heads that it really ablates are at least this part of it: a mask is
#: rounded to whole heads, and random heads come out a little above or below.
_REACHED = 0.95

_ARM_SUMMARY = """
    SELECT a.run_id, a.arm_id, a.name AS arm, a.kind, a.zeroed_share, q.scope AS task, q.recall,
        count(*) AS questions, avg(q.correct) AS accuracy, stddev_samp(q.correct) / sqrt(count(*)) AS standard_error
    FROM arms a
    JOIN (SELECT *, unnest(task_scopes(task, recall)) AS scope FROM answers WHERE correct IS NOT NULL) q USING (arm_id)
    GROUP BY ALL
"""

_ARM_COMPARISON = """
    SELECT a.run_id, a.arm_id, a.name AS arm, a.kind, a.score, a.selection, a.share, a.seed, a.zeroed_share,
        v.* EXCLUDE (arm_id)
    FROM arms a JOIN arm_verdicts v USING (arm_id)
"""

# Without a seed an arm is a point of its own, whatever else is alike. DuckDB writes two columns of one REPLACE down in
# either order, and a view in other words than the schema's is not trusted: so there are two.
_SWEEP_POINTS = f"""
    WITH failures AS (
        SELECT arm_id, bool_or(failed) FILTER (recall) AS recall_lost,
            bool_and(failed IS NOT true AND (informative IS NOT true OR kept)) AS everything_kept
        FROM arm_verdicts GROUP BY arm_id
    ),
    chosen AS (
        SELECT * REPLACE (CASE WHEN kind IN ('mask', 'rule') THEN score END AS score)
        FROM (
            SELECT * REPLACE (CASE WHEN kind IN ('mask', 'rule') THEN selection END AS selection)
            FROM all_arm_comparison
        ) JOIN failures USING (arm_id)
        WHERE task = {literal(ALL_TASKS)} AND share IS NOT NULL AND zeroed_share IS NOT NULL
    ),
    measured AS (
        SELECT run_id, kind, score, selection, share,
            count(*) AS arms, avg(zeroed_share) AS zeroed_share, avg(accuracy) AS accuracy, avg(baseline) AS baseline,
            avg(difference) AS difference, avg(low) AS low, avg(high) AS high,
            min(difference) AS lowest, max(difference) AS highest, max(questions) AS questions,
            coalesce(bool_or(recall_lost), false) AS recall_lost,
            CASE WHEN min(questions) >= {LEAST_QUESTIONS} AND avg(baseline) >= {LEAST_BASELINE / 100}
                THEN avg(low) > {-MARGIN / 100} AND bool_and(everything_kept) END AS passes
        FROM chosen GROUP BY run_id, kind, score, selection, share, CASE WHEN seed IS NULL THEN arm_id END
    )
    FROM measured
    UNION ALL BY NAME
    SELECT run_id, kind, score, selection, 0.0 AS share, 0 AS arms, 0.0 AS zeroed_share, avg(baseline) AS accuracy,
        avg(baseline) AS baseline, 0.0 AS difference, 0.0 AS low, 0.0 AS high, 0.0 AS lowest, 0.0 AS highest,
        max(questions) AS questions, false AS recall_lost, true AS passes
    FROM measured GROUP BY run_id, kind, score, selection
"""

_SCORE_CURVES = f"""
    WITH curves AS (
        SELECT run_id, kind, score, selection, count(*) FILTER (arms > 0) AS points, avg(baseline) AS baseline,
            list(zeroed_share) AS shares, list(accuracy) AS accuracies, max(zeroed_share) AS reach,
            bool_and(passes IS NOT NULL) AS can_tell, min(zeroed_share) FILTER (NOT passes) AS first_failed
        FROM all_sweep_points GROUP BY run_id, kind, score, selection
    ),
    reached AS (
        SELECT run_id, share FROM (SELECT DISTINCT run_id, share FROM all_sweep_points WHERE arms > 0) JOIN curves
        USING (run_id) GROUP BY run_id, share HAVING 2 * count_if(reach >= {_REACHED} * share) >= count(*)
    ),
    spans AS (SELECT run_id, max(share) AS area_upto FROM reached GROUP BY run_id)
    SELECT run_id, kind, score, selection, points,
        last_crossing(shares, accuracies, baseline - {MARGIN / 100}) AS removable_share,
        CASE WHEN can_tell THEN coalesce(
            list_max(list_filter(shares, lambda share: first_failed IS NULL OR share < first_failed)), 0.0
        ) END AS removable_share_strict,
        CASE WHEN reach >= {_REACHED} * area_upto
            THEN curve_area(shares, accuracies, least(reach, area_upto)) END AS area,
        area_upto
    FROM curves LEFT JOIN spans USING (run_id)
    ORDER BY removable_share DESC, run_id, kind, score, selection
"""

#: Of so many documents, or recall texts, one selects; the others judge. A verdict needs nearly all recall texts to show
#: that recall is kept, while a few are enough to see that an arm loses it.
_BENCHMARK_PARTS, _RECALL_PARTS = 2, 4

# The unit is a document (a text of recall tasks), in whatever tasks it is asked: a document in two tasks, such as the
# letter and the cloze form of MMLU, must not be in both parts. Counting in the order of a hash, task by task, gives
# each task its share of both parts, independent of the order of questions and of the arms.
_QUESTION_SPLIT = f"""
    WITH asked AS (
        SELECT a.run_id, q.task, q.question, q.recall,
            CASE WHEN q.recall THEN 'text ' || q.question // {QUESTIONS_PER_TEXT}
                ELSE coalesce(q.doc_hash, q.task || ' ' || q.question) END AS document
        FROM arms a JOIN answers q USING (arm_id) WHERE a.kind = 'baseline' AND q.correct IS NOT NULL
    ),
    documents AS (SELECT run_id, recall, document, min(task) AS first_task FROM asked GROUP BY ALL),
    numbered AS (
        SELECT run_id, recall, document, row_number() OVER (
            PARTITION BY run_id, recall, first_task ORDER BY md5(document), document
        ) AS number
        FROM documents
    )
    SELECT run_id, task, question, recall,
        CASE WHEN number % CASE WHEN recall THEN {_RECALL_PARTS} ELSE {_BENCHMARK_PARTS} END = 0
            THEN {literal(SELECTION)} ELSE {literal(CONFIRMATION)} END AS part
    FROM asked JOIN numbered USING (run_id, recall, document)
"""

_SWEEP_CONFIRMED = f"""
    SELECT a.run_id, a.arm_id, a.name AS arm, a.kind, a.score, a.selection, a.share, a.zeroed_share,
        s.questions AS selection_questions, s.difference AS selection_difference, s.passes AS selection_passed,
        c.questions, c.baseline, c.accuracy, c.difference, c.low, c.high, c.gained, c.lost, c.p_value,
        c.passes AS removable
    FROM split_verdicts c JOIN split_verdicts s USING (arm_id, task, recall) JOIN arms a USING (arm_id)
    WHERE c.part = {literal(CONFIRMATION)} AND s.part = {literal(SELECTION)} AND task = {literal(ALL_TASKS)}
    ORDER BY a.run_id, a.kind
"""

#: Each is made over all runs under its name with ``all_`` before it, and so they read each other.
ARM_VIEWS: dict[str, str] = {
    "arm_summary": _ARM_SUMMARY,
    "arm_comparison": _ARM_COMPARISON,
    "sweep_points": _SWEEP_POINTS,
    "score_curves": _SCORE_CURVES,
    "question_split": _QUESTION_SPLIT,
    "sweep_confirmed": _SWEEP_CONFIRMED,
}


def with_verdict_rows(rows: str) -> str:
    """Return a WITH clause under which the views of curves also read verdict rows that are not stored.

    Args:
        rows: Name of a relation with the columns of ``arm_verdicts``; its arms take the place of stored ones.
    """
    names = ("arm_comparison", "sweep_points", "score_curves")
    views = ", ".join(f"all_{name} AS ({ARM_VIEWS[name]})" for name in names)
    return (
        f"WITH arm_verdicts AS (FROM main.arm_verdicts WHERE arm_id NOT IN (SELECT arm_id FROM {rows})"
        f" UNION ALL BY NAME FROM {rows}), {views}"
    )


ARM_VIEW_COMMENTS: dict[str, str] = {
    "arm_summary": "accuracy of each arm in each task, each family of recall tasks, and the benchmark as a whole",
    "arm_comparison": "arm_verdicts with the names and shares of the arms",
    "sweep_points": "the benchmark's accuracy over the share of heads ablated, seeds and nothing else averaged: the"
    " points of the curves, the baseline among them",
    "score_curves": "one row per curve: how many heads it lets go within one point, and the mean accuracy under it",
    "question_split": "the part of each question in a sweep: half of each task's documents, and one of four recall"
    " texts, select the best arm, and the others judge it; the same for every arm",
    "sweep_confirmed": "the best rule and the best mask of a sweep, selected on one part of the questions and judged on"
    " the other part alone (see question_split); empty for a sweep with --no-confirm",
}

_ARM = {c.name: c.comment for c in ARMS.columns} | {"arm": "name of the arm, unique in its run"}
_VERDICT = {c.name: c.comment for c in ARM_VERDICTS.columns}
_CURVE = {
    "run_id": _ARM["run_id"],
    "kind": "mask, rule, random_mask or random_rule",
    "score": "the score that chose the heads; NULL for random arms",
    "selection": _ARM["selection"],
}

#: View, column, comment.
ARM_COLUMN_COMMENTS: dict[str, dict[str, str]] = {
    "arm_summary": {
        **{name: _ARM[name] for name in ("run_id", "arm_id", "arm", "kind", "zeroed_share")},
        "task": _VERDICT["task"],
        "recall": _VERDICT["recall"],
        "questions": "questions that have a right answer",
        "accuracy": _VERDICT["accuracy"],
        "standard_error": "of the accuracy, 0 to 1",
    },
    "arm_comparison": {
        **{name: _ARM[name] for name in ("run_id", "arm_id", "arm", "kind", "score", "selection")},
        **{name: _ARM[name] for name in ("share", "seed", "zeroed_share")},
        **{name: comment for name, comment in _VERDICT.items() if name != "arm_id"},
    },
    "sweep_points": {
        **_CURVE,
        "share": "nominal share of heads to ablate, 0 to 1; 0 for the baseline",
        "arms": "how many arms (seeds) are averaged; 0 for the baseline",
        "zeroed_share": "share of heads really ablated, 0 to 1: mean over the arms",
        "accuracy": "mean over the arms, 0 to 1",
        "baseline": _VERDICT["baseline"],
        "difference": "accuracy minus baseline, -1 to 1: mean over the arms",
        "low": "lower end of the difference's 95 % interval, -1 to 1: mean over the arms",
        "high": "upper end, likewise",
        "lowest": "difference of the worst arm, -1 to 1",
        "highest": "difference of the best arm, -1 to 1",
        "questions": _VERDICT["questions"],
        "recall_lost": "whether an arm fails a family of recall tasks that the baseline does",
        "passes": f"whether low is above -{MARGIN:g} point, no row of the arms in arm_verdicts has failed, and the"
        " recall that the baseline has is kept; NULL below"
        f" {LEAST_QUESTIONS} questions, or where the baseline is right on less than {LEAST_BASELINE:g} % of them",
    },
    "score_curves": {
        **_CURVE,
        "points": "points of the curve beside the baseline",
        "removable_share": f"share of heads, 0 to 1, at which accuracy last falls {MARGIN:g} point below the baseline"
        " (arXiv 2504.03889); the last share where it never does",
        "removable_share_strict": "the largest tested share of heads, 0 to 1, that passes together with every smaller"
        " tested one (see passes in sweep_points); 0 if the smallest fails, NULL if a point cannot tell. Of all"
        " questions, and not corrected for the number of curves: see sweep_confirmed",
        "area": "mean accuracy over shares from 0 to area_upto, 0 to 1; NULL where the curve does not reach it",
        "area_upto": "the largest nominal share of heads in the run, 0 to 1, that at least half of its curves reach (to"
        f" {1 - _REACHED:.0%} of it: such a curve's area ends with the curve)",
    },
    "question_split": {
        "run_id": _ARM["run_id"],
        "task": "name of the task",
        "question": "number of the question in its task, from 0",
        "recall": _VERDICT["recall"],
        "part": PART.comment,
    },
    "sweep_confirmed": {
        **{name: _ARM[name] for name in ("run_id", "arm_id", "arm", "kind", "score", "selection")},
        **{name: _ARM[name] for name in ("share", "zeroed_share")},
        "selection_questions": "questions of the benchmark that selected the arm",
        "selection_difference": "accuracy minus baseline on the questions that selected the arm, -1 to 1: too good,"
        " because the best of many arms was taken",
        "selection_passed": "whether the arm passes on the questions that selected it; false: no arm of its kind"
        " qualified, and this one came closest",
        "questions": "questions of the benchmark that judge the arm; none of them selected it",
        **{name: _VERDICT[name] for name in ("baseline", "accuracy", "difference", "low", "high")},
        **{name: _VERDICT[name] for name in ("gained", "lost", "p_value")},
        "removable": "whether the arm is removable within one point, recall included, by the judging questions alone",
    },
}
