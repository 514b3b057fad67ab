"""A model larger than the device, run range by range.

All items pass through one range of its layers after another.

Each range is read once from the checkpoint; a thread reads the next range while the current one computes. Between the
ranges hidden states wait in RAM or on disk.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import torch

from headscan.cluster.placement.devices import roomiest
from headscan.cluster.placement.streamed_placement import StreamedPlacement
from headscan.cluster.tasks.hidden_states import HiddenStates
from headscan.cluster.tasks.pool import Finished, Pool, R, T, Task, working_on
from headscan.cluster.tasks.staged_task import Question, StagedTask, check_ranges, check_staged, open_layers, run_pass
from headscan.model_spec import ModelSpec
from headscan.models.out_of_memory import return_freed_memory, trim_heap
from headscan.partial.layer_ranges import Layers, Stage
from headscan.partial.lazy_model import RawTensors

_WORKER = "streamed"


@dataclass
class _Work:
    """An item that passes through the model.

    Attributes:
        parts: Its forward passes.
        keys: Keys of the passes' hidden states.
        partials: Partial results of each pass, range by range.
        seconds: Run time of the passes.
    """

    item: Any
    parts: Sequence[Any]
    keys: range
    partials: list[list[Any]] = field(default_factory=list)
    seconds: float = 0.0


class StreamedPool(Pool):
    """One replica in this process, loaded one range at a time.

    Every `map` reads the whole checkpoint once, so pass it all items in one call. Takes tasks of `staged_task` only.
    """

    def __init__(self, spec: ModelSpec, placement: StreamedPlacement) -> None:
        self._spec, self._placement = spec, placement
        self._layers: Layers | None = None

    @property
    def replicas(self) -> int:
        return 1

    @property
    def staged(self) -> bool:
        return self._placement.staged

    def map(self, task: Task[T, R], items: Iterable[T]) -> Iterator[Finished[T, R]]:
        """Run ``task`` for every item.

        All results are yielded while the last range of layers runs.

        Raises:
            StagingError: The task needs all layers at once, or the disk is full.
        """
        check_staged(task)
        layers = self._opened()
        if isinstance(task, Question):
            for item in items:
                with working_on(item):
                    yield Finished(item, task(layers.outline, item), 0.0, _WORKER)
            return
        assert isinstance(task, StagedTask)
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
        self, layers: Layers, task: StagedTask[Any, Any, Any, Any], items: Iterable[Any]
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

    def _run(self, task: StagedTask[Any, Any, Any, Any], stage: Stage, work: _Work, hidden: HiddenStates) -> None:
        """Run all passes of an item through one range of layers."""
        started = time.perf_counter()
        with torch.no_grad(), working_on(work.item):
            for key, part, partials in zip(work.keys, work.parts, work.partials, strict=True):
                hidden_in = hidden.take(key) if stage.first else None
                found, left = run_pass(task, stage, work.item, part, hidden_in)
                partials.append(found)
                if left is not None:
                    hidden.put(key, left)
                trim_heap()
        work.seconds += time.perf_counter() - started

    def _stages(self, layers: Layers, context: ExitStack) -> Iterator[Stage]:
        """Load the ranges of layers one after another."""
        ranges = self._placement.ranges
        reader = ThreadPoolExecutor(1, "reader")
        context.callback(reader.shutdown, cancel_futures=True)
        ahead: Future[RawTensors] | None = None
        for index, (first, last) in enumerate(ranges):
            return_freed_memory()
            raw = None if ahead is None else ahead.result()
            with layers.at(first, last, raw) as stage:
                more = ranges[index + 1] if index + 1 < len(ranges) else None
                fits = more and layers.size(first, last) + layers.size(*more) <= self._weights_limit(layers)
                ahead = reader.submit(layers.read, *more) if more and fits else None
                yield stage

    def _weights_limit(self, layers: Layers) -> int:
        return self._placement.memory - layers.size_outside

    def _hidden_limit(self, layers: Layers) -> int:
        """Return the bytes of RAM for hidden states.

        They are half of what the weights leave; passes use the other half.
        """
        if self._placement.device != "cpu":
            return _available_memory() // 2
        sizes = [layers.size(*layer_range) for layer_range in self._placement.ranges]
        largest = max((a + b for a, b in pairwise(sizes)), default=sizes[0])
        return max(0, self._weights_limit(layers) - largest) // 2


def _prepared(task: StagedTask[Any, Any, Any, Any], items: Iterable[Any]) -> Iterator[_Work]:
    end = 0
    for item in items:
        with working_on(item):
            parts = task.passes(item)
        keys = range(end, end + len(parts))
        end = keys.stop
        yield _Work(item, parts, keys, [[] for _ in parts])


def _available_memory() -> int:
    """Return the free bytes of RAM."""
    return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
