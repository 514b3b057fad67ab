"""Measure and write the shards that the ledger lacks."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Protocol

import pyarrow as pa

from headscan.analysis.errors import StoreError
from headscan.analysis.store.records import RunRecord, ShardRecord, ShardToWrite
from headscan.analysis.store.store import Store
from headscan.cluster.tasks.pool import IncompleteError, Pool, Task
from headscan.errors import HeadscanError
from headscan.pipelines.corpora import CorpusReport, Shard
from headscan.pipelines.runs.progress import Progress
from headscan.pipelines.runs.run_records import begin_run
from headscan.pipelines.scan.shard_task import Measured, measure_shard
from headscan.pipelines.scan.shard_writer import ShardWriter


class OfShard(Protocol):
    """An item of a pool that measures one shard."""

    @property
    def shard(self) -> Shard: ...


class ShardWriteError(HeadscanError):
    """A run whose corpus changed."""


@dataclass(frozen=True)
class WrittenShards:
    """A run, and the numbers of measured and skipped shards."""

    run_id: str
    measured: int
    skipped: int


def write_shards(
    store: Store,
    pool: Pool,
    record: RunRecord,
    shards: Iterable[Shard],
    item_of: Callable[[Shard], OfShard],
    report: CorpusReport,
    *,
    total: int | None,
    task: Task[Any, Measured] = measure_shard,
    resume_anyway: bool = False,
    say: Callable[[str], None],
) -> WrittenShards:
    """Begin or resume a run, measure the missing shards, and finish it.

    Args:
        report: Counts of the corpus; they may grow while shards are drawn.
        total: Number of sequences of all shards; None if unknown.
        task: Pool task that measures an item.
        resume_anyway: Resume even if the software or the device changed.

    Raises:
        ResumeError: Software or device changed, and ``resume_anyway`` is False.
        ShardWriteError: A shard in the ledger has other text.
        IncompleteError: Some shards were given up; all others are stored, and the run is marked as failed.
        HeadscanError: An error of the user; shards stored before stay.
    """
    state = begin_run(store, record, resume_anyway=resume_anyway, say=say)
    say(f"run {state.run_id}: {len(state.shards)} shards stored before" if state.shards else f"run {state.run_id}")
    measured = skipped = 0
    ledger = hashlib.sha256()
    try:
        with Progress(record.kind, total, "sequences") as progress:

            def todo() -> Iterator[OfShard]:
                nonlocal skipped
                for shard in shards:
                    ledger.update(shard.content_hash.encode())
                    if (known := state.shards.get(shard.index)) is None:
                        yield item_of(shard)
                    elif known == shard.content_hash:
                        skipped += 1
                        progress.skip(len(shard.sequences))
                    else:
                        raise ShardWriteError(
                            f"corpus {record.corpus} changed since run {state.run_id}: shard {shard.index} has other "
                            "text. Use another store, or pin a revision"
                        )

            with ShardWriter(store, state.run_id) as writer:
                for finished in pool.map(task, todo()):
                    shard = finished.item.shard
                    heads, nonfinite_rows = finished.value
                    took, by = finished.seconds, finished.worker
                    row = ShardRecord(shard.index, shard.content_hash, took, by, nonfinite_rows)
                    writer.add(ShardToWrite(row, sequence_table(shard), heads))
                    measured += 1
                    progress.update(len(shard.sequences))
    except Exception as problem:
        lost = len(problem.items) if isinstance(problem, IncompleteError) else None
        total_shards = None if lost is None else measured + skipped + lost
        with suppress(StoreError):  # a full disk that failed the shard also fails this write
            store.finish_run(state.run_id, status="failed", report=report.as_dict(), total_shards=total_shards)
        raise
    corpus_hash = f"{(record.corpus_hash or '')[:16]}-{ledger.hexdigest()[:16]}"
    store.finish_run(state.run_id, report=report.as_dict(), total_shards=measured + skipped, corpus_hash=corpus_hash)
    return WrittenShards(state.run_id, measured, skipped)


def sequence_table(shard: Shard) -> pa.Table:
    """Return a shard's rows of the table ``sequences``."""
    rows = shard.sequences
    return pa.table(
        {
            "sequence": pa.array([s.index for s in rows], pa.int32()),
            "document": pa.array([s.document for s in rows], pa.int32()),
            "source": [s.source for s in rows],
            "tokens": pa.array([len(s) for s in rows], pa.int32()),
            "truncated": [s.truncated for s in rows],
            "content_hash": [s.content_hash for s in rows],
        }
    )
