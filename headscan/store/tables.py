"""The tables of a store, declared once as data.

The DDL, the column comments in the database, the checks on incoming Arrow tables and the documentation read these
declarations.
"""

from __future__ import annotations

from typing import Final

from headscan.store.records import ArmKind
from headscan.store.scan_tables import (
    HEAD_BEHAVIOURS,
    HEAD_GATES,
    HEAD_IMPORTANCE,
    HEAD_STATISTICS,
    HEAD_SUMMARIES,
    MEASURE_POOLS,
    RUNS,
    SEQUENCES,
    SHARDS,
    Column,
    Table,
    columns,
)

#: The ``task`` of rows about the whole benchmark, which excludes recall tasks.
ALL_TASKS = "(all)"
#: The ``task`` of rows about the same questions, where an answer among choices counts by the probability of the right
#: one.
EXPECTED_TASKS = "(expected)"

#: The parts of a sweep's questions: one selects the best arm, the other judges it.
SELECTION, CONFIRMATION = "selection", "confirmation"

PART = Column(
    "part", "VARCHAR", f"{SELECTION}: the questions select the best arm; {CONFIRMATION}: the questions judge it"
)

MASKS = Table(
    "masks",
    "one row per fixed set of heads",
    columns("""
        mask_id VARCHAR 12 hexadecimal digits, computed from the mask
        run_id VARCHAR? id of the run that ranked the heads
        name VARCHAR name of the mask, unique in the store
        criterion VARCHAR? criterion, such as a score, that ranked the heads
        share DOUBLE? requested share of all heads, 0 to 1
        config JSON settings of the selection
        created_at TIMESTAMPTZ time when the mask was stored
    """),
    (("mask_id",), ("name",)),
)

MASK_HEADS = Table(
    "mask_heads",
    "one row per head of a mask",
    columns("mask_id site layer head"),
    (("mask_id", "site", "layer", "head"),),
)

ARMS = Table(
    "arms",
    "one row per arm of an evaluate run: the baseline, a way to ablate heads, or another model",
    columns(f"""
        arm_id VARCHAR 12 hexadecimal digits, computed from the arm
        run_id
        name VARCHAR name of the arm, unique in its run
        kind VARCHAR {", ".join(kind.value for kind in ArmKind)}
        mask_id VARCHAR? id of the mask with the ablated heads
        criterion VARCHAR? criterion, such as a score, that selected the heads
        selection VARCHAR? how the heads were selected, in addition to the criterion: the scan, and the order of a
            mask; NULL for random arms and for masks made by hand
        threshold DOUBLE? threshold of a rule, in the unit of its score
        share DOUBLE? nominal share of ablated heads, 0 to 1: the quantile of a rule, the size of a mask; for a
            plan, the share of KV heads that do not keep all keys
        seed INTEGER? seed of a random arm
        replacement VARCHAR? what replaces the output of ablated heads: zero (tests whether they are inactive),
            mean (constant) or resample (independent of the input); NULL if the arm ablates none
        config JSON all other settings
        ablated_share DOUBLE? measured share of ablated or removed heads, 0 to 1
        look INTEGER? last planned look, from 1, whose questions the arm was asked; NULL without looks
        started_at TIMESTAMPTZ time when the arm last began
        finished_at TIMESTAMPTZ? time when the arm finished
        status VARCHAR running or finished
    """),
    (("arm_id",), ("run_id", "name")),
)

ANSWERS = Table(
    "answers",
    "one row per arm, task and question; arms are compared question by question",
    columns("""
        arm_id
        task VARCHAR name of the task
        question INTEGER index of the question in its task, from 0
        recall
        doc_hash VARCHAR? hash of the question's text
        document VARCHAR? name of the document that the question is made from; NULL if it is unknown
        target VARCHAR? right answer
        response VARCHAR? answer of the model
        correct DOUBLE? 1 for right, 0 for wrong, in between for partial credit; NULL for tasks without right
            answers
        log_likelihoods DOUBLE[]? log-likelihoods of the choices, in nats
        metrics JSON? all metrics of lm-eval for the question
    """),
    (("arm_id", "task", "question"),),
)

ARM_RESULTS = Table(
    "arm_results",
    "one row per arm, task or group of tasks, metric and filter: the results of lm-eval",
    columns("""
        arm_id
        task VARCHAR name of the task or group
        is_group BOOLEAN true for a group of tasks
        metric VARCHAR name of the metric
        filter VARCHAR name of lm-eval's filter of the answers; none if there is none
        value DOUBLE? value of the metric, in its own unit
        standard_error DOUBLE? standard error of the value, in the same unit
        questions INTEGER? number of questions
    """),
    (("arm_id", "task", "metric", "filter"),),
)

