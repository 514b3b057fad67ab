"""A model larger than the device, run range by range.

All items pass through one range of its layers after another. Each range is read once from the checkpoint; a thread
reads the next range while the current one computes. Between the ranges hidden states wait in RAM or on disk.

Shapes: B sequences, N tokens, E width of a hidden state.
"""

from __future__ import annotations

import errno
import os
import tempfile
import time
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, field
from itertools import pairwise
from typing import IO, Any, Self

import torch
from torch import Tensor

from headscan.cluster.devices import roomiest
from headscan.cluster.placement_base import Timeouts
from headscan.cluster.placements import StreamedPlacement
from headscan.cluster.pool import (
    Finished,
    InspectionTask,
    PassTask,
    Pool,
    R,
    StagingError,
    T,
    Task,
    check_ranges,
    check_staged,
    run_pass,
    working_on,
)
from headscan.layers.layer_ranges import Layers, Stage, open_layers
from headscan.layers.lazy_model import RawTensors, bytes_of, empty_mmap, mmap_copy
from headscan.model_spec import ModelSpec
from headscan.models.token_batches import return_freed_memory, trim_heap


@dataclass(frozen=True)
class _OnDisk:
    """Offset, shape and dtype of hidden states in the file."""

    offset: int
    shape: torch.Size
    dtype: torch.dtype


class HiddenStates:
    """A context manager that stores hidden states (B, N, E), one for each pass, in at most ``limit`` bytes of RAM and
    otherwise on disk. The file on disk has no name, so nothing is left of it if the process ends. It is read and
    written rather than memory-mapped: mapped pages count as the process's memory, and a full disk would kill the
    process without an error.
    """

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._in_memory: dict[int, Tensor] = {}
        self._used = 0
        self._on_disk: dict[int, _OnDisk] = {}
        self._file: IO[bytes] | None = None
        self._end = 0

    def put(self, key: int, hidden: Tensor) -> None:
        """Store hidden states until `take`."""
        if self._used + hidden.nbytes > self._limit:
            self._write(key, hidden.cpu().contiguous())
            return
        # A copy in memory of its own, which the process can return to the system when it is freed.
        self._in_memory[key] = mmap_copy(hidden)
        self._used += hidden.nbytes

    def take(self, key: int) -> Tensor:
        """Return and forget stored hidden states, on the CPU."""
        if key in self._in_memory:
            hidden = self._in_memory.pop(key)
            self._used -= hidden.nbytes
            return hidden
        stored = self._on_disk[key]
        assert self._file is not None
        hidden = empty_mmap(stored.shape, stored.dtype)
        self._file.seek(stored.offset)
        unread = bytes_of(hidden)
        while unread:
            count = self._file.readinto(unread)  # type: ignore[attr-defined]
            if not count:
                raise StagingError(f"hidden states in {tempfile.gettempdir()} are incomplete. Check the disk")
            unread = unread[count:]
        return hidden

    def close(self) -> None:
        """Forget everything and delete the file."""
        self._in_memory.clear()
        if self._file is not None:
            self._file.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _write(self, key: int, hidden: Tensor) -> None:
        if self._file is None:
            self._file = tempfile.TemporaryFile(buffering=0)  # noqa: SIM115
        # The hidden states of a pass have the same size in every range, so they reuse the bytes that `take` freed.
        stored = self._on_disk.get(key, _OnDisk(self._end, hidden.shape, hidden.dtype))
        self._file.seek(stored.offset)
        unwritten = bytes_of(hidden)
        try:
            while unwritten:
                unwritten = unwritten[self._file.write(unwritten) :]
        except OSError as problem:
            if problem.errno not in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
                raise
            raise StagingError(
                f"no room for hidden states: {tempfile.gettempdir()} is full after {self._end / 2**30:.2f} GiB. Set "
                "TMPDIR to a folder with room, raise `memory`, or use fewer sequences"
            ) from problem
        self._on_disk[key] = stored
        self._end = max(self._end, stored.offset + hidden.nbytes)


_WORKER = "streamed"


@dataclass
class _StreamedItem:
    """An item that passes through the model, with the keys of its passes' hidden states and the partial results of each
    pass, range by range.
    """

    item: Any
    batches: Sequence[Any]
    keys: range
    partials: list[list[Any]] = field(default_factory=list)
    seconds: float = 0.0


