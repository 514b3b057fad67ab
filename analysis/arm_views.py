"""The views of evaluations: what arms answered, and the curves that sweeps draw.

``arm_summary`` counts answers; all others read ``arm_verdicts``, where ``analysis.verdict_rows`` has compared each arm
with its baseline. Accuracies and differences are shares, 0 to 1 (differences -1 to 1).
"""

from __future__ import annotations

from analysis.arm_tables import ALL_TASKS, ARM_VERDICTS, ARMS
from analysis.ddl import literal
from analysis.paired import LEAST_BASELINE, LEAST_QUESTIONS, MARGIN

#: A curve reaches a nominal share when the heads that it really silences are at least this part of it: a mask is
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

# Without a seed an arm is a point of its own, whatever else is alike.
_SWEEP_POINTS = f"""
    WITH recall AS (SELECT arm_id, bool_or(failed) AS recall_lost FROM arm_verdicts GROUP BY arm_id),
    chosen AS (
        SELECT * REPLACE (CASE WHEN kind IN ('mask', 'rule') THEN score END AS score,
            CASE WHEN kind IN ('mask', 'rule') THEN selection END AS selection)
        FROM arm_comparison JOIN recall USING (arm_id)
        WHERE task = {literal(ALL_TASKS)} AND share IS NOT NULL AND zeroed_share IS NOT NULL
    ),
    measured AS (
        SELECT run_id, kind, score, selection, share,
            count(*) AS arms, avg(zeroed_share) AS zeroed_share, avg(accuracy) AS accuracy, avg(baseline) AS baseline,
            avg(difference) AS difference, avg(low) AS low, avg(high) AS high,
            min(difference) AS lowest, max(difference) AS highest, max(questions) AS questions,
            coalesce(bool_or(recall_lost), false) AS recall_lost
        FROM chosen GROUP BY run_id, kind, score, selection, share, CASE WHEN seed IS NULL THEN arm_id END
    )
    FROM measured
    UNION ALL BY NAME
    SELECT run_id, kind, score, selection, 0.0 AS share, 0 AS arms, 0.0 AS zeroed_share, avg(baseline) AS accuracy,
        avg(baseline) AS baseline, 0.0 AS difference, 0.0 AS low, 0.0 AS high, 0.0 AS lowest, 0.0 AS highest,
        max(questions) AS questions, false AS recall_lost
    FROM measured GROUP BY run_id, kind, score, selection
"""

_SCORE_CURVES = f"""
    WITH curves AS (
        SELECT run_id, kind, score, selection, count(*) FILTER (arms > 0) AS points, avg(baseline) AS baseline,
            list(zeroed_share) AS shares, list(accuracy) AS accuracies, list(low) AS lows,
            max(zeroed_share) AS reach, min(questions) AS questions,
            min(zeroed_share) FILTER (recall_lost) AS first_lost
        FROM sweep_points GROUP BY run_id, kind, score, selection
    ),
    reached AS (
        SELECT run_id, share FROM (SELECT DISTINCT run_id, share FROM sweep_points WHERE arms > 0) JOIN curves
        USING (run_id) GROUP BY run_id, share HAVING 2 * count_if(reach >= {_REACHED} * share) >= count(*)
    ),
    spans AS (SELECT run_id, max(share) AS area_upto FROM reached GROUP BY run_id)
    SELECT run_id, kind, score, selection, points,
        last_crossing(shares, accuracies, baseline - {MARGIN / 100}) AS removable_share,
        CASE WHEN questions >= {LEAST_QUESTIONS} AND baseline >= {LEAST_BASELINE / 100} THEN least(
            last_crossing(shares, lows, -{MARGIN / 100}),
            CASE WHEN first_lost IS NOT NULL
                THEN coalesce(list_max(list_filter(shares, lambda share: share < first_lost)), 0.0) END
        ) END AS removable_share_strict,
        CASE WHEN reach >= {_REACHED} * area_upto
            THEN curve_area(shares, accuracies, least(reach, area_upto)) END AS area,
        area_upto
    FROM curves LEFT JOIN spans USING (run_id)
    ORDER BY removable_share DESC, run_id, kind, score, selection
"""

ARM_VIEWS: dict[str, str] = {
    "arm_summary": _ARM_SUMMARY,
    "arm_comparison": _ARM_COMPARISON,
    "sweep_points": _SWEEP_POINTS,
    "score_curves": _SCORE_CURVES,
}

ARM_VIEW_COMMENTS: dict[str, str] = {
    "arm_summary": "accuracy of each arm in each task, each family of recall tasks, and the benchmark as a whole",
    "arm_comparison": "arm_verdicts with the names and shares of the arms",
    "sweep_points": "the benchmark's accuracy over the share of heads silenced, seeds and nothing else averaged: the"
    " points of the curves, the baseline among them",
    "score_curves": "one row per curve: how many heads it lets go within one point, and the mean accuracy under it",
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
        "share": "nominal share of heads to silence, 0 to 1; 0 for the baseline",
        "arms": "how many arms (seeds) are averaged; 0 for the baseline",
        "zeroed_share": "share of heads really silenced, 0 to 1: mean over the arms",
        "accuracy": "mean over the arms, 0 to 1",
        "baseline": _VERDICT["baseline"],
        "difference": "accuracy minus baseline, -1 to 1: mean over the arms",
        "low": "lower end of the difference's 95 % interval, -1 to 1: mean over the arms",
        "high": "upper end, likewise",
        "lowest": "difference of the worst arm, -1 to 1",
        "highest": "difference of the best arm, -1 to 1",
        "questions": _VERDICT["questions"],
        "recall_lost": "whether an arm fails a family of recall tasks that the baseline does",
    },
    "score_curves": {
        **_CURVE,
        "points": "points of the curve beside the baseline",
        "removable_share": f"share of heads, 0 to 1, at which accuracy last falls {MARGIN:g} point below the baseline"
        " (arXiv 2504.03889); the last share where it never does",
        "removable_share_strict": f"the same of the interval's lower end and -{MARGIN:g} point: what the questions"
        " prove; no further than the last share before the first one where recall is lost; NULL below"
        f" {LEAST_QUESTIONS} questions, or where the baseline is right on less than {LEAST_BASELINE:g} % of them",
        "area": "mean accuracy over shares from 0 to area_upto, 0 to 1; NULL where the curve does not reach it",
        "area_upto": "the largest nominal share of heads in the run, 0 to 1, that at least half of its curves reach (to"
        f" {1 - _REACHED:.0%} of it: such a curve's area ends with the curve)",
    },
}
