"""Open the pool of a placement."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from headscan.cluster.actors.timeouts import Timeouts
from headscan.cluster.placement.pipeline_placement import PipelinePlacement
from headscan.cluster.placement.placement_base import Placement, ReplicaPlacement
from headscan.cluster.placement.sharded_placement import ShardedPlacement
from headscan.cluster.placement.streamed_placement import StreamedPlacement
from headscan.cluster.placement.whole_placement import WholePlacement
from headscan.cluster.pools.in_process import InProcessPool
from headscan.cluster.tasks.pool import Pool
from headscan.model_spec import ModelSpec


def open_pool(
    spec: ModelSpec, placement: Placement, *, on_cluster: bool = False, timeouts: Timeouts | None = None
) -> Pool:
    """Open the pool of a placement.

    It runs in this process for one device, and on Ray for several or on a connected cluster.

    Args:
        on_cluster: A Ray cluster is connected, and a single replica runs there too.
        timeouts: How long to wait for workers on Ray; None uses the defaults.
    """
    return POOLS[type(placement)](spec, placement, on_cluster, timeouts)


# Each function imports its pool, because Ray takes a second to import and a single device does not need it.


def _replicas(spec: ModelSpec, placement: ReplicaPlacement, on_cluster: bool, timeouts: Timeouts | None) -> Pool:
    if placement.replicas == 1 and not on_cluster:
        return InProcessPool(spec, placement)
    from headscan.cluster.pools.ray_pool import RayPool

    return RayPool(spec, placement, timeouts=timeouts)


def _pipeline(spec: ModelSpec, placement: PipelinePlacement, on_cluster: bool, timeouts: Timeouts | None) -> Pool:
    from headscan.cluster.pools.pipeline_pool import PipelinePool

    return PipelinePool(spec, placement, timeouts=timeouts)


def _streamed(spec: ModelSpec, placement: StreamedPlacement, on_cluster: bool, timeouts: Timeouts | None) -> Pool:
    from headscan.cluster.pools.streamed_pool import StreamedPool

    return StreamedPool(spec, placement)


#: The function that opens the pool of each placement.
POOLS: Mapping[type[Placement], Callable[[ModelSpec, Any, bool, Timeouts | None], Pool]] = {
    WholePlacement: _replicas,
    ShardedPlacement: _replicas,
    PipelinePlacement: _pipeline,
    StreamedPlacement: _streamed,
}
