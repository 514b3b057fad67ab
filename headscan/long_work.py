"""A long job: numbers that it measures only once, and the interface that shows its steps."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

#: What was measured, as JSON data: first in words, then everything that distinguishes it within the job.
WorkKey = tuple[Any, ...]


class KnownNumbers:
    """Numbers by key of the work, in memory. A subclass may keep them where a later process finds them."""

    def __init__(self) -> None:
        self._known: dict[str, list[float]] = {}

    @property
    def count(self) -> int:
        """Number of keys with numbers."""
        return len(self._known)

    def get(self, key: WorkKey) -> NDArray[np.float64] | None:
        """Return the numbers of a key, one-dimensional; None if they were not measured."""
        numbers = self._known.get(hash_of(key))
        return None if numbers is None else np.asarray(numbers, dtype=np.float64)

    def add(self, key: WorkKey, numbers: ArrayLike) -> None:
        """Keep the numbers of a key, in C order; float64 holds them exactly."""
        self._known[hash_of(key)] = np.asarray(numbers, dtype=np.float64).ravel().tolist()

    def measured(self, key: WorkKey, measure: Callable[[], ArrayLike]) -> NDArray[np.float64]:
        """Return the numbers of a key, one-dimensional. Those that are missing are measured and kept."""
        if (numbers := self.get(key)) is None:
            numbers = np.asarray(measure(), dtype=np.float64).ravel()
            self.add(key, numbers)
        return numbers


def hash_of(key: WorkKey) -> str:
    """Return 32 hexadecimal digits that stand for a key."""
    return hashlib.sha256(json.dumps(key).encode()).hexdigest()[:32]


#: Shows steps of work: called with a title, the number of steps and their unit in the singular, and returns a context
#: with the function to call after each step.
Steps = Callable[[str, int, str], AbstractContextManager[Callable[[], object]]]


@contextmanager
def unseen_steps(title: str, total: int, unit: str) -> Iterator[Callable[[], object]]:
    """Show nothing."""
    yield lambda: None


@dataclass(frozen=True)
class LongWork:
    """The shared state of a long job's measurements: ``known`` holds the numbers, old and new; ``steps`` shows
    progress, and ``say`` prints lines.
    """

    known: KnownNumbers = field(default_factory=KnownNumbers)
    steps: Steps = unseen_steps
    say: Callable[[str], None] = lambda line: None
