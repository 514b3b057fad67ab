"""Options: what the command line shows of a settings class, and the settings of probes and gates.

    @dataclass(frozen=True)
    class TokenPlan:
        min_tokens: Annotated[int, Option("minimum sequence length in tokens", least=1)] = 2

Type and default follow from the field. `headscan.pipelines.cli.option_parser` makes the parser. This module imports no
library.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from math import inf, isfinite
from typing import Annotated, Any, Literal, get_args

from headscan.errors import GateError, SequenceError

#: About four months in seconds. Longer waits overflow in threads and locks.
LONGEST_WAIT = 1e7


@dataclass(frozen=True)
class Option:
    """The command-line option of a field.

    Attributes:
        help: Noun phrase with unit; the default is added unless the text names it.
        flag: Name of the option, or several with spaces between them; None makes it from the field's name. A name
            without dashes is a positional argument.
        metavar: Name of the value in help; None uses that of the option.
        choices: Permitted values; None reads them from a `Literal`.
        least, most: Limits of a number, included.
        above, below: Limits of a number, excluded.
        kind: Noun for one of ``names``.
        names: Values of a text; errors propose the nearest.
        sets: Words that stand for several names.
        spaces: Values may also be separated by spaces.
        negated: The option sets False.
        one_of: Name of a group of options that exclude each other.
        required: The option, or one of its group, is required.
    """

    help: str
    flag: str | None = None
    metavar: str | None = None
    choices: tuple[str, ...] | None = None
    parse: Callable[[str], Any] | None = None
    least: float | None = None
    most: float | None = None
    above: float | None = None
    below: float | None = None
    kind: str = "name"
    names: Iterable[str] | None = None
    sets: Mapping[str, tuple[str, ...]] | None = None
    spaces: bool = False
    negated: bool = False
    repeated: bool = False
    one_of: str | None = None
    required: bool = False


@dataclass(frozen=True)
class Group:
    """A settings class inside another one, as a titled group of the help page; without a title, part of the group
    around.
    """

    title: str = ""


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


#: What the gates preserve: the model's loss on the texts, or the predictions of the model without gates.
Objective = Literal["loss", "divergence"]
OBJECTIVES: tuple[Objective, ...] = get_args(Objective)


@dataclass(frozen=True)
class GateConfig:
    """Settings of a fit of gates.

    Attributes:
        share: Share of heads that the fit closes, above 0 and below 1; the penalty follows. None keeps ``penalty``.
        penalty: Penalty in nats per open gate: the loss is that of the texts plus the penalty times the sum of P(open).
            A negative one opens gates. With a share, its value at the start.
        rate: Learning rate; it falls to a tenth in the second half.
        start: Location of all gates at the start; 1.5 means that 91 % of the gates are open.
    """

    share: Annotated[float | None, Option("share of heads to close", above=0, below=1)] = 0.4
    penalty: float = 0.0
    objective: Annotated[
        Objective, Option("loss: that of the texts; divergence: from the predictions without gates")
    ] = "loss"
    steps: Annotated[
        int,
        Option("number of steps of each fit; up to four times as many follow until the share is closed", least=1),
    ] = 120
    rate: float = 0.15
    start: float = 1.5
    batch_tokens: Annotated[int, Option("tokens of a step, with padding", flag="--step-tokens", least=1)] = 1024
    seed: Annotated[int, Option("seed of the noise", least=0)] = 0

    def __post_init__(self) -> None:
        if self.share is not None and not 0 < self.share < 1:
            raise GateError(f"share of closed gates: {self.share:g} (limit above 0, below 1). Change `share`")
        if self.objective not in OBJECTIVES:
            raise GateError(f"unknown objective {self.objective!r}. Choose {' or '.join(OBJECTIVES)}")
        for name, least in (("steps", 1), ("batch_tokens", 1), ("seed", 0)):
            if getattr(self, name) < least:
                raise GateError(f"{name}={getattr(self, name)} (limit {least}). Raise `{name}`")
        if not 0 < self.rate < inf:
            raise GateError(f"rate={self.rate:g} (limit above 0). Change `rate`")
        for name in ("penalty", "start"):
            if not isfinite(getattr(self, name)):
                raise GateError(f"{name}={getattr(self, name):g} is not finite. Change `{name}`")
