"""Scans through the product's pool on Ray, its supervision and its store, by workers that give ready-made tables."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Generator, Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import repeat
from pathlib import Path
from typing import Any, ClassVar

import psutil

from headscan.cluster.placements import WholePlacement
from headscan.cluster.pool import Finished
from headscan.cluster.ray_pool import RayPool
from headscan.model_spec import ModelSpec
from headscan.runs.run_context import Run
from headscan.steps.run_corpus import measure_shards
from headscan.store.records import RunRecord
from headscan.store.store import Store
from headscan.texts import CorpusReport
from tests.benchmarks.imagined_workers import ImaginedWorker, ShardShape, answer, imagine_shard, made_shards, made_table

#: Time of a task that only shows that a worker is there, in seconds.
_ANSWER = 0.2
_MODEL = ModelSpec("demo")  # named, but loaded nowhere


class ImaginedPool(RayPool):
    """Workers that give ready-made tables; ``watch`` sees each result before the scan does."""

    worker: ClassVar[type[Any]] = ImaginedWorker

    def __init__(self, workers: int) -> None:
        self.watch: Callable[[Finished[Any, Any]], None] = lambda finished: None
        super().__init__(_MODEL, WholePlacement(workers, "cpu", 1))

    def map(self, task: Any, items: Iterable[Any]) -> Generator[Finished[Any, Any], None, None]:
        for finished in super().map(task, items):
            self.watch(finished)
            yield finished

    def all_answer(self) -> list[str]:
        """Wait until every worker has answered; return their names."""
        names: set[str] = set()
        results = self.map(answer, repeat(_ANSWER))
        while len(names) < self.replicas:
            names.add(next(results).worker)
        results.close()
        return sorted(names)

    def held(self) -> dict[str, set[int]]:
        """Return the numbers of the shards that each worker has now."""
        return {replica.workers[0]: {job.item.index for job in replica.jobs} for replica in self._replicas}


def pid_of(worker: str) -> int:
    """Return the process id that a worker reported in its name."""
    return int(worker.rpartition(":")[2])


class Killer:
    """Kills workers at once when the pool gives its result number ``after``, and watches what follows."""

    def __init__(self, pool: ImaginedPool, workers: int, after: int) -> None:
        self._pool, self._workers, self._left = pool, workers, after
        self._known: set[str] = set()
        self.killed: list[str] = []
        self.lost: set[int] = set()
        self.held = self.again = 0
        #: Seconds from the kill until the last lost shard was measured again, and until each new worker gave a result.
        self.recovered = 0.0
        self.replaced: dict[str, float] = {}

    def __call__(self, finished: Finished[Any, Any]) -> None:
        self._left -= 1
        shard = finished.item.index
        if self._left == 0:
            self._kill()
            return
        if not self.killed:
            return
        since = time.perf_counter() - self._killed_at
        if shard in self.lost:
            self.lost.remove(shard)
            if finished.worker not in self.killed:  # else its result had already come
                self.again, self.recovered = self.again + 1, since
        if finished.worker not in self._known:
            self.replaced.setdefault(finished.worker, since)

    def _kill(self) -> None:
        held = self._pool.held()
        self._known = set(held)
        self.killed = sorted(held, key=lambda worker: len(held[worker]), reverse=True)[: self._workers]
        self.lost = set().union(*(held[worker] for worker in self.killed))
        self.held = len(self.lost)
        self._killed_at = time.perf_counter()
        for worker in self.killed:
            os.kill(pid_of(worker), signal.SIGKILL)


@dataclass
class ScanCost:
    """What a scan cost the driver, without the summary at its end.

    Attributes:
        cpu: Seconds of CPU of the whole process; ``loop`` those of the thread that runs the pool, which the writer and
            the library's threads leave out.
        private: Bytes of the process's own memory after the first result, half of them and the last one; tables in
            Ray's shared memory are not counted.
    """

    rows: int
    seconds: float = 0.0
    cpu: float = 0.0
    loop: float = 0.0
    private: list[int] = field(default_factory=list)

    def __str__(self) -> str:
        millions = self.rows / 1e6
        memory = ", ".join(f"{size / 2**20:.0f}" for size in self.private)
        return (
            f"{self.rows:,} head rows in {self.seconds:.1f} s: {millions / self.seconds:.2f} M rows/s; driver "
            f"{self.cpu / self.seconds:.2f} cores, {self.cpu / millions:.2f} CPU s per million rows, "
            f"{self.loop / millions:.3f} in the pool's thread; its memory {memory} MiB at the start, middle and end"
        )


class _TimedStore(Store):
    """A store that calls ``written`` when all shards of a run are in it."""

    written: Callable[[], None]

    def finish_run(self, *arguments: Any, **options: Any) -> None:
        self.written()
        super().finish_run(*arguments, **options)


def scan_imagined(
    pool: ImaginedPool,
    path: Path,
    shape: ShardShape,
    shards: int,
    *,
    seconds: float = 0.0,
    watch: Sequence[Callable[[Finished[Any, Any]], None]] = (),
) -> ScanCost:
    """Scan made-up shards, which take ``seconds`` each, into a new store, and check its rows."""
    cost, own = ScanCost(shards * shape.rows), psutil.Process()
    seen = 0

    def see(finished: Finished[Any, Any]) -> None:
        nonlocal seen
        seen += 1
        if seen in {1, (shards + 1) // 2, shards}:
            memory = own.memory_info()
            cost.private.append(memory.rss - memory.shared)
        for one in watch:
            one(finished)

    def clocks() -> tuple[float, float, float]:
        return time.perf_counter(), time.process_time(), time.thread_time()

    def written() -> None:
        cost.seconds, cost.cpu, cost.loop = (now - then for now, then in zip(clocks(), began, strict=True))

    store = _TimedStore(path)
    store.written = written
    run = Run(_MODEL, store, lambda _: pool, say=print)
    record = RunRecord("scan", "imagined", "imagined", shape.layers, shape.heads)
    pool.watch = see
    texts = made_shards(shards, shape)
    began = clocks()
    try:
        task = partial(imagine_shard, shape=shape, seconds=seconds)
        measure_shards(run, record, task, texts, CorpusReport(), total_sequences=None)
    finally:
        pool.watch = lambda finished: None
    check_rows(store, shape, shards)
    return cost


def check_rows(store: Store, shape: ShardShape, shards: int) -> None:
    """Raise if a row is missing, doubled, or in the wrong sequence."""
    found = store.query(
        "SELECT count(*) AS rows, count(DISTINCT (layer, head)) AS heads, max(entropy) AS largest"
        " FROM head_statistics GROUP BY sequence ORDER BY sequence"
    ).to_pydict()
    count, heads = shards * shape.sequences, shape.layers * shape.heads
    largest = made_table(shape)["entropy"].to_numpy().reshape(shape.sequences, heads).max(axis=1)
    assert found == {"rows": [heads] * count, "heads": [heads] * count, "largest": [*map(float, largest)] * shards}
    ledger = store.query("SELECT shard FROM shards ORDER BY shard").to_pydict()
    assert ledger == {"shard": list(range(shards))}
