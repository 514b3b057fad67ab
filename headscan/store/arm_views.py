"""Views of evaluations: results of arms, and curves of sweeps.

``arm_summary`` and ``question_split`` read answers. The others read ``arm_verdicts`` and ``split_verdicts``, which
``verdict_rows`` and ``confirmation`` write. Accuracies are shares, 0 to 1, and differences -1 to 1.
"""

from __future__ import annotations

from headscan.store.scan_tables import View, literal
from headscan.store.tables import (
    ALL_TASKS,
    ARM_VERDICTS,
    ARMS,
    CONFIRMATION,
    EXPECTED_TASKS,
    PART,
    SELECTION,
    SPLIT_VERDICTS,
)
from headscan.store.verdict_limits import (
    BENCHMARK_SPLITS,
    MARGIN,
    MIN_ABOVE_CHANCE,
    MIN_SAFE_TEXTS,
    QUESTIONS_PER_TEXT,
    RECALL_SPLITS,
)
from headscan.text_tables import percent

#: A curve reaches a nominal share if its measured share is at least this part of it: masks are rounded to whole heads,
#: and the number of random heads varies.
_REACHED = 0.95

_ARM_SUMMARY = """
    SELECT a.run_id, a.arm_id, a.name AS arm, a.kind, a.replacement, a.ablated_share, q.scope AS task, q.recall,
        count(*) AS questions, avg(q.correct) AS accuracy, stddev_samp(q.correct) / sqrt(count(*)) AS standard_error
    FROM arms a
    JOIN (SELECT *, unnest(task_scopes(task, recall)) AS scope FROM answers WHERE correct IS NOT NULL) q USING (arm_id)
    GROUP BY ALL
"""

_ARM_COMPARISON = """
    SELECT a.run_id, a.arm_id, a.name AS arm, a.kind, a.criterion, a.selection, a.share, a.seed, a.replacement,
        a.ablated_share, v.* EXCLUDE (arm_id)
    FROM arms a JOIN arm_verdicts v USING (arm_id)
"""

# An arm without a seed is a point of its own. DuckDB stores two columns of one REPLACE in either order, and a view must
# equal the schema to be trusted, so there are two REPLACE clauses.
_SWEEP_POINTS = f"""
    WITH failures AS (
        SELECT arm_id, bool_or(failed) FILTER (recall) AS recall_lost,
            bool_and(failed IS NOT true AND (NOT recall OR informative IS NOT true OR kept)) AS everything_kept
        FROM arm_verdicts GROUP BY arm_id
    ),
    chosen AS (
        SELECT * REPLACE (CASE WHEN kind IN ('mask', 'rule') THEN criterion END AS criterion)
        FROM (
            SELECT * REPLACE (CASE WHEN kind IN ('mask', 'rule') THEN selection END AS selection)
            FROM all_arm_comparison
        ) JOIN failures USING (arm_id)
        LEFT JOIN (SELECT arm_id, low AS expected_low FROM arm_verdicts WHERE task = {literal(EXPECTED_TASKS)})
        USING (arm_id)
        WHERE task = {literal(ALL_TASKS)} AND share IS NOT NULL AND ablated_share IS NOT NULL
    ),
    measured AS (
        SELECT run_id, kind, criterion, selection, share,
            count(*) AS arms, avg(ablated_share) AS ablated_share, avg(accuracy) AS accuracy, avg(baseline) AS baseline,
            avg(difference) AS difference, avg(low) AS low, avg(high) AS high,
            min(difference) AS lowest, max(difference) AS highest, max(questions) AS questions,
            min(texts) AS texts, coalesce(bool_or(recall_lost), false) AS recall_lost,
            CASE WHEN min(texts) >= {MIN_SAFE_TEXTS} AND avg(baseline) >= {MIN_ABOVE_CHANCE / 100}
                AND bool_and(informative)
                THEN avg(coalesce(expected_low, low)) > {-MARGIN / 100} AND bool_and(everything_kept) END AS safe
        FROM chosen GROUP BY run_id, kind, criterion, selection, share, CASE WHEN seed IS NULL THEN arm_id END
    )
    FROM measured
    UNION ALL BY NAME
    SELECT run_id, kind, criterion, selection, 0.0 AS share, 0 AS arms, 0.0 AS ablated_share, avg(baseline) AS accuracy,
        avg(baseline) AS baseline, 0.0 AS difference, 0.0 AS low, 0.0 AS high, 0.0 AS lowest, 0.0 AS highest,
        max(questions) AS questions, max(texts) AS texts, false AS recall_lost, true AS safe
    FROM measured GROUP BY run_id, kind, criterion, selection
"""

