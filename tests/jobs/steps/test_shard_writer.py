"""Shards are written by a thread, in groups, and its errors are raised."""

from __future__ import annotations

import threading
from collections.abc import Iterable

import numpy as np
import pyarrow as pa
import pytest

from headscan.errors import StoreError, StoreFullError
from headscan.steps.run_corpus import ShardWriter
from headscan.store.records import ShardRecord, ShardToWrite
from headscan.store.store import Store


class SlowStore(Store):
    """A store that writes on request."""

    def __init__(self) -> None:
        super().__init__("nowhere.duckdb")
        self.written: list[list[int]] = []
        self.began, self.go_on = threading.Semaphore(0), threading.Semaphore(0)
        self.full = False

    def add_shards(self, run_id: str, shards: Iterable[ShardToWrite]) -> None:
        self.began.release()
        assert self.go_on.acquire(timeout=20)
        if self.full:
            raise StoreFullError("no space left")
        self.written.append([shard.record.shard for shard in shards])


def shard(number: int, heads: pa.Table | None = None) -> ShardToWrite:
    return ShardToWrite(ShardRecord(number, "c"), pa.table({}), pa.table({}) if heads is None else heads)


def test_shards_that_arrive_during_a_write_are_written_together() -> None:
    store = SlowStore()
    with ShardWriter(store, "run") as writer:
        writer.add(shard(0))
        assert store.began.acquire(timeout=20)
        for number in range(1, 100):
            writer.add(shard(number))
        store.go_on.release(2)
    assert store.written == [[0], list(range(1, 100))]


def test_whoever_brings_too_much_waits() -> None:
    store = SlowStore()
    large = pa.table({"entropy": np.empty(25_000_000, dtype=np.uint8)})
    with ShardWriter(store, "run") as writer:
        writer.add(shard(0))
        assert store.began.acquire(timeout=20)
        for number in range(1, 5):
            writer.add(shard(number, large))
        last = threading.Thread(target=writer.add, args=[shard(5)])
        last.start()
        last.join(0.2)
        assert last.is_alive()
        store.go_on.release(3)
        last.join(20)
        assert not last.is_alive()
    assert [number for group in store.written for number in group] == list(range(6))


def test_queued_shards_are_written_when_the_work_fails() -> None:
    store = SlowStore()
    store.go_on.release(5)
    with pytest.raises(ZeroDivisionError), ShardWriter(store, "run") as writer:
        writer.add(shard(0))
        raise ZeroDivisionError
    assert store.written == [[0]]


def test_a_full_store_is_reported_at_the_next_shard_or_at_the_end() -> None:
    store = SlowStore()
    store.full = True
    store.go_on.release(5)
    with pytest.raises(StoreFullError), ShardWriter(store, "run") as writer:
        writer.add(shard(0))
    with pytest.raises(StoreError, match="no space left"), ShardWriter(store, "run") as writer:
        for number in range(100):
            writer.add(shard(number))
    assert store.written == []
