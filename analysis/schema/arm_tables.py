"""The tables of evaluations: which heads were ablated, what was answered, and what that says."""

from __future__ import annotations

from headscan.analysis.schema.ddl import Column, Table
from headscan.analysis.schema.scan_tables import HEAD, LAYER, RUN, SITE

#: The ``task`` of rows that hold all questions of the benchmark together; recall tasks do not count in it.
ALL_TASKS = "(all)"

_ARM = Column("arm_id", "VARCHAR", "the arm, see arms")
_MASK = Column("mask_id", "VARCHAR", "the mask, see masks")
_RECALL = Column(
    "recall", "BOOLEAN", "whether the task tests recall (needle, copying), beside the benchmark and not part of it"
)

#: The parts of a sweep's questions: the best arm is selected on one and judged on the other.
SELECTION, CONFIRMATION = "selection", "confirmation"

PART = Column(
    "part", "VARCHAR", f"{SELECTION}: the questions that select the best arm; {CONFIRMATION}: those that judge it"
)

MASKS = Table(
    "masks",
    "fixed sets of heads",
    (
        Column("mask_id", "VARCHAR", "12 hexadecimal digits that follow from the mask"),
        Column("run_id", "VARCHAR", "the scan it was chosen from", nullable=True),
        Column("name", "VARCHAR", "name, unique in the store"),
        Column("score", "VARCHAR", "the score it was chosen by", nullable=True),
        Column("share", "DOUBLE", "share of all heads that was asked for, 0 to 1", nullable=True),
        Column("config", "JSON", "how it was made"),
        Column("created_at", "TIMESTAMPTZ", "when it was made"),
    ),
    (("mask_id",), ("name",)),
)

MASK_HEADS = Table(
    "mask_heads", "the heads of each mask", (_MASK, SITE, LAYER, HEAD), (("mask_id", "site", "layer", "head"),)
)

ARMS = Table(
    "arms",
    "what an evaluate run compares",
    (
        Column("arm_id", "VARCHAR", "12 hexadecimal digits that follow from the arm"),
        RUN,
        Column("name", "VARCHAR", "name, unique in its run"),
        Column("kind", "VARCHAR", "baseline, mask, rule, random_mask or random_rule"),
        Column("mask_id", "VARCHAR", "the heads that were ablated", nullable=True),
        Column("score", "VARCHAR", "the score that chose the heads of a mask or rule", nullable=True),
        Column(
            "selection",
            "VARCHAR",
            "what the heads were chosen by beside the score: the scan, and the order of a mask; NULL for random arms"
            " and masks made by hand",
            nullable=True,
        ),
        Column("threshold", "DOUBLE", "the threshold of a rule, in the score's unit", nullable=True),
        Column(
            "share",
            "DOUBLE",
            "nominal share of heads to ablate, 0 to 1: a rule's quantile, a mask's size",
            nullable=True,
        ),
        Column("seed", "INTEGER", "seed of a random arm", nullable=True),
        Column("config", "JSON", "everything else"),
        Column("zeroed_share", "DOUBLE", "share of heads really ablated, 0 to 1", nullable=True),
        Column("started_at", "TIMESTAMPTZ", "last begin"),
        Column("finished_at", "TIMESTAMPTZ", "end", nullable=True),
        Column("status", "VARCHAR", "running or finished"),
    ),
    (("arm_id",), ("run_id", "name")),
)

RESPONSES = Table(
    "responses",
    "what an arm that is not finished has been answered so far; gone when its answers are there",
    (
        _ARM,
        Column("request", "VARCHAR", "hash of the request"),
        Column("log_likelihood", "DOUBLE", "of a continuation, in nats; NULL for a generated text", nullable=True),
        Column(
            "greedy_tokens",
            "INTEGER",
            "tokens of the continuation that are the likeliest at their place; NULL for a generated text",
            nullable=True,
        ),
        Column("text", "VARCHAR", "the generated text; NULL for a continuation", nullable=True),
        Column("zeroed_share", "DOUBLE", "share of heads ablated in this request, 0 to 1"),
    ),
    (("arm_id", "request"),),
)

ANSWERS = Table(
    "answers",
    "one row per arm, task and question: what lets arms be compared in pairs",
    (
        _ARM,
        Column("task", "VARCHAR", "name of the task"),
        Column("question", "INTEGER", "number of the question in its task, from 0"),
        _RECALL,
        Column("doc_hash", "VARCHAR", "hash of the question's text", nullable=True),
        Column("target", "VARCHAR", "the right answer", nullable=True),
        Column("response", "VARCHAR", "the model's answer", nullable=True),
        Column(
            "correct",
            "DOUBLE",
            "1 for right, 0 for wrong, between them for partial credit; NULL where nothing is right, as in perplexity",
            nullable=True,
        ),
        Column("log_likelihoods", "DOUBLE[]", "of the choices, in nats", nullable=True),
        Column("metrics", "JSON", "all metrics of the question", nullable=True),
    ),
    (("arm_id", "task", "question"),),
)

