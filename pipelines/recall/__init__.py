"""Recall tasks of any length and for any tokenizer: find needles and copy text.

A benchmark with one-letter answers does not notice the loss of retrieval heads (arXiv 2404.15574). These generated
tasks do; log-likelihoods answer them, so any causal decoder can take them. A baseline at chance (a quarter of
the needles, nothing copied) shows that the model cannot do the task. An arm below a baseline that is above chance shows
that the ablated heads were needed.
"""

from headscan.pipelines.recall.needle_and_copying import (
    RecallQuestion,
    RecallSeries,
    grade,
    recall_lengths,
    recall_questions,
    recall_series,
)
from headscan.pipelines.settings.evaluation_settings import RecallError, RecallPlan

__all__ = [
    "RecallError",
    "RecallPlan",
    "RecallQuestion",
    "RecallSeries",
    "grade",
    "recall_lengths",
    "recall_questions",
    "recall_series",
]
