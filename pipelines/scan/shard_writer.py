"""A thread that lands shards in the store while others are measured.

The store is opened for whatever has come meanwhile, in one transaction: a slow scan's shards land one by one as they
come, and a large cluster's in groups, so that opening and closing the file costs little.
"""

from __future__ import annotations

import threading
from types import TracebackType
from typing import Self

from headscan.analysis.store.records import ShardToWrite
from headscan.analysis.store.store import Store

#: Shards that wait at most; whoever brings more waits for the store. One of a model of 80 x 64 heads is 25 MB.
_WAITING = 4


class ShardWriter:
    """Lands shards of a run. Use it as a context manager: when it is left, all that was brought has written.

    Args:
        store: Where to.
        run_id: The run that they belong to.
    """

    def __init__(self, store: Store, run_id: str) -> None:
        self._store, self._run_id = store, run_id
        self._waiting: list[ShardToWrite] = []
        self._changed = threading.Condition()
        self._closed = False
        self._problem: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="writer", daemon=True)

    def add(self, shard: ShardToWrite) -> None:
        """Bring a shard.

        Raises:
            StoreError: An earlier one could not land; this one is left out.
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
        """All shards that wait, once there is one; none: there will be no more."""
        with self._changed:
            self._changed.wait_for(lambda: self._waiting or self._closed)
            shards, self._waiting = self._waiting, []
            self._changed.notify_all()
            return shards
