"""Settings of a fit of gates."""

from __future__ import annotations

from dataclasses import dataclass
from math import inf, isfinite
from typing import Annotated, Literal, get_args

from headscan.errors import GateError
from headscan.options import Option

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
        objective: ``loss``: the loss on the texts; ``divergence``: from the predictions of the model without gates
            (decoders only).
        steps: Number of steps of Adam; a fit whose share is not closed by then takes up to four times as many.
        rate: Learning rate; it falls to a tenth in the second half.
        start: Location of all gates at the start; 1.5 means that 91 % of the gates are open.
        seed: Seed of the noise and of the order of the texts, at least 0.
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


#: The settings of a fit by default.
DEFAULTS = GateConfig()