ARM_RESULTS = Table(
    "arm_results",
    "one row per arm, task or group of tasks, metric and filter: what lm-eval makes of the answers",
    (
        _ARM,
        Column("task", "VARCHAR", "name of the task or group"),
        Column("is_group", "BOOLEAN", "whether it is a group of tasks"),
        Column("metric", "VARCHAR", "name of the metric"),
        Column("filter", "VARCHAR", "name of the filter the answers went through, none for none"),
        Column("value", "DOUBLE", "the metric, in its own unit", nullable=True),
        Column("standard_error", "DOUBLE", "its standard error, in the same unit", nullable=True),
        Column("questions", "INTEGER", "how many questions it was taken over", nullable=True),
    ),
    (("arm_id", "task", "metric", "filter"),),
)

ARM_VERDICTS = Table(
    "arm_verdicts",
    "one row per arm but the baseline, and task, family of recall tasks, or all of the benchmark: the arm against its"
    " run's baseline, question by question",
    (
        _ARM,
        Column(
            "task",
            "VARCHAR",
            "name of the task, of the group of tasks that was asked for, of the family of recall tasks, or"
            f" {ALL_TASKS}: the benchmark",
        ),
        _RECALL,
        Column("questions", "INTEGER", "questions both answered that have a right answer"),
        Column("baseline", "DOUBLE", "accuracy of the baseline, 0 to 1"),
        Column("accuracy", "DOUBLE", "accuracy of the arm, 0 to 1"),
        Column("difference", "DOUBLE", "accuracy minus baseline, -1 to 1"),
        Column(
            "low",
            "DOUBLE",
            "lower end of the difference's 95 % interval, -1 to 1 (bootstrap within tasks; of recall tasks"
            " whole texts are drawn; where few answers differ the score test's, if wider)",
        ),
        Column("high", "DOUBLE", "upper end of that interval, -1 to 1"),
        Column("gained", "INTEGER", "questions where the arm does better"),
        Column("lost", "INTEGER", "questions where it does worse"),
        Column(
            "p_value",
            "DOUBLE",
            "of McNemar's exact test, two-sided; recall questions of one text hang together, which it does not know",
        ),
        Column(
            "informative",
            "BOOLEAN",
            "of a family of recall tasks: whether the baseline itself does it; NULL for all else",
            nullable=True,
        ),
        Column(
            "failed",
            "BOOLEAN",
            "whether the arm is shown to lose: of a task or group, more than one point, by an interval that allows for"
            f" the number of tasks; of {ALL_TASKS}, whether one of them fails; of a family of recall tasks, whether the"
            " baseline does it and the arm loses a tenth of the ability above chance, or more than one point; NULL for"
            " all else",
            nullable=True,
        ),
        Column(
            "worst_task",
            "VARCHAR",
            f"of {ALL_TASKS}: the task or group with the clearest loss (the lowest upper end of an interval that allows"
            " for the number of tasks); NULL for all else",
            nullable=True,
        ),
        Column("worst_difference", "DOUBLE", "difference of the worst task, -1 to 1", nullable=True),
        Column("worst_low", "DOUBLE", "lower end of its interval, -1 to 1, allowing for all tasks", nullable=True),
        Column("worst_high", "DOUBLE", "upper end of that interval, -1 to 1", nullable=True),
        Column(
            "retained",
            "DOUBLE",
            "of a family of recall tasks: the arm's accuracy above chance, divided by the baseline's; NULL elsewhere",
            nullable=True,
        ),
        Column(
            "retained_low",
            "DOUBLE",
            "lower end of the 95 % interval of retained (Bayesian bootstrap of whole texts and one lost text)",
            nullable=True,
        ),
        Column("retained_high", "DOUBLE", "upper end of that interval, likewise with one gained text", nullable=True),
        Column(
            "kept",
            "BOOLEAN",
            "of a family of recall tasks: whether the arm is shown to keep it (retained_low is at least 0.9, and not"
            " failed); NULL for all else",
            nullable=True,
        ),
    ),
    (("arm_id", "task", "recall"),),
)

SPLIT_VERDICTS = Table(
    "split_verdicts",
    "arm_verdicts by one part of a sweep's questions (see question_split): every arm that a score chose by the"
    " questions that select, and the selected arm by those that judge it",
    (
        _ARM,
        PART,
        *(column for column in ARM_VERDICTS.columns if column is not _ARM),
        Column(
            "passes",
            "BOOLEAN",
            f"in the row of {ALL_TASKS}: by the questions that select, whether the arm may be selected; by those that"
            " judge, whether it is removable within one point; NULL in all other rows",
            nullable=True,
        ),
    ),
    (("arm_id", "part", "task", "recall"),),
)