ARM_VERDICTS = Table(
    "arm_verdicts",
    "one row per arm except the baseline, and per task, family of recall tasks, or whole benchmark: comparison with the"
    " baseline of the run, question by question",
    columns(f"""
        arm_id
        task VARCHAR name of the task, of the requested group of tasks, or of the family of recall tasks;
            {ALL_TASKS} for the whole benchmark; {EXPECTED_TASKS} for the same questions, where an answer among choices
            counts by the probability of the right one, a softmax of the choices' scores, instead of 0 or 1
        recall
        questions INTEGER number of questions with a right answer that both arms answered
        baseline DOUBLE accuracy of the baseline, 0 to 1
        accuracy DOUBLE accuracy of the arm, 0 to 1
        difference DOUBLE accuracy minus baseline, -1 to 1
        low DOUBLE lower end of the difference's 95 % interval, -1 to 1: Gaffke's bound over whole texts, of which
            one more is lost
        high DOUBLE upper end of the same interval, -1 to 1: one more text is gained
        lows DOUBLE[] lower ends for 1, 2, 3, 5, 10, 20, 100, 10,000 and 10,000,000 comparisons; those for
            other numbers lie between
        highs DOUBLE[] upper ends of the same intervals
        standard_error DOUBLE standard error of the difference over independent texts, at most 1
        gained INTEGER number of questions on which the arm is better
        lost INTEGER number of questions on which the arm is worse
        p_value DOUBLE two-sided p-value of McNemar's exact test on texts: one is gained or lost by the sum of its
            questions' differences
        informative BOOLEAN? true if the baseline solves the family of recall tasks, or is shown to be above
            chance in the task or benchmark; NULL in rows of single recall tasks
        chance DOUBLE? accuracy of guessing, 0 to 1: mean over the questions of 1 / choices, 0 for questions
            without choices; NULL if no question has any (generated answers), and in recall rows
        failed BOOLEAN? true if a loss is shown. Task or group: more than one point, by an interval corrected
            for the number of tasks. {ALL_TASKS}: a task or group fails. {EXPECTED_TASKS}: more than one point.
            Family of recall tasks: the baseline solves it, and the arm loses more than a tenth of the ability above
            chance, or more than one point. NULL in other rows
        worst_task VARCHAR? in rows of {ALL_TASKS}, the task or group with the clearest loss: the lowest upper
            end of an interval corrected for the number of tasks; NULL in other rows
        worst_difference DOUBLE? difference of the worst task, -1 to 1
        worst_low DOUBLE? lower end of its interval, -1 to 1, corrected for the number of tasks
        worst_high DOUBLE? upper end of the same interval, -1 to 1
        retained DOUBLE? in rows of families of recall tasks, accuracy above chance divided by the baseline's;
            NULL in other rows
        retained_low DOUBLE? lower end of the 95 % interval of retained (Bayesian bootstrap of whole texts, with
            one more lost text)
        retained_high DOUBLE? upper end of the same interval, with one more gained text
        kept BOOLEAN? in rows of families of recall tasks, true if the arm keeps the ability (retained_low is at
            least 0.9, and failed is false); NULL in other rows
        texts INTEGER number of independent texts; recall questions share texts, and so do both forms of a question
        texts_differ INTEGER number of texts with an answer that differs
        documents INTEGER? number of documents that the questions are made from; NULL if it is unknown
    """),
    (("arm_id", "task", "recall"),),
)

SPLIT_VERDICTS = Table(
    "split_verdicts",
    "arm_verdicts on one part of a sweep's questions (see question_split): all arms of scores, and random arms that are"
    " ranked with them, on the selection part; all arms that were ever selected on the confirmation part",
    (
        *columns("arm_id"),
        PART,
        *ARM_VERDICTS.columns[1:],
        *columns(f"""
            safe BOOLEAN? in rows of {ALL_TASKS}, true if the arm may be selected (selection part), or is safe
                within one point by intervals widened for the comparisons (confirmation part); NULL in other rows
            comparisons INTEGER? in rows of {ALL_TASKS} on the confirmation part, number of arms of this model that
                these questions have judged in this store; NULL in other rows
            wide_low DOUBLE? in the same rows, lower end of the difference's interval widened for the comparisons,
                -1 to 1
            selected BOOLEAN? on the confirmation part, false if another arm was selected since; it still counts as
                a comparison. NULL in other rows
        """),
    ),
    (("arm_id", "part", "task", "recall"),),
)


