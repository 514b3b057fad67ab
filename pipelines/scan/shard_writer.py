"""A thread that writes shards to the store while others are measured.

Each opening of the store writes all waiting shards in one transaction. A slow scan writes its shards one by one,
a large cluster in groups, so that opening and closing the file costs little.
"""

from __future__ import annotations

import threading
from types import TracebackType
from typing import Self

from headscan.analysis.store.records import ShardToWrite
from headscan.analysis.store.store import Store

#: Most shards that wait; then `ShardWriter.add` blocks. A shard of a model with 80 x 64 heads has 25 MB.
_WAITING = 4


class ShardWriter:
    """A writer of a run's shards; a context manager.

    All shards are written when the context exits.

    Args:
        store: The store.
        run_id: The run of the shards.
    """

    def __init__(self, store: Store, run_id: str) -> None:
        self._store, self._run_id = store, run_id
        self._waiting: list[ShardToWrite] = []
        self._changed = threading.Condition()
        self._closed = False
        self._problem: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="writer", daemon=True)

    def add(self, shard: ShardToWrite) -> None:
        """Queue a shard.

        Raises:
            StoreError: An earlier shard could not be written; this one is dropped.
        """
        with self._changed:
            self._changed.wait_for(lambda: len(self._waiting) < _WAITING or self._problem is not None)
            self._raise()
            self._waiting.append(shard)
            self._changed.notify_all()

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, traceback: TracebackType | None
    ) -> None:
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        self._thread.join()
        if kind is None:
            self._raise()

    def _raise(self) -> None:
        if self._problem is not None:
            raise self._problem

    def _run(self) -> None:
        while shards := self._take():
            try:
                self._store.add_shards(self._run_id, shards)
            except BaseException as problem:
                with self._changed:
                    self._problem = problem
                    self._changed.notify_all()
                return

    def _take(self) -> list[ShardToWrite]:
        """Wait for shards and return all that are queued.

        Empty means that the writer is closed.
        """
        with self._changed:
            self._changed.wait_for(lambda: self._waiting or self._closed)
            shards, self._waiting = self._waiting, []
            self._changed.notify_all()
            return shards