class StreamedPool(Pool):
    """One replica in this process, loaded one range at a time. Every `map` reads the whole checkpoint once, so pass it
    all items in one call. Takes a `PassTask` only.
    """

    def __init__(self, spec: ModelSpec, placement: StreamedPlacement, *, timeouts: Timeouts | None = None) -> None:
        # The pools in `PLACEMENTS` take the same arguments; this one has no workers whose timeouts matter.
        self._spec, self._placement = spec, placement
        self._layers: Layers | None = None

    @property
    def replicas(self) -> int:
        return 1

    @property
    def staged(self) -> bool:
        return self._placement.staged

    def map(self, task: Task[T, R], items: Iterable[T]) -> Iterator[Finished[T, R]]:
        """Run ``task`` for every item. All results are yielded while the last range of layers runs."""
        check_staged(task)
        layers = self._opened()
        if isinstance(task, InspectionTask):
            for item in items:
                with working_on(item):
                    yield Finished(item, task(layers.outline, item), 0.0, _WORKER)
            return
        assert isinstance(task, PassTask)
        yield from self._stream(layers, task, items)

    def close(self) -> None:
        self._layers = None

    def _opened(self) -> Layers:
        if self._layers is None:
            torch.set_num_threads(self._placement.threads)
            layers = open_layers(self._spec, roomiest(self._placement.device))
            check_ranges(layers, self._placement.ranges)
            self._layers = layers
        return self._layers

    def _stream(
        self, layers: Layers, task: PassTask[Any, Any, Any, Any], items: Iterable[Any]
    ) -> Iterator[Finished[Any, Any]]:
        works = list(_prepared(task, items))
        if not works:
            return
        with ExitStack() as context:
            hidden = context.enter_context(HiddenStates(self._hidden_limit(layers)))
            for stage in self._stages(layers, context):
                for work in works:
                    self._run(task, stage, work, hidden)
                    if stage.is_last:
                        with working_on(work.item):
                            value = task.join(work.item, work.partials)
                        work.partials = []
                        yield Finished(work.item, value, work.seconds, _WORKER)

    def _run(self, task: PassTask[Any, Any, Any, Any], stage: Stage, work: _StreamedItem, hidden: HiddenStates) -> None:
        started = time.perf_counter()
        with torch.no_grad(), working_on(work.item):
            for key, batch, partials in zip(work.keys, work.batches, work.partials, strict=True):
                hidden_in = hidden.take(key) if stage.first else None
                partial, hidden_out = run_pass(task, stage, work.item, batch, hidden_in)
                partials.append(partial)
                if hidden_out is not None:
                    hidden.put(key, hidden_out)
                trim_heap()
        work.seconds += time.perf_counter() - started

    def _stages(self, layers: Layers, context: ExitStack) -> Iterator[Stage]:
        ranges = self._placement.ranges
        reader = ThreadPoolExecutor(1, "reader")
        context.callback(reader.shutdown, cancel_futures=True)
        ahead: Future[RawTensors] | None = None
        for index, (first, last) in enumerate(ranges):
            return_freed_memory()
            raw = None if ahead is None else ahead.result()
            with layers.at(first, last, raw) as stage:
                following = ranges[index + 1] if index + 1 < len(ranges) else None
                fits = following and layers.size(first, last) + layers.size(*following) <= self._weights_limit(layers)
                ahead = reader.submit(layers.read, *following) if following and fits else None
                yield stage

    def _weights_limit(self, layers: Layers) -> int:
        return self._placement.memory - layers.size_outside

    def _hidden_limit(self, layers: Layers) -> int:
        """Return the bytes of RAM for hidden states: half of what the weights leave; passes use the other half."""
        if self._placement.device != "cpu":
            return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 2
        sizes = [layers.size(*layer_range) for layer_range in self._placement.ranges]
        largest = max((a + b for a, b in pairwise(sizes)), default=sizes[0])
        return max(0, self._weights_limit(layers) - largest) // 2


def _prepared(task: PassTask[Any, Any, Any, Any], items: Iterable[Any]) -> Iterator[_StreamedItem]:
    end = 0
    for item in items:
        with working_on(item):
            batches = task.passes(item)
        keys = range(end, end + len(batches))
        end = keys.stop
        yield _StreamedItem(item, batches, keys, [[] for _ in batches])
