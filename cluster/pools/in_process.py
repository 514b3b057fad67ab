"""One replica in this process."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import torch

from headscan.cluster.placement.placement_base import ReplicaPlacement
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
