"""Settings of behaviour probes. This module imports no library."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from headscan.errors import SequenceError
from headscan.options import Count, Limits, Option, check_limits, short


@short
@dataclass(frozen=True)
class BehaviourProbe:
    """The sequences of a probe. The defaults of tokens and repeats are those of arXiv 2209.11895.

    All tokens except special ones are equally likely, because a model does not list which tokens are common.

    Attributes:
        sequences: Number of sequences of repeats.
        tokens: Number of different random tokens in such a sequence.
        repeats: Number of times they occur.
        lengths: Lengths of the prompts with a needle, in tokens, with question and answer; None uses those of
            `lengths_within`.

    Raises:
        SequenceError: A value out of range.
    """

    seed: Annotated[int, Option("seed of the random tokens", least=0, most=2**63 - 1)] = 0
    sequences: Count = 8
    tokens: Annotated[
        int, Option("number of different random tokens in a sequence of repeats", flag="--repeated-tokens", least=2)
    ] = 25
    repeats: Annotated[int, Limits(least=2)] = 4
    lengths: Annotated[
        tuple[int, ...] | None,
        Option(
            "comma-separated prompt lengths in tokens (default: 512,2048, or the model's context)", least=1, spaces=True
        ),
    ] = None
    depths: Annotated[
        tuple[float, ...],
        Option(
            "comma-separated positions of the sentence, from 0 (beginning) to 1 (end)", least=0, most=1, spaces=True
        ),
    ] = (0.0, 0.25, 0.5, 0.75, 1.0)

    def __post_init__(self) -> None:
        check_limits(self, SequenceError)
        if self.lengths == () or not self.depths:
            raise SequenceError("lengths or depths of a probe are empty. Pass at least one of each")

    def lengths_within(self, max_tokens: int | None) -> tuple[int, ...]:
        """Return the lengths; their default is 512 and 2,048 tokens, each at most a model's ``max_tokens``."""
        if self.lengths is not None:
            return self.lengths
        return tuple(dict.fromkeys(min(length, max_tokens or 2048) for length in (512, 2048)))
