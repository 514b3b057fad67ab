"""Settings of a fit of gates. This module imports no library."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

from headscan.errors import GateError
from headscan.options import Count, Limits, Option, check_limits, short

#: What the gates preserve: the model's loss on the texts, or the predictions of the model without gates.
Objective = Literal["loss", "divergence"]


@short
@dataclass(frozen=True)
class GateFitConfig:
    """Settings of a fit of gates.

    Attributes:
        share: Share of heads that the fit closes, above 0 and below 1; the penalty follows. None keeps ``penalty``.
        penalty: Penalty in nats per open gate: the loss is that of the texts plus the penalty times the sum of P(open).
            A negative penalty opens gates. With a share, this is the penalty at the start.
        rate: Learning rate; it falls to a tenth in the second half.
        batch_tokens: Tokens of a step, with padding.
        start: Location of all gates at the start; 1.5 means that 91 % of the gates are open.
    """

    share: Annotated[float | None, Option("share of heads to close", above=0, below=1)] = 0.4
    penalty: Annotated[float, Limits()] = 0.0
    objective: Annotated[
        Objective, Option("loss: that of the texts; divergence: from the predictions without gates")
    ] = "loss"
    steps: Annotated[
        int, Option("number of steps of each fit; up to four times as many follow until the share is closed", least=1)
    ] = 120
    rate: Annotated[float, Limits(above=0)] = 0.15
    start: Annotated[float, Limits()] = 1.5
    batch_tokens: Count = 1024
    seed: Annotated[int, Option("seed of the noise", least=0)] = 0

    def __post_init__(self) -> None:
        check_limits(self, GateError)
