"""Settings of the choice of heads. This module imports no library."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from headscan.errors import PruningError
from headscan.options import Count, Limits, Option, check_limits, short


@short
@dataclass(frozen=True)
class SelectionConfig:
    """Effort of the choice.

    Attributes:
        moment_tokens: Calibration tokens of the moments and of the repair between stages.
        curve_tokens: Calibration tokens of the measured curves.
        first_share: Largest share of units that the first stage chooses.
        next_share: Share of units that each further stage adds.
        tries: Choices near the best one that are repaired and compared with it.
        judged_tokens: Calibration tokens of this comparison; the last ones, so that others repair.

    Raises:
        PruningError: A number is out of range.
    """

    moment_tokens: Count = 16384
    curve_tokens: Count = 4096
    first_share: Annotated[float, Limits(above=0, most=1)] = 0.4
    next_share: Annotated[float, Limits(above=0, most=1)] = 0.1
    tries: Annotated[
        int,
        Option("choices near the best one that are repaired and compared with it, for damage and layer-drop", least=0),
    ] = 0
    judged_tokens: Count = 8192

    def __post_init__(self) -> None:
        check_limits(self, PruningError)