_SCORE_CURVES = f"""
    WITH curves AS (
        SELECT run_id, kind, criterion, selection, count(*) FILTER (arms > 0) AS points, avg(baseline) AS baseline,
            list(ablated_share) AS shares, list(accuracy) AS accuracies, max(ablated_share) AS reach,
            bool_and(safe IS NOT NULL) AS can_tell, min(ablated_share) FILTER (NOT safe) AS first_failed
        FROM all_sweep_points GROUP BY run_id, kind, criterion, selection
    ),
    reached AS (
        SELECT run_id, share FROM (SELECT DISTINCT run_id, share FROM all_sweep_points WHERE arms > 0) JOIN curves
        USING (run_id) GROUP BY run_id, share HAVING 2 * count_if(reach >= {_REACHED} * share) >= count(*)
    ),
    spans AS (SELECT run_id, max(share) AS area_upto FROM reached GROUP BY run_id)
    SELECT run_id, kind, criterion, selection, points,
        last_crossing(shares, accuracies, baseline - {MARGIN / 100}) AS share_within_point,
        CASE WHEN can_tell THEN coalesce(
            list_max(list_filter(shares, lambda share: first_failed IS NULL OR share < first_failed)), 0.0
        ) END AS safe_share,
        CASE WHEN reach >= {_REACHED} * area_upto
            THEN curve_area(shares, accuracies, least(reach, area_upto)) END AS area,
        area_upto
    FROM curves LEFT JOIN spans USING (run_id)
    ORDER BY share_within_point DESC, run_id, kind, criterion, selection
"""

# Whole documents are split (texts in recall tasks), because a document in two tasks, such as the letter and the cloze
# form of MMLU, must not be in both parts. Counting by hash within each task gives each task its share of both parts,
# independent of the order of questions and of the arms.
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
        CASE WHEN number % CASE WHEN recall THEN {RECALL_SPLITS} ELSE {BENCHMARK_SPLITS} END = 0
            THEN {literal(SELECTION)} ELSE {literal(CONFIRMATION)} END AS part
    FROM asked JOIN numbered USING (run_id, recall, document)
"""

_SWEEP_CONFIRMED = f"""
    SELECT a.run_id, a.arm_id, a.name AS arm, a.kind, a.criterion, a.selection, a.share, a.ablated_share,
        s.questions AS selection_questions, s.difference AS selection_difference, s.safe AS selection_safe,
        c.questions, c.baseline, c.accuracy, c.difference, c.low, c.high, c.gained, c.lost, c.p_value,
        c.comparisons, c.wide_low, c.safe
    FROM split_verdicts c JOIN split_verdicts s USING (arm_id, task, recall) JOIN arms a USING (arm_id)
    WHERE c.part = {literal(CONFIRMATION)} AND s.part = {literal(SELECTION)} AND task = {literal(ALL_TASKS)}
        AND c.selected IS NOT false
    ORDER BY a.run_id, a.kind
