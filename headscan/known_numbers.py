"""Numbers that a long job has measured, so that it measures none of them twice."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

#: What was measured, as JSON data: first in words, then everything that distinguishes it within the job.
Unit = tuple[Any, ...]


class KnownNumbers:
    """Numbers by unit of work, in memory. A subclass may keep them where a later process finds them.

    ``known`` holds numbers of earlier processes by the hash of their unit.
    """

    def __init__(self, known: Mapping[str, Sequence[float]] | None = None) -> None:
        self._known = dict(known or {})

    @property
    def units(self) -> int:
        """Number of known units."""
        return len(self._known)

    def get(self, unit: Unit) -> NDArray[np.float64] | None:
        """Return the numbers of a unit, one-dimensional; None if it was not measured."""
        found = self._known.get(hash_of(unit))
        return None if found is None else np.asarray(found, dtype=np.float64)

    def add(self, unit: Unit, numbers: ArrayLike) -> None:
        """Keep the numbers of a unit, in C order; float64 holds them exactly."""
        self._known[hash_of(unit)] = np.asarray(numbers, dtype=np.float64).ravel().tolist()


def hash_of(unit: Unit) -> str:
    """Return 32 hexadecimal digits that stand for a unit."""
    return hashlib.sha256(json.dumps(unit).encode()).hexdigest()[:32]
