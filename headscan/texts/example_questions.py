"""Labelled examples as questions of an evaluation: their requests, and the grading of the answers."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from headscan.errors import InterventionError
from headscan.runs.model_identity import fingerprint
from headscan.store.tables import ACCURACY, BLEU, LOSS
from headscan.texts.labelled_texts import Answers, ExampleRequest, LabelledTexts
from headscan.texts.token_requests import LogLikelihood
from headscan.verdicts.head_effects import bleu

#: Metrics by kind of targets; the first is the default.
METRICS = {Answers.CLASS: (ACCURACY, LOSS), Answers.TEXT: (BLEU, LOSS, ACCURACY)}

#: Generated tokens beyond twice the longest target.
_SPARE_TOKENS = 8


@dataclass(frozen=True)
class ExampleQuestions:
    """Labelled examples to answer, judged by a metric of their targets.

    Attributes:
        metric: One of `METRICS`; None uses the default of the targets.
        max_tokens: Number of positions of the model; None without a limit.
    """

    texts: LabelledTexts
    metric: str | None = None
    max_tokens: int | None = None

    def __post_init__(self) -> None:
        known = METRICS[self.texts.answers]
        if self.metric is not None and self.metric not in known:
            raise InterventionError(
                f"metric {self.metric!r} of {self.texts.answers.value} targets (limit {', '.join(known)}). Choose"
                " another"
            )
        object.__setattr__(self, "metric", self.metric or known[0])

    @property
    def corpus(self) -> str:
        return self.texts.spec.name

    @cached_property
    def requests(self) -> dict[str, ExampleRequest]:
        texts = self.texts.texts
        most = 2 * max(len(text.target_ids) for text in texts) + _SPARE_TOKENS
        if self.max_tokens is not None:
            most = min(most, self.max_tokens - 1)
        answers, scored, classes = self.texts.answers, self.metric == LOSS, self.texts.classes
        return {
            fingerprint({"example": (text.index, *text.tokens)}): ExampleRequest(text, answers, scored, classes, most)
            for text in texts
        }

    def settings(self) -> dict[str, Any]:
        return {"metric": self.metric, "answers": self.texts.answers.value, "examples": len(self.texts.texts)}

    def answers(self, responses: Mapping[str, LogLikelihood | str]) -> list[dict[str, Any]]:
        """Return the answer rows of an arm; only accuracy has right answers."""
        graded = self.metric == ACCURACY
        given = [responses[key] for key in self.requests]
        return [
            {
                "task": self.corpus,
                "question": text.index,
                "doc_hash": text.document,
                "target": text.target,
                "response": answer if isinstance(answer, str) else None,
                "correct": numbers[0] if graded else None,
                "recall": False,
                "metrics": json.dumps({} if graded else {self.metric: numbers}),
            }
            for text, answer, numbers in zip(self.texts.texts, given, self._numbers(responses), strict=True)
        ]

    def results(self, responses: Mapping[str, LogLikelihood | str]) -> list[dict[str, Any]]:
        """Return the result row of an arm: the metric over all examples."""
        numbers = np.array(self._numbers(responses), dtype=float)
        total = numbers.sum(0)
        value = total[0] / len(numbers) if self.metric == ACCURACY else -total[0] / total[1]
        return [
            {
                "task": self.corpus,
                "is_group": False,
                "metric": self.metric,
                "filter": "none",
                "value": float(bleu(total) if self.metric == BLEU else value),
                "questions": len(numbers),
            }
        ]

    def _numbers(self, responses: Mapping[str, LogLikelihood | str]) -> list[list[float]]:
        """Return the numbers of each answer: 1 or 0 for accuracy, log-likelihood and tokens for a loss, or the counts
        of a sentence for BLEU.
        """
        pairs: list[tuple[Any, Any]] = [(responses[key], each.example) for key, each in self.requests.items()]
        if self.metric == ACCURACY:
            return [[float(answer == text.target)] for answer, text in pairs]
        if self.metric == LOSS:
            return [[answer.log_likelihood, len(text.target_ids)] for answer, text in pairs]
        from sacrebleu.metrics.bleu import BLEU as SentenceBleu

        scorer: Any = SentenceBleu(effective_order=True)  # avoids a warning about single sentences
        scores = [scorer.sentence_score(answer, [text.target]) for answer, text in pairs]
        return [[*score.counts, *score.totals, score.sys_len, score.ref_len] for score in scores]
