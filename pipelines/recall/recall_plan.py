"""Settings of the recall tasks, with lengths and question counts; a question and its grade."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from math import ceil, isnan
from typing import Any

from headscan.analysis.verdict_limits import QUESTIONS_PER_TEXT
from headscan.errors import HeadscanError, NotFiniteError
from headscan.pipelines.scoring.token_requests import Likelihood, Request

#: Questions that share one haystack or one passage.
SHARING = QUESTIONS_PER_TEXT

#: Default number of questions of each kind, over all lengths.
IN_ALL = 400

#: The kinds of questions: families of recall tasks.
NEEDLE, COPYING = "needle", "copying"

#: Default lengths are the powers of two from the first to the second.
_SHORTEST, _LONGEST = 256, 4096


class RecallError(HeadscanError):
    """Recall questions that cannot be made with these settings."""


@dataclass(frozen=True)
class RecallPlan:
    """Settings of the recall questions.

    An arm keeps recall if it is shown to keep 90 % of the ability above chance (`verdict_limits`). In simulations with
    400 needle questions (100 texts), an arm that loses nothing but changes 4 % of the answers by chance is shown to
    keep recall in 99 % of cases if the model finds 90 % or more of the needles, and in 53 % if it finds 65 %. An arm
    that loses a tenth of the ability passes in at most 1 % of cases, one that loses five points in 4 to 9 %. With 72
    questions no arm passes. A sweep, which judges on three quarters of them, asks the whole model first and makes as
    many as its recall needs (`recall_size`).

    A model with 4,096 or more positions gets 80 questions for each of five lengths: 1.3 million tokens per arm, an
    eighth of MMLU's 14,042 prompts of about 700 tokens, or 0.33 million if common prefixes are read once.

    Attributes:
        lengths: Tokens that the model reads in a question; None uses those of `recall_lengths`.
        questions: Number for each length and kind, a multiple of 4; None makes as many as ``in_all`` says.
        in_all: Numbers of needles and of copies over all lengths; None makes `IN_ALL` of each kind.
        seed: Seed of all random choices.

    Raises:
        RecallError: A value is out of range.
    """

    lengths: tuple[int, ...] | None = None
    questions: int | None = None
    seed: int = 0
    in_all: tuple[int, int] | None = None

    def __post_init__(self) -> None:
        if self.lengths is not None:
            if not self.lengths:
                raise RecallError("recall lengths are empty. Give at least one, or None for the default")
            if min(self.lengths) < 1:
                raise RecallError(f"recall length of {min(self.lengths)} tokens is too small. Give at least 1")
            if len(set(self.lengths)) < len(self.lengths):
                raise RecallError(f"recall lengths {', '.join(map(str, self.lengths))} repeat. Give each once")
        if self.questions is not None and (self.questions < SHARING or self.questions % SHARING):
            raise RecallError(
                f"{self.questions} recall questions: not a multiple of {SHARING}, and {SHARING} share a text. Give a "
                f"multiple of {SHARING}"
            )
        if self.seed < 0:
            raise RecallError(f"recall seed {self.seed} is negative. Give at least 0")
        if self.in_all is not None and min(self.in_all) < 1:
            raise RecallError(f"recall questions in all: {min(self.in_all)} (limit 1). Give at least 1 of each kind")

    def settings(self) -> dict[str, Any]:
        """Return the settings that identify a run; earlier runs lack ``in_all``, so its default is left out."""
        return {name: value for name, value in asdict(self).items() if name != "in_all" or value is not None}


def recall_lengths(plan: RecallPlan, max_tokens: int | None) -> tuple[int, ...]:
    """Return the plan's lengths, or default lengths for a model.

    The defaults are the powers of two from 256 to 4,096 up to the model's limit, and the limit itself if it is below
    4,096.

    Args:
        max_tokens: Positions of the model; None means no limit.

    Raises:
        RecallError: A length exceeds the model's positions.
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
