"""What a user says about the recall tasks: `RecallPlan`, the lengths that follow from it, and the error."""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil

from headscan.analysis.verdict_limits import QUESTIONS_PER_TEXT
from headscan.errors import HeadscanError

#: Questions that share one haystack or one passage.
SHARING = QUESTIONS_PER_TEXT

#: Where their number is not given, so many questions of a kind are asked, over all lengths.
IN_ALL = 400

#: Where lengths are not given, they are the powers of two between these.
_SHORTEST, _LONGEST = 256, 4096


class RecallError(HeadscanError):
    """Recall questions that cannot be made as asked."""


@dataclass(frozen=True)
class RecallPlan:
    """Which recall questions to make.

    An arm keeps recall if it is shown to keep 90 % of the ability above chance (`recall_limits`). In simulations with
    400 needle questions, which are 100 texts, an arm that loses nothing but changes 4 % of the answers by chance is
    shown to keep recall in 99 % of cases if the model finds 90 % or more of the needles, and in 53 % if it finds 65 %.
    An arm that loses a tenth of the ability is said to keep recall in at most 1 % of cases, one that loses five points
    in 4 to 9 %. With 72 questions no arm is ever shown to keep it.

    For a model of 4,096 positions or more that is 80 questions for each of five lengths: 1.3 million tokens an arm, an
    eighth of MMLU's 14,042 prompts of about 700 tokens, and 0.33 million where common beginnings are read once.

    Attributes:
        lengths: Tokens that the model reads in a question; None: chosen by `recall_lengths`.
        questions: How many for each length and kind, a multiple of 4; None: as many as make `IN_ALL` of each kind.
        seed: Of all that is drawn.

    Raises:
        RecallError: A value out of range.
    """

    lengths: tuple[int, ...] | None = None
    questions: int | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        if self.lengths is not None:
            if not self.lengths:
                raise RecallError("recall lengths are empty: give at least one, or none at all to have them chosen")
            if min(self.lengths) < 1:
                raise RecallError(f"a recall length of {min(self.lengths)} tokens is too small: give at least 1")
            if len(set(self.lengths)) < len(self.lengths):
                raise RecallError(f"recall lengths {', '.join(map(str, self.lengths))} repeat: give each once")
        if self.questions is not None and (self.questions < SHARING or self.questions % SHARING):
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


def questions_per_length(plan: RecallPlan, lengths: int) -> int:
    """Return how many questions of a kind each of so many ``lengths`` has."""
    return SHARING * ceil(IN_ALL / (SHARING * lengths)) if plan.questions is None else plan.questions
