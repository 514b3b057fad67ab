"""The placements."""

from __future__ import annotations

from headscan.cluster.placement.pipeline_placement import PipelinePlacement
from headscan.cluster.placement.placement_base import Placement, PlacementError
from headscan.cluster.placement.sharded_placement import ShardedPlacement
from headscan.cluster.placement.streamed_placement import StreamedPlacement
from headscan.cluster.placement.whole_placement import WholePlacement

__all__ = [
    "PLACEMENTS",
    "PipelinePlacement",
    "Placement",
    "PlacementError",
    "ShardedPlacement",
    "StreamedPlacement",
    "WholePlacement",
]

#: Every placement by its name, in the order in which ``auto`` tries them.
PLACEMENTS: dict[str, type[Placement]] = {
    kind.name: kind for kind in (WholePlacement, ShardedPlacement, PipelinePlacement, StreamedPlacement)
}
