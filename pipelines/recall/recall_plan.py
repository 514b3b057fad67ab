"""Settings of the recall tasks, with lengths and question counts; a question and its grade."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import ceil, isnan
from typing import Any

from headscan.errors import NotFiniteError
from headscan.pipelines.scoring.token_requests import Likelihood, Request
from headscan.pipelines.settings.evaluation_settings import SHARING, RecallError, RecallPlan

#: Default number of questions of each kind, over all lengths.
IN_ALL = 400

#: The kinds of questions: families of recall tasks.
NEEDLE, COPYING = "needle", "copying"

#: Default lengths are the powers of two from the first to the second.
_SHORTEST, _LONGEST = 256, 4096


def recall_lengths(plan: RecallPlan, max_tokens: int | None) -> tuple[int, ...]:
    """Return the plan's lengths, or default lengths for a model. The defaults are the powers of two from 256 to 4,096
    up to the model's limit, and the limit itself if it is below 4,096.

    Args:
        max_tokens: Positions of the model; None means no limit.
    """
    if plan.lengths is not None:
        longest = max(plan.lengths)
        if max_tokens is not None and longest > max_tokens:
            raise RecallError(
                f"recall length of {longest} tokens (limit {max_tokens} positions of the model). Lower the "
                "recall lengths"
            )
        return plan.lengths
    limit = _LONGEST if max_tokens is None else min(max_tokens, _LONGEST)
    lengths = [_SHORTEST]
    while lengths[-1] < limit:
        lengths.append(2 * lengths[-1])
    return tuple(dict.fromkeys(min(length, limit) for length in lengths))


def questions_per_length(plan: RecallPlan, lengths: int) -> dict[str, int]:
    """Return the number of questions per length, by kind, for ``lengths`` lengths."""
    numbers = dict(zip((NEEDLE, COPYING), plan.in_all or (IN_ALL, IN_ALL), strict=True))
    if plan.questions is not None:
        return dict.fromkeys(numbers, plan.questions)
    return {kind: SHARING * ceil(number / (SHARING * lengths)) for kind, number in numbers.items()}


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
