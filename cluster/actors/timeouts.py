"""Timeouts of a pool on Ray."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Annotated

from headscan.cluster.placement.placement_base import PlacementError
from headscan.options import LONGEST_WAIT, Option


@dataclass(frozen=True)
class Timeouts:
    """Timeouts of a pool on Ray, in seconds.

    Attributes:
        heartbeat: A worker without a heartbeat for this long is replaced. A slow disk that is read while Python's lock
            is held, or a node that swaps, can delay one for minutes.
        start: A run in which no worker has started for this long ends; it can be resumed.
    """

    heartbeat: Annotated[
        float,
        Option(
            "heartbeat timeout of Ray workers, in seconds",
            flag="--silence-limit",
            metavar="SECONDS",
            least=1,
            most=LONGEST_WAIT,
        ),
    ] = 300.0
    start: Annotated[
        float,
        Option(
            "timeout for the first worker on a Ray cluster, in seconds",
            flag="--start-timeout",
            metavar="SECONDS",
            least=1,
            most=LONGEST_WAIT,
        ),
    ] = 600.0

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if not value > 0:
                raise PlacementError(f"{field.name} timeout: {value:g} s (limit: above 0). Give a positive number")
