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
    """A question, as the requests whose likelihoods answer it.

    Attributes:
        task: Family and tokens read, such as ``needle@512``.
        question: Its number in the task, from 0.
        requests: One a choice; a single one where there is nothing to choose.
        answer: Index of the right choice; None: what counts is how much of the continuation is greedy.
        target: What `grade` gives as the response to an entirely right answer.
    """

    task: str
    question: int
    requests: tuple[Request, ...]
    answer: int | None
    target: str


def grade(question: RecallQuestion, likelihoods: Sequence[Likelihood]) -> dict[str, Any]:
    """The row of the table ``answers`` for the likelihoods of a question's requests.

    ``correct`` is 1 or 0 for a choice (choices equally likely share the 1, so that guessing stays at chance), and for
    a continuation the share of its tokens that are greedy.

    Raises:
        NotFiniteError: A log-likelihood is NaN.
    """
    values = [likelihood.log_likelihood for likelihood in likelihoods]
    if any(map(isnan, values)):
        raise NotFiniteError(
            f"log-likelihoods of question {question.question} of {question.task} are NaN: the model's activations are "
            "NaN or infinite there; load it in another dtype"
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
