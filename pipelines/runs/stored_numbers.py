"""Numbers by unit of work in the store, which a stopped plan or prune run does not measure again."""

from __future__ import annotations

import time
from collections.abc import Callable

import pyarrow as pa
from numpy.typing import ArrayLike

from headscan.analysis.store.store import Store
from headscan.analysis.store.tables import TABLES
from headscan.long_work import KnownNumbers, WorkUnit, hash_of

#: Seconds between two writes: a process that is killed loses about as much work, and the unit in progress.
WRITE_SECONDS = 5.0
_UNITS = TABLES["measured_units"].schema(without=("run_id",))


class StoredNumbers(KnownNumbers):
    """Numbers by unit of work in the table ``measured_units``; the caller calls `write` at the end.

    ``begin`` begins or resumes the run and returns its id; the first write calls it.
    """

    def __init__(self, store: Store, begin: Callable[[], str]) -> None:
        super().__init__()
        self._store, self._begin = store, begin
        self.run_id: str | None = None
        self._waiting: list[WorkUnit] = []
        self._written = time.monotonic()

    def resume(self) -> None:
        """Read the numbers of the run, which the store has."""
        self.run_id = self._begin()
        self._known |= self._store.measured_units(self.run_id)

    def add(self, unit: WorkUnit, numbers: ArrayLike) -> None:
        super().add(unit, numbers)
        self._waiting.append(unit)
        if time.monotonic() - self._written >= WRITE_SECONDS:
            self.write()

    def write(self) -> None:
        """Store what was added since the last write."""
        if self._waiting:
            if self.run_id is None:
                self.run_id = self._begin()
            rows = [
                {"unit": (name := hash_of(unit)), "what": str(unit[0]), "numbers": self._known[name]}
                for unit in self._waiting
            ]
            self._store.add_measured_units(self.run_id, pa.Table.from_pylist(rows, schema=_UNITS))
        self._waiting.clear()
        self._written = time.monotonic()