"""

_ARM = {c.name: c.comment for c in ARMS.columns} | {"arm": "name of the arm, unique in its run"}
_VERDICT = {c.name: c.comment for c in ARM_VERDICTS.columns}
_WIDENED = ("comparisons", "wide_low")
_CURVE = {
    "run_id": _ARM["run_id"],
    "kind": "mask, rule, random_mask or random_rule",
    "criterion": "criterion, such as a score, that selected the heads; NULL for random arms",
    "selection": _ARM["selection"],
}

#: Each is also created for all runs with the prefix ``all_``; the views read each other under that name.
ARM_VIEWS: dict[str, View] = {
    "arm_summary": View(
        _ARM_SUMMARY,
        "one row per arm and task, family of recall tasks, or whole benchmark: accuracy",
        {
            **{name: _ARM[name] for name in ("run_id", "arm_id", "arm", "kind", "replacement", "ablated_share")},
            "task": _VERDICT["task"],
            "recall": _VERDICT["recall"],
            "questions": "number of questions with a right answer",
            "accuracy": _VERDICT["accuracy"],
            "standard_error": "standard error of the accuracy, 0 to 1",
        },
    ),
    "arm_comparison": View(
        _ARM_COMPARISON,
        "rows of arm_verdicts with name, kind and shares of the arms",
        {
            **{name: _ARM[name] for name in ("run_id", "arm_id", "arm", "kind", "criterion", "selection")},
            **{name: _ARM[name] for name in ("share", "seed", "replacement", "ablated_share")},
            **{name: comment for name, comment in _VERDICT.items() if name != "arm_id"},
        },
    ),
    "sweep_points": View(
        _SWEEP_POINTS,
        "points of the curves, including the baseline: accuracy in the benchmark over the share of ablated"
        " heads, averaged over seeds only",
        {
            **_CURVE,
            "share": "nominal share of ablated heads, 0 to 1; 0 for the baseline",
            "arms": "number of averaged arms (seeds); 0 for the baseline",
            "ablated_share": "measured share of ablated heads, 0 to 1: mean over the arms",
            "accuracy": "mean accuracy of the arms, 0 to 1",
            "baseline": _VERDICT["baseline"],
            "difference": "accuracy minus baseline, -1 to 1: mean over the arms",
            "low": "lower end of the difference's 95 % interval, -1 to 1: mean over the arms",
            "high": "upper end of the same interval, -1 to 1: mean over the arms",
            "lowest": "difference of the worst arm, -1 to 1",
            "highest": "difference of the best arm, -1 to 1",
            "questions": _VERDICT["questions"],
            "texts": "number of independent texts; both forms of a question share a text",
            "recall_lost": "true if an arm fails a family of recall tasks that the baseline solves",
            "safe": f"true if low, which is that of {EXPECTED_TASKS} in arm_verdicts if there is one, is above"
            f" -{MARGIN:g} point, the arms have no failed row in arm_verdicts, and they keep the recall of"
            f" the baseline; NULL with fewer than {MIN_SAFE_TEXTS} texts, or if the baseline is"
            f" not shown to be above chance or is less than {MIN_ABOVE_CHANCE:g} points above it; the loss of text is"
            " not counted",
        },
    ),
    "score_curves": View(
        _SCORE_CURVES,
        "one row per curve: share of heads within one point, safe share, and mean accuracy",
        {
            **_CURVE,
            "points": "number of points of the curve, without the baseline",
            "share_within_point": f"share of heads, 0 to 1, at which accuracy last falls {MARGIN:g} point below the"
            " baseline (arXiv 2504.03889); the largest share if it never does",
            "safe_share": "largest tested share of heads, 0 to 1, up to which every tested share is safe (see"
            " safe in sweep_points); 0 if the smallest is not, NULL if safe is NULL at a point. Uses all questions, and"
            " is not corrected for the number of curves; sweep_confirmed is",
            "area": "mean accuracy over shares from 0 to area_upto, 0 to 1; NULL if the curve does not reach area_upto",
            "area_upto": "largest nominal share of heads, 0 to 1, that at least half of the run's curves reach (within"
            f" {percent(1 - _REACHED)}; the area of a shorter curve ends with the curve)",
        },
    ),
    "question_split": View(
        _QUESTION_SPLIT,
        "part of each question in a sweep, the same for every arm: half of each task's documents, and one"
        " of four recall texts, select the best arm; the others judge it",
        {
            "run_id": _ARM["run_id"],
            "task": "name of the task",
            "question": "index of the question in its task, from 0",
            "recall": _VERDICT["recall"],
            "part": PART.comment,
        },
    ),
    "sweep_confirmed": View(
        _SWEEP_CONFIRMED,
        "the best rule and the best mask of a sweep, selected on one part of the questions and judged on"
        " the other (see question_split); empty if the sweep did not confirm",
        {
            **{name: _ARM[name] for name in ("run_id", "arm_id", "arm", "kind", "criterion", "selection")},
            **{name: _ARM[name] for name in ("share", "ablated_share")},
            "selection_questions": "number of benchmark questions that selected the arm",
            "selection_difference": "accuracy minus baseline on the selecting questions, -1 to 1; biased upwards,"
            " because the best of many arms was selected",
            "selection_safe": "true if the arm is safe on the selecting questions; false if no arm of its kind is, and"
            " this one is the closest",
            "questions": "number of benchmark questions that judge the arm; none of them selected it",
            **{name: _VERDICT[name] for name in ("baseline", "accuracy", "difference", "low", "high")},
            **{name: _VERDICT[name] for name in ("gained", "lost", "p_value")},
            **{column.name: column.comment for column in SPLIT_VERDICTS.columns if column.name in _WIDENED},
            "safe": "true if the arm is safe within one point and keeps recall, on the judging questions"
            " alone, by intervals widened for the comparisons; the loss of text is not counted",
        },
    ),
}


def with_verdict_rows(rows: str) -> str:
    """Return a WITH clause that adds verdict rows to curves. ``rows`` names a relation with the columns of
    ``arm_verdicts``, whose rows replace the stored ones of its arms.
    """
    names = ("arm_comparison", "sweep_points", "score_curves")
    views = ", ".join(f"all_{name} AS ({ARM_VIEWS[name].query})" for name in names)
    return (
        f"WITH arm_verdicts AS (FROM main.arm_verdicts WHERE arm_id NOT IN (SELECT arm_id FROM {rows})"
        f" UNION ALL BY NAME FROM {rows}), {views}"
    )
