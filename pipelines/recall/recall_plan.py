"""Settings of the recall tasks, with lengths and question counts."""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil

from headscan.analysis.verdict_limits import QUESTIONS_PER_TEXT
from headscan.errors import HeadscanError

#: Questions that share one haystack or one passage.
SHARING = QUESTIONS_PER_TEXT

#: Default number of questions of each kind, over all lengths.
IN_ALL = 400

#: Default lengths are the powers of two from the first to the second.
_SHORTEST, _LONGEST = 256, 4096


class RecallError(HeadscanError):
    """Recall questions that cannot be made with these settings."""


@dataclass(frozen=True)
class RecallPlan:
    """Settings of the recall questions.

    An arm keeps recall if it is shown to keep 90 % of the ability above chance (`recall_limits`). In simulations with
    400 needle questions (100 texts), an arm that loses nothing but changes 4 % of the answers by chance is shown to
    keep recall in 99 % of cases if the model finds 90 % or more of the needles, and in 53 % if it finds 65 %. An arm
    that loses a tenth of the ability passes in at most 1 % of cases, one that loses five points in 4 to 9 %. With 72
    questions no arm passes.

    A model with 4,096 or more positions gets 80 questions for each of five lengths: 1.3 million tokens per arm, an
    eighth of MMLU's 14,042 prompts of about 700 tokens, or 0.33 million if common prefixes are read once.

    Attributes:
        lengths: Tokens that the model reads in a question; None uses those of `recall_lengths`.
        questions: Number for each length and kind, a multiple of 4; None makes `IN_ALL` of each kind.
        seed: Seed of all random choices.

    Raises:
        RecallError: A value is out of range.
    """

    lengths: tuple[int, ...] | None = None
    questions: int | None = None
    seed: int = 0

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


def questions_per_length(plan: RecallPlan, lengths: int) -> int:
    """Return the number of questions per length and kind for ``lengths`` lengths."""
    return SHARING * ceil(IN_ALL / (SHARING * lengths)) if plan.questions is None else plan.questions
