"""A task that counts the sequences of each forward pass, for progress within a shard."""

from __future__ import annotations

from collections.abc import Callable, Sequence, Sized
from typing import TypeVar

from headscan.cluster.tasks.staged_task import StagedTask
from headscan.models.loaded_model import LoadedModel

T = TypeVar("T")
B = TypeVar("B", bound=Sized)
P = TypeVar("P")
R = TypeVar("R")


class CountedPasses(StagedTask[T, B, P, R]):
    """A task with the results of another one; it runs only in the process of ``count``.

    Args:
        task: The task.
        count: Called with the number of sequences after each pass with a whole model.
    """

    def __init__(self, task: StagedTask[T, B, P, R], count: Callable[[int], None]) -> None:
        super().__init__(task.__name__)
        self._task, self._count = task, count

    def passes(self, item: T) -> Sequence[B]:
        return self._task.passes(item)

    def run(self, lm: LoadedModel, item: T, part: B) -> P:
        found = self._task.run(lm, item, part)
        self._count(len(part))
        return found

    def join(self, item: T, partials: Sequence[Sequence[P]]) -> R:
        return self._task.join(item, partials)

    def size(self, part: B) -> int:
        return self._task.size(part)

    def halves(self, part: B) -> Sequence[B]:
        return self._task.halves(part)

    def join_halves(self, halves: Sequence[P]) -> P:
        return self._task.join_halves(halves)