#: A single head is ablated, or all heads of its layer but this one.
EACH: Final = "each"
ALL_BUT_ONE: Final = "all_but_one"

#: Metrics of effects.
ACCURACY, LOSS, BITS_PER_BYTE, BLEU = "accuracy", "loss", "bits_per_byte", "bleu"
#: Metrics that grow as a model gets better; the others fall.
HIGHER_IS_BETTER = (ACCURACY, BLEU)

#: Largest q-value of a significant effect.
FALSE_DISCOVERY_RATE = 0.05

HEAD_EFFECTS = Table(
    "head_effects",
    "one row per head of an ablate run: the change of a metric, ablated minus baseline, paired by question or document",
    columns(f"""
        run_id
        mode VARCHAR {EACH}: this head alone is ablated; {ALL_BUT_ONE}: all other heads of its layer are, one
            row per layer
        site layer
        head kv_head
        replacement VARCHAR what replaces the output of ablated heads: zero, mean or resample
        metric VARCHAR {ACCURACY} (0 to 1), {LOSS} (nats per token), {BITS_PER_BYTE} or {BLEU} (0 to 100)
        baseline DOUBLE metric without ablation, on the same questions or documents
        effect DOUBLE metric with ablated heads minus baseline
        standard_error DOUBLE? standard error of the effect; NULL with one document
        low DOUBLE? lower end of the effect's 95 % interval; NULL with too few documents
        high DOUBLE? upper end of the same interval; NULL with too few documents
        p_value DOUBLE two-sided p-value: for {ACCURACY} McNemar's exact test on documents, each gained or lost
            as a whole, for {BLEU} Student's t with the error of a paired bootstrap over sentences, for the others
            the larger one of Student's t and of a studentised bootstrap over documents
        q_value DOUBLE p-value adjusted by Benjamini and Hochberg over all rows of the run and mode
        n INTEGER number of questions, or of documents
        confirmed BOOLEAN? {EACH}: true if the effect is significant in one half of the questions (q at most
            {FALSE_DISCOVERY_RATE:g}) and the interval of the other half is on the same side of 0;
            {ALL_BUT_ONE}: true if one half chose the head and the other half judges it. NULL if there are too
            few to split
    """),
    (("run_id", "mode", "site", "layer", "head"),),
)


UNITS = Table(
    "units",
    "finished units of a run's work, one row each, and what they gave; the same command reads them instead of measuring"
    " again",
    columns("""
        run_id
        unit VARCHAR hash of what was measured
        what VARCHAR what was measured, in words
        arm_id VARCHAR? id of the unfinished arm whose requests are answered: the numbers of each request are its
            log-likelihood, greedy tokens and share of ablated heads. They are deleted when the answers are stored
        numbers DOUBLE[] the numbers, in the order in which the program needs them
        texts VARCHAR[]? generated texts, or classes
    """),
    (("run_id", "unit"),),
)


#: Raise it with every change of a table, but not of a comment, and with every change of a rule of stored verdicts: a
#: store of another schema is refused. A new statistic or profile needs none, because its nullable column comes with the
#: views, which need no version: a store in which views or functions differ gets them again.
SCHEMA_VERSION = 1

#: Value of the key ``format`` in ``meta``, which distinguishes a store from other DuckDB files.
FORMAT = "headscan store"

META = Table(
    "meta",
    "format and versions of this file",
    columns("""
        key VARCHAR format, schema_version (of the tables), duckdb_version or views (hash of the views and functions)
        value VARCHAR value of the key
    """),
    (("key",),),
)


TABLES: dict[str, Table] = {
    table.name: table
    for table in (
        META,
        RUNS,
        SHARDS,
        SEQUENCES,
        HEAD_STATISTICS,
        HEAD_SUMMARIES,
        MEASURE_POOLS,
        HEAD_BEHAVIOURS,
        HEAD_IMPORTANCE,
        HEAD_EFFECTS,
        HEAD_GATES,
        MASKS,
        MASK_HEADS,
        ARMS,
        ANSWERS,
        ARM_RESULTS,
        ARM_VERDICTS,
        SPLIT_VERDICTS,
        UNITS,
    )
}
