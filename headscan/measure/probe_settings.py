"""Settings of a probe's sequences."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from headscan.errors import SequenceError
from headscan.options import Option


@dataclass(frozen=True)
class BehaviourProbe:
    """The sequences of a probe. The defaults of tokens and repeats are those of arXiv 2209.11895.

    All tokens except special ones are equally likely, because a model does not list which tokens are common.

    Attributes:
        seed: Seed of the random tokens.
        sequences: Number of sequences of repeats.
        tokens: Number of different random tokens in such a sequence.
        repeats: Number of times they occur.
        lengths: Lengths of the prompts with a needle, in tokens, with question and answer.
        depths: Positions of the needle in the haystack, from 0 (beginning) to 1 (end).

    Raises:
        SequenceError: A value out of range.
    """

    seed: Annotated[int, Option("seed of the random tokens", least=0, most=2**63 - 1)] = 0
    sequences: int = 8
    tokens: int = 25
    repeats: int = 4
    lengths: tuple[int, ...] = (512,)
    depths: Annotated[
        tuple[float, ...],
        Option(
            "comma-separated positions of the sentence, from 0 (beginning) to 1 (end)", least=0, most=1, spaces=True
        ),
    ] = (0.0, 0.25, 0.5, 0.75, 1.0)

    def __post_init__(self) -> None:
        for name, least in (("seed", 0), ("sequences", 1), ("tokens", 2), ("repeats", 2)):
            if getattr(self, name) < least:
                raise SequenceError(f"{name} is too small for a probe: {getattr(self, name)} (limit {least}). Raise it")
        if self.seed >= 1 << 63:
            raise SequenceError(f"seed is too large: {self.seed} (limit 2**63 - 1). Lower it")
        if not self.lengths or not self.depths:
            raise SequenceError("lengths or depths of a probe are empty. Pass at least one of each")
        if min(self.lengths) < 1:
            raise SequenceError(f"lengths are too small for a prompt: {min(self.lengths)} (limit 1). Raise them")
        for depth in self.depths:
            if not 0 <= depth <= 1:
                raise SequenceError(
                    f"depth is outside the haystack: {depth} (limits 0 and 1). Pass 0 for its beginning, 1 for its end"
                )
