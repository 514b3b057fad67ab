"""The pool for a placement."""

from __future__ import annotations

from headscan.cluster.actors.timeouts import Timeouts
from headscan.cluster.placement.kinds import PipelinePlacement, Placement, StreamedPlacement
from headscan.cluster.pools.in_process import InProcessPool
from headscan.cluster.tasks.pool import Pool
from headscan.model_spec import ModelSpec


def open_pool(
    spec: ModelSpec, placement: Placement, *, on_cluster: bool = False, timeouts: Timeouts | None = None
) -> Pool:
    """The pool for a placement: in this process for one device, on Ray for several or when a cluster is connected.

    Args:
        timeouts: How long to wait for workers on Ray; None uses the defaults.
    """
    # Ray takes a second to import, and one device needs none of it.
    if isinstance(placement, StreamedPlacement):
        from headscan.cluster.pools.streamed_pool import StreamedPool

        return StreamedPool(spec, placement)
    if isinstance(placement, PipelinePlacement):
        from headscan.cluster.pools.pipeline_pool import PipelinePool

        return PipelinePool(spec, placement, timeouts=timeouts)
    if placement.replicas == 1 and not on_cluster:
        return InProcessPool(spec, placement)
    from headscan.cluster.pools.ray_pool import RayPool

    return RayPool(spec, placement, timeouts=timeouts)
