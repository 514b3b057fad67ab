"""The ledger of a run: what it has finished, so that the same command resumes."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import cached_property
from typing import Any, TypeVar

import numpy as np
import pyarrow as pa
from numpy.typing import ArrayLike, NDArray

from headscan.cluster.pool import Pool, Task
from headscan.long_work import KnownNumbers, WorkKey, hash_of
from headscan.store.records import RunState
from headscan.store.store import Store
from headscan.store.tables import TABLES

T = TypeVar("T")

#: Seconds between two writes: a process that is killed loses about as much work, and the unit in progress.
WRITE_SECONDS = 5.0
_UNITS = TABLES["units"].schema(without=("run_id",))


class Ledger(KnownNumbers):
    """The finished units of a run: numbers by key in the table ``units``, and the shards of a corpus in ``state``. The
    run begins when its state or id is first needed, and with the first unit, so that a job that measures nothing leaves
    no trace.

    Attributes:
        closing: What `Store.finish_run` records next to the status when the run ends.
    """

    def __init__(self, store: Store, begin: Callable[[], RunState]) -> None:
        super().__init__()
        self._store, self._begin = store, begin
        self._texts: dict[str, Sequence[str]] = {}
        self._waiting: dict[str, dict[str, Any]] = {}
        self._written = time.monotonic()
        self.closing: dict[str, Any] = {}

    @cached_property
    def state(self) -> RunState:
        """The run, which begins or resumes, with the units that the store has."""
        state = self._begin()
        if state.resumed:
            for row in self._store.units(state.run_id).to_pylist():
                self._known[row["unit"]], self._texts[row["unit"]] = row["numbers"], row["texts"] or ()
        return state

    @property
    def run_id(self) -> str:
        return self.state.run_id

    @property
    def has_begun(self) -> bool:
        return "state" in vars(self)

    def add(self, key: WorkKey, numbers: ArrayLike, *, texts: Sequence[str] = (), arm_id: str | None = None) -> None:
        """Keep the numbers and texts of a key, which replace earlier ones. Those of an arm go when it is finished."""
        super().add(key, numbers)
        unit = hash_of(key)
        self._texts[unit] = texts
        row = {"unit": unit, "what": str(key[0]), "arm_id": arm_id, "numbers": self._known[unit]}
        self._waiting[unit] = row | {"texts": list(texts) or None}
        if time.monotonic() - self._written >= WRITE_SECONDS:
            self.write()

    def texts(self, key: WorkKey) -> Sequence[str]:
        """Return the texts of a key that has numbers."""
        return self._texts[hash_of(key)]

    def forget(self, keys: Iterable[WorkKey]) -> None:
        """Free units that are stored in another form."""
        for unit in map(hash_of, keys):
            for units in (self._known, self._texts, self._waiting):
                units.pop(unit, None)

    def write(self) -> None:
        """Store what was added since the last write."""
        if self._waiting:
            self._store.add_units(self.run_id, pa.Table.from_pylist([*self._waiting.values()], schema=_UNITS))
        self._waiting.clear()
        self._written = time.monotonic()


def measured(
    pool: Pool,
    task: Task[T, Any],
    items: Sequence[T],
    known: KnownNumbers,
    key_of: Callable[[T], WorkKey],
    numbers: Callable[[Any], ArrayLike],
) -> Iterator[tuple[T, NDArray[np.float64], bool]]:
    """Yield each item with its numbers, one-dimensional, and True if they are new: first those that are known, then the
    others as the pool finishes them. ``numbers`` returns those of a task's result.
    """
    new = []
    for item in items:
        if (found := known.get(key_of(item))) is None:
            new.append(item)
        else:
            yield item, found, False
    for done in pool.map(task, new) if new else ():
        known.add(key_of(done.item), found := np.asarray(numbers(done.value), dtype=np.float64).ravel())
        yield done.item, found, True
