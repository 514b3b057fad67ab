"""One replica in this process."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace

import torch

from headscan.cluster.placement.devices import roomiest, roomiest_gpus
from headscan.cluster.placement.kinds import ShardedPlacement, WholePlacement
from headscan.cluster.tasks.pool import Finished, Pool, R, T, Task, run_task
from headscan.model_spec import ModelSpec
from headscan.models.layout import Sharding
from headscan.models.loaded_model import LoadedModel


class InProcessPool(Pool):
    """One replica, in this process, loaded when first needed."""

    def __init__(self, spec: ModelSpec, placement: WholePlacement | ShardedPlacement) -> None:
        self._spec, self._placement = spec, placement
        self._lm: LoadedModel | None = None

    @property
    def replicas(self) -> int:
        return 1

    def map(self, task: Task[T, R], items: Iterable[T]) -> Iterator[Finished[T, R]]:
        for item in items:
            value, seconds = run_task(self._model(), task, item)
            yield Finished(item, value, seconds, "in-process")

    def close(self) -> None:
        self._lm = None

    def _model(self) -> LoadedModel:
        if self._lm is None:
            torch.set_num_threads(self._placement.threads)
            self._lm = self._spec.load(_target_here(self._placement))
        return self._lm


def _target_here(placement: WholePlacement | ShardedPlacement) -> str | Sharding:
    """What a replica in this process is loaded onto: of several GPUs those with most free memory."""
    target = placement.target
    if isinstance(target, str):
        return roomiest(target)
    return replace(target, devices=roomiest_gpus(placement.gpus)) if placement.gpus else target
