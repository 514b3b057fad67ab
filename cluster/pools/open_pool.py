"""Open the pool of a placement: one replica in this process, or workers on Ray."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pkgutil import resolve_name

import torch

from headscan.cluster.placement.placement_base import POOLS, Placement, ReplicaPlacement, Timeouts
from headscan.cluster.tasks.pool import Finished, Pool, R, T, Task, run_task
from headscan.loading import load_spec
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
            self._lm = load_spec(self._spec, self._placement.local_target())
        return self._lm


def open_pool(
    spec: ModelSpec, placement: Placement, *, on_cluster: bool = False, timeouts: Timeouts | None = None
) -> Pool:
    """Open the pool of a placement: in this process for one device, on Ray for several, or on a connected cluster
    (``on_cluster``), where a single replica runs too. None for ``timeouts`` uses the defaults.
    """
    if isinstance(placement, ReplicaPlacement) and placement.replicas == 1 and not on_cluster:
        return InProcessPool(spec, placement)
    # Each pool is imported when it opens, because Ray takes a second to import and a single device does not need it.
    opened: Pool = resolve_name(f"headscan.cluster.pools.{POOLS[placement.name]}")(spec, placement, timeouts=timeouts)
    return opened
