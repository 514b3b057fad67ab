"""The interface of a pool, which runs tasks on replicas.

A task is a function ``task(loaded_model, item)``. With one device it runs in this process, otherwise in Ray actors
(`ray_pool`), with the same interface and the same results.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Generic, Self, TypeVar

from headscan.errors import HeadscanError
from headscan.models.loaded_model import LoadedModel

T = TypeVar("T")
R = TypeVar("R")

#: ``task(loaded_model, item)``; Ray's workers must be able to import it.
Task = Callable[[LoadedModel, T], R]


class WorkError(HeadscanError):
    """A task failed for an item; the message names the item."""


class IncompleteError(WorkError):
    """Items were given up after repeated worker failures; all others are done.

    Attributes:
        items: The items that were given up.
    """

    exit_code = 3

    def __init__(self, items: Sequence[Any], reason: str) -> None:
        names = ", ".join(name_of(item) for item in items[:5]) + (", ..." if len(items) > 5 else "")
        super().__init__(f"{names}: {reason}. All others are done. Run the same command again to retry")
        self.items = items


@dataclass(frozen=True)
class Finished(Generic[T, R]):
    """One item's result.

    Attributes:
        item: The item.
        value: Return value of the task.
        seconds: Run time of the task.
        worker: Name of the replica that ran it.
    """

    item: T
    value: R
    seconds: float
    worker: str


class Pool(ABC):
    """Replicas of one model; a context manager that closes the pool."""

    @property
    @abstractmethod
    def replicas(self) -> int:
        """Number of items that run at the same time."""

    @property
    def staged(self) -> bool:
        """True if passes run by layer ranges, as `staged_task` supports."""
        return False

    @property
    def local(self) -> bool:
        """True if tasks run in this process with a whole model, so that they need not be pickled."""
        return False

    @abstractmethod
    def map(self, task: Task[T, R], items: Iterable[T]) -> Iterator[Finished[T, R]]:
        """Run ``task`` for every item and yield results as they finish. An item is drawn when a replica is free, so
        ``items`` may be a generator of any length.
        """

    @abstractmethod
    def close(self) -> None:
        """Release the replicas."""

    def one(self, task: Task[T, R], item: T) -> R:
        """Run ``task`` for a single item."""
        return next(iter(self.map(task, [item]))).value

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()


def run_task(lm: LoadedModel, task: Task[T, R], item: T) -> tuple[R, float]:
    """Run a task and time it."""
    started = time.perf_counter()
    with working_on(item):
        value = task(lm, item)
    return value, time.perf_counter() - started


@contextmanager
def working_on(item: Any) -> Iterator[None]:
    """Add the item's name to errors."""
    try:
        yield
    except HeadscanError as problem:
        raise WorkError(f"{name_of(item)}: {problem}") from problem
    except Exception as problem:
        problem.add_note(f"while working on {name_of(item)}")
        raise


def name_of(item: Any) -> str:
    """Return an item's ``name``, or its text."""
    return str(getattr(item, "name", None) or item)[:80]
