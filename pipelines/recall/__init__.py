"""Recall tasks beside a benchmark: needles to be found, text to be copied, at any length, for any tokenizer.

A benchmark with one-letter answers does not see retrieval heads die (arXiv 2404.15574). These tasks do. They are made,
not read, and answered by log-likelihood alone, so that any causal decoder takes them beside any benchmark. A baseline
at chance (a quarter of the needles, nothing copied) says that the model cannot do the task; an arm below a baseline
that is above chance, that the ablated heads were needed.
"""

from headscan.pipelines.recall.make_questions import recall_questions
from headscan.pipelines.recall.question import RecallQuestion, grade
from headscan.pipelines.recall.recall_plan import RecallError, RecallPlan, recall_lengths

__all__ = ["RecallError", "RecallPlan", "RecallQuestion", "grade", "recall_lengths", "recall_questions"]
