"""Open the pool of a placement: one replica in this process, or workers on Ray."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch

from headscan.cluster.placement.choose import WholePlacement
from headscan.cluster.placement.pipeline_placement import PipelinePlacement
from headscan.cluster.placement.placement_base import Placement, ReplicaPlacement, Timeouts
from headscan.cluster.placement.sharded_placement import ShardedPlacement
from headscan.cluster.placement.streamed_placement import StreamedPlacement
from headscan.cluster.tasks.pool import Finished, Pool, R, T, Task, run_task
from headscan.model_spec import ModelSpec
from headscan.models.loaded_model import LoadedModel


class InProcessPool(Pool):
    """One replica in this process, loaded when it is first needed."""

    def __init__(self, spec: ModelSpec, placement: ReplicaPlacement) -> None:
        self._spec, self._placement = spec, placement
        self._lm: LoadedModel | None = None

    @property
    def replicas(self) -> int:
        return 1

    @property
    def local(self) -> bool:
        return True

    def map(self, task: Task[T, R], items: Iterable[T]) -> Iterator[Finished[T, R]]:
        for item in items:
            value, seconds = run_task(self._model(), task, item)
            yield Finished(item, value, seconds, "in-process")

    def close(self) -> None:
        self._lm = None

    def _model(self) -> LoadedModel:
        if self._lm is None:
            torch.set_num_threads(self._placement.threads)
            self._lm = self._spec.load(self._placement.local_target())
        return self._lm


def open_pool(
    spec: ModelSpec, placement: Placement, *, on_cluster: bool = False, timeouts: Timeouts | None = None
) -> Pool:
    """Open the pool of a placement: in this process for one device, on Ray for several, or on a connected cluster
    (``on_cluster``), where a single replica runs too. None for ``timeouts`` uses the defaults.
    """
    return POOLS[type(placement)](spec, placement, on_cluster, timeouts)


# Each function imports its pool, because Ray takes a second to import and a single device does not need it.


def _replicas(spec: ModelSpec, placement: ReplicaPlacement, on_cluster: bool, timeouts: Timeouts | None) -> Pool:
    if placement.replicas == 1 and not on_cluster:
        return InProcessPool(spec, placement)
    from headscan.cluster.pools.ray_pool import RayPool

    return RayPool(spec, placement, timeouts=timeouts)


def _pipeline(spec: ModelSpec, placement: PipelinePlacement, on_cluster: bool, timeouts: Timeouts | None) -> Pool:
    from headscan.cluster.pools.ray_pool import PipelinePool

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
