"""Which placement a model gets on given devices: the first of these that fits, or the one that was asked for.

whole       a replica a device
sharded     a replica over several GPUs of one node
pipeline    layer ranges on devices of whatever nodes
streamed    one device, through which the layers go one range after another
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from headscan.cluster.placement import planners as choices
from headscan.cluster.placement.demand import Demand, DeviceBytes, Plan
from headscan.cluster.placement.devices import Node
from headscan.cluster.placement.kinds import (
    PipelinePlacement,
    Placement,
    PlacementError,
    ShardedPlacement,
    StreamedPlacement,
    WholePlacement,
)
from headscan.cluster.placement.placement_request import BATCH_TOKENS, PlacementRequest, Places
from headscan.sizing.model_sizes import ModelSizes

__all__ = [
    "BATCH_TOKENS",
    "DeviceBytes",
    "PipelinePlacement",
    "Placement",
    "PlacementError",
    "PlacementRequest",
    "Plan",
    "ShardedPlacement",
    "StreamedPlacement",
    "WholePlacement",
    "place",
]

_CHOICES = {
    "whole": choices.whole,
    "sharded": choices.sharded,
    "pipeline": choices.pipeline,
    "streamed": choices.streamed,
}


def place(sizes: ModelSizes, nodes: Sequence[Node], request: PlacementRequest) -> Plan:
    """Choose a placement.

    Args:
        sizes: The model's, for the longest sequence to come.
        nodes: The machines that there are.
        request: What is asked.

    Raises:
        PlacementError: It cannot be granted; the message says by how many bytes, and what to do.
    """
    places = Places(nodes, request)
    demand = Demand(sizes, request.batch_tokens or BATCH_TOKENS, request.evaluates)
    refusals: list[str] = []
    for kind in request.kinds:
        try:
            plan = _CHOICES[kind](demand, places, request)
        except PlacementError as problem:
            refusals.append(f"{kind}: {problem}")
        else:
            return replace(plan, why=tuple(refusals))
    mend = "; --placement auto takes what fits" if len(request.kinds) == 1 else "; use larger devices, or more of them"
    raise PlacementError(f"{sizes.name} cannot be placed. {'. '.join(refusals)}{mend}")
