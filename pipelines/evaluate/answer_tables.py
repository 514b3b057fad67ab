"""Tables of answers and results from lm-eval's samples."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

import pyarrow as pa

#: Metrics from 0 to 1 that grade an answer; the first one that a task reports is used.
_CORRECT = ("acc", "exact_match", "acc_norm", "acc_mutual_info", "em", "exact", "f1", "contains")


def answer_table(samples: dict[str, list[dict[str, Any]]]) -> pa.Table:
    """Return one row per task and question from lm-eval's samples.

    ``correct`` is the first metric that grades an answer; NULL for tasks without one, such as a perplexity.
    """
    rows = []
    for task, questions in samples.items():
        # The other filters of a task extract the same answers in other ways.
        questions = [sample for sample in questions if sample["filter"] == questions[0]["filter"]]
        metric = _metric(questions)
        for sample in questions:
            # A log-likelihood is a pair; a filter may also return lists of texts.
            responses = [answer for answer in sample["filtered_resps"] if isinstance(answer, tuple | list) and answer]
            values = [answer[0] for answer in responses if isinstance(answer[0], int | float)]
            if "acc_mutual_info" in sample["metrics"]:
                # The second half contains the same choices without their context.
                given, alone = values[: len(values) // 2], values[len(values) // 2 :]
                values = [a - b for a, b in zip(given, alone, strict=True)] if metric == "acc_mutual_info" else given
            rows.append(
                {
                    "task": task,
                    "question": int(sample["doc_id"]),
                    "doc_hash": sample["doc_hash"],
                    "target": str(sample["target"]),
                    "response": str(values.index(max(values))) if values else str(sample["filtered_resps"][0]),
                    "correct": None if metric is None else float(sample[metric]),
                    "recall": False,
                    "log_likelihoods": [float(value) for value in values],
                    "metrics": json.dumps({name: sample[name] for name in sample["metrics"]}, default=str),
                }
            )
    return pa.Table.from_pylist(rows, schema=ANSWERS)


#: Columns of an arm's answers.
ANSWERS = pa.schema(
    {
        "task": pa.string(),
        "question": pa.int32(),
        "doc_hash": pa.string(),
        "target": pa.string(),
        "response": pa.string(),
        "correct": pa.float64(),
        "recall": pa.bool_(),
        "log_likelihoods": pa.list_(pa.float64()),
        "metrics": pa.string(),
    }
)


def _metric(questions: Sequence[Mapping[str, Any]]) -> str | None:
    """Return the metric that grades a task's answers.

    It is the same for every arm; None if the task has none.
    """
    if not questions:
        return None
    first = questions[0]
    return next((name for name in _CORRECT if isinstance(first.get(name), int | float)), None)


def _result_table(found: Mapping[str, Any]) -> pa.Table:
    """Return lm-eval's own aggregation by task and group."""
    groups = found.get("groups", {})
    rows = []
    for name, figures in found["results"].items():
        for key, value in figures.items():
            metric, comma, filtered = key.partition(",")
            if not comma or metric.endswith("_stderr"):
                continue
            error = figures.get(f"{metric}_stderr,{filtered}")
            rows.append(
                {
                    "task": name,
                    "is_group": name in groups,
                    "metric": metric,
                    "filter": filtered,
                    "value": float(value) if isinstance(value, int | float) else None,
                    "standard_error": float(error) if isinstance(error, int | float) else None,
                    "questions": figures.get("sample_len"),
                }
            )
    return pa.Table.from_pylist(rows, schema=_RESULTS)


_RESULTS = pa.schema(
    {
        "task": pa.string(),
        "is_group": pa.bool_(),
        "metric": pa.string(),
        "filter": pa.string(),
        "value": pa.float64(),
        "standard_error": pa.float64(),
        "questions": pa.int32(),
    }
)
