"""A pool runs one task for many items on its replicas and yields results as they finish.

A task is a plain function ``task(loaded_model, item)``. It runs in this process when there is one device, on Ray actors
otherwise (`ray_pool`), with the same interface and the same results.
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

#: ``task(loaded_model, item)``; on Ray it has to be importable on the workers.
Task = Callable[[LoadedModel, T], R]


class WorkError(HeadscanError):
    """An item that could not be worked on; the message names it."""


class IncompleteError(WorkError):
    """Items were given up, because workers died on each of them again and again; all others are done.

    Attributes:
        items: Those that were given up.
    """

    exit_code = 3

    def __init__(self, items: Sequence[Any], reason: str) -> None:
        names = ", ".join(name_of(item) for item in items[:5]) + (", ..." if len(items) > 5 else "")
        super().__init__(f"{names}: {reason}; all others are done, and the same command tries again what is missing")
        self.items = items


@dataclass(frozen=True)
class Finished(Generic[T, R]):
    """One item's result.

    Attributes:
        item: The item itself.
        value: What the task returned.
        seconds: How long the task ran.
        worker: Which replica ran it.
    """

    item: T
    value: R
    seconds: float
    worker: str


class Pool(ABC):
    """Replicas of one model. Use it as a context manager: leaving it lets the replicas go."""

    @property
    @abstractmethod
    def replicas(self) -> int:
        """How many items are worked on at one time."""

    @property
    def staged(self) -> bool:
        """Whether passes go through the model range by range of its layers: `staged_task` says what can be run."""
        return False

    @abstractmethod
    def map(self, task: Task[T, R], items: Iterable[T]) -> Iterator[Finished[T, R]]:
        """Run ``task`` for every item, yielding results as they finish, in any order.

        Items are drawn when there is somebody to work on them, so ``items`` may be a generator of any length.

        Raises:
            HeadscanError: The model does not load.
            WorkError: The task raised; an error of the task itself is not tried again.
            IncompleteError: Workers died on an item again and again. It is raised when all other items are done.
        """

    @abstractmethod
    def close(self) -> None:
        """Let the replicas go; a closed pool maps nothing."""

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
    """Run a task and time it.

    Raises:
        WorkError: The task found something that the user can mend; the item's name is put before its message.
    """
    started = time.perf_counter()
    with working_on(item):
        value = task(lm, item)
    return value, time.perf_counter() - started


@contextmanager
def working_on(item: Any) -> Iterator[None]:
    """Let errors say which item they came of.

    Raises:
        WorkError: Something that the user can mend; the item's name is put before its message.
    """
    try:
        yield
    except HeadscanError as problem:
        raise WorkError(f"{name_of(item)}: {problem}") from problem
    except Exception as problem:
        problem.add_note(f"while working on {name_of(item)}")
        raise


def name_of(item: Any) -> str:
    """An item's own ``name``, or its text."""
    return str(getattr(item, "name", None) or item)[:80]
