"""What a user says about the recall tasks: `RecallPlan`, the lengths that follow from it, and the error."""

from __future__ import annotations

from dataclasses import dataclass

from analysis.recall import QUESTIONS_PER_TEXT
from headscan.errors import HeadscanError

#: Questions that share one haystack or one passage.
SHARING = QUESTIONS_PER_TEXT

#: Where lengths are not given, they are the powers of two between these.
_SHORTEST, _LONGEST = 256, 4096


class RecallError(HeadscanError):
    """Recall questions that cannot be made as asked."""


@dataclass(frozen=True)
class RecallPlan:
    """Which recall questions to make.

    The default of 36 questions means nine haystacks and nine passages a length: 45 of each for a model of 4,096
    positions or more, and 36 for each of five lengths makes 180 questions a family. The 900 requests hold 1.4 million
    tokens, a seventh of MMLU's 14,042 prompts of about 700 tokens, and 0.15 million where common beginnings are read
    once. A paired difference of five points then leaves its 95 % interval (1.96 sqrt(d / n)) as long as no more than
    d = 12 % of the answers change; with two lengths, n = 72, as long as no more than 5 % do, that is, nearly all for
    the worse, which is how recall breaks.

    Attributes:
        lengths: Tokens that the model reads in a question; None: chosen by `recall_lengths`.
        questions: How many for each length and task, a multiple of 4.
        seed: Of all that is drawn.

    Raises:
        RecallError: A value out of range.
    """

    lengths: tuple[int, ...] | None = None
    questions: int = 36
    seed: int = 0

    def __post_init__(self) -> None:
        if self.lengths is not None:
            if not self.lengths:
                raise RecallError("recall lengths are empty: give at least one, or none at all to have them chosen")
            if min(self.lengths) < 1:
                raise RecallError(f"a recall length of {min(self.lengths)} tokens is too small: give at least 1")
            if len(set(self.lengths)) < len(self.lengths):
                raise RecallError(f"recall lengths {', '.join(map(str, self.lengths))} repeat: give each once")
        if self.questions < SHARING or self.questions % SHARING:
            raise RecallError(
                f"{self.questions} recall questions cannot be made: {SHARING} share a text, so give a multiple of "
                f"{SHARING}"
            )
        if self.seed < 0:
            raise RecallError(f"recall seed {self.seed} is negative: give at least 0")


def recall_lengths(plan: RecallPlan, max_tokens: int | None) -> tuple[int, ...]:
    """The plan's lengths, or those that suit a model.

    Chosen are the powers of two from 256 to 4,096 that the model has positions for, and its limit where that is none of
    them and below 4,096.

    Args:
        max_tokens: Positions of the model; None: it names no limit.

    Raises:
        RecallError: A length beyond the model's positions.
    """
    if plan.lengths is not None:
        longest = max(plan.lengths)
        if max_tokens is not None and longest > max_tokens:
            raise RecallError(
                f"a recall length of {longest} tokens is more than the model's {max_tokens} positions: give at most "
                f"{max_tokens}"
            )
        return plan.lengths
    limit = _LONGEST if max_tokens is None else min(max_tokens, _LONGEST)
    lengths = [_SHORTEST]
    while lengths[-1] < limit:
        lengths.append(2 * lengths[-1])
    return tuple(dict.fromkeys(min(length, limit) for length in lengths))
