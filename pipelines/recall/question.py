"""A recall question and its grade."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import isnan
from typing import Any

from headscan.errors import NotFiniteError
from headscan.pipelines.scoring.token_requests import Likelihood, Request


@dataclass(frozen=True)
class RecallQuestion:
    """A question as the requests whose likelihoods answer it.

    Attributes:
        task: Family and length in tokens, such as ``needle@512``.
        question: Its number in the task, from 0.
        requests: One per choice; a single one for a continuation.
        answer: Index of the right choice; None for a continuation, graded by its greedy tokens.
        target: The response of a fully right answer.
    """

    task: str
    question: int
    requests: tuple[Request, ...]
    answer: int | None
    target: str


def grade(question: RecallQuestion, likelihoods: Sequence[Likelihood]) -> dict[str, Any]:
    """Return a question's row of the table ``answers``.

    ``correct`` is 1 or 0 for a choice (equally likely choices share the 1, so that guessing stays at chance), and the
    share of greedy tokens for a continuation.

    Raises:
        NotFiniteError: A log-likelihood is NaN.
    """
    values = [likelihood.log_likelihood for likelihood in likelihoods]
    if any(map(isnan, values)):
        raise NotFiniteError(
            f"log-likelihoods of question {question.question} of {question.task} are NaN, because the model's "
            "activations are NaN or infinite. Load it in another `dtype`"
        )
    if question.answer is None:
        (request,), (likelihood,) = question.requests, likelihoods
        correct = likelihood.greedy_tokens / request.scored
        response = str(likelihood.greedy_tokens)
    else:
        likeliest = [choice for choice, value in enumerate(values) if value == max(values)]
        correct = (question.answer in likeliest) / len(likeliest)
        response = str(likeliest[0])
    return {
        "task": question.task,
        "question": question.question,
        "correct": correct,
        "target": question.target,
        "response": response,
        "log_likelihoods": values,
        "recall": True,
    }
