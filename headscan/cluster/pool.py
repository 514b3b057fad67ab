"""The interface of a pool, which runs tasks on replicas, the pool of this process, and tasks by layer ranges.

A task is a function ``task(loaded_model, item)``, or an object that is called like one. With one device it runs in
this process, otherwise in Ray actors (`ray_pool`), with the same interface and the same results.

Called with a whole model, a `PassTask` runs through all layers at once. If the model is larger than the device, its
forward passes run through one range of layers after another, and the partial results are joined at the end.

Shapes: B sequences, N tokens, E width of a hidden state.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence, Sized
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise
from pkgutil import resolve_name
from typing import Any, Generic, Self, TypeVar

import torch
from torch import Tensor

from headscan.cluster.placement_base import PLACEMENTS, LayerRange, Placement, ReplicaPlacement, Timeouts
from headscan.errors import HeadscanError
from headscan.layers.layer_ranges import Layers, Stage
from headscan.loading import load_spec
from headscan.model_spec import ModelSpec
from headscan.models.loaded_model import LoadedModel
from headscan.models.token_batches import is_out_of_memory, one_sequence_too_many, release_memory

T = TypeVar("T")
R = TypeVar("R")

#: ``task(loaded_model, item)``; Ray's workers must be able to import it.
Task = Callable[[LoadedModel, T], R]


class WorkError(HeadscanError):
    """A task failed for an item; the message names the item."""


class IncompleteError(WorkError):
    """Items were given up after repeated worker failures; all others are done."""

    exit_code = 3

    def __init__(self, items: Sequence[Any], reason: str) -> None:
        names = ", ".join(name_of(item) for item in items[:5]) + (", ..." if len(items) > 5 else "")
        super().__init__(f"{names}: {reason}. All others are done. Run the same command again to retry")
        self.items = items


@dataclass(frozen=True)
class Finished(Generic[T, R]):
    """One item's result."""

    item: T
    value: R
    seconds: float
    worker: str


class Pool(ABC):
    """Replicas of one model; a context manager that closes the pool."""

    @property
    @abstractmethod
    def replicas(self) -> int:
        """Number of items that run at the same time."""

    @property
    def staged(self) -> bool:
        """True if passes run by layer ranges, as a `PassTask` can."""
        return False

    @property
    def local(self) -> bool:
        """True if tasks run in this process with a whole model, so that they need not be pickled."""
        return False

    @abstractmethod
    def map(self, task: Task[T, R], items: Iterable[T]) -> Iterator[Finished[T, R]]:
        """Run ``task`` for every item and yield results as they finish. An item is drawn when a replica is free, so
        ``items`` may be a generator of any length.
        """

    @abstractmethod
    def close(self) -> None:
        """Release the replicas."""

    def one(self, task: Task[T, R], item: T) -> R:
        """Run ``task`` for a single item."""
        return next(iter(self.map(task, [item]))).value

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *problem: object) -> None:
        self.close()


@contextmanager
def working_on(item: Any) -> Iterator[None]:
    """Add the item's name to errors."""
    try:
        yield
    except HeadscanError as problem:
        raise WorkError(f"{name_of(item)}: {problem}") from problem
    except Exception as problem:
        problem.add_note(f"while working on {name_of(item)}")
        raise


def name_of(item: Any) -> str:
    """Return an item's ``name``, or its text."""
    return str(getattr(item, "name", None) or item)[:80]


class InProcessPool(Pool):
    """One replica in this process, loaded when it is first needed."""

    def __init__(self, spec: ModelSpec, placement: ReplicaPlacement) -> None:
        self._spec, self._placement = spec, placement
        self._lm: LoadedModel | None = None

    @property
    def replicas(self) -> int:
        return 1

    @property
    def local(self) -> bool:
        return True

    def map(self, task: Task[T, R], items: Iterable[T]) -> Iterator[Finished[T, R]]:
        for item in items:
            lm = self._model()
            started = time.perf_counter()
            with working_on(item):
                value = task(lm, item)
            yield Finished(item, value, time.perf_counter() - started, "in-process")

    def close(self) -> None:
        self._lm = None

    def _model(self) -> LoadedModel:
        if self._lm is None:
            torch.set_num_threads(self._placement.threads)
            self._lm = load_spec(self._spec, self._placement.local_target())
        return self._lm


def open_pool(
    spec: ModelSpec, placement: Placement, *, on_cluster: bool = False, timeouts: Timeouts | None = None
) -> Pool:
    """Open the pool of a placement: in this process for one device, on Ray for several, or on a connected cluster
    (``on_cluster``), where a single replica runs too. None for ``timeouts`` uses the defaults.
    """
    if isinstance(placement, ReplicaPlacement) and placement.replicas == 1 and not on_cluster:
        return InProcessPool(spec, placement)
    # Each pool is imported when it opens, because Ray takes a second to import and a single device does not need it.
    pool_class = resolve_name(f"headscan.cluster.{PLACEMENTS[placement.name].pool}")
    pool: Pool = pool_class(spec, placement, timeouts=timeouts)
    return pool


#: A forward pass of an item; its length is its number of sequences.
Pass = TypeVar("Pass", bound=Sized)
#: The partial result of a forward pass in one range of layers.
P = TypeVar("P")


class StagingError(HeadscanError):
    """A task that cannot run range by range of the layers."""


class PassTask(ABC, Generic[T, Pass, P, R]):
    """A picklable task whose passes can run by layer ranges."""

    @abstractmethod
    def passes(self, item: T) -> Sequence[Pass]:
        """Return the forward passes of an item, equal in every process."""

    @abstractmethod
    def run(self, lm: LoadedModel, item: T, batch: Pass) -> P:
        """Run one of `passes`, or one of its `halves`, over the loaded layers, without a KV cache; by layer ranges, in
        one call of the model. ``lm`` is the whole model, or a `layer_ranges.StageModel` inside `Stage.running_range`.
        """

    @abstractmethod
    def join(self, item: T, partials: Sequence[Sequence[P]]) -> R:
        """Join an item's partial results, by pass and then by range."""

    def size(self, batch: Pass) -> int:
        """Return the memory of a pass, in any unit, for comparison with passes that ran out of memory."""
        return len(batch)

    @abstractmethod
    def halves(self, batch: Pass) -> Sequence[Pass]:
        """Return the two halves of a pass; empty for one sequence."""

    @abstractmethod
    def join_halves(self, halves: Sequence[P]) -> P:
        """Join the partial results of the halves of a pass."""

    def __call__(self, lm: LoadedModel, item: T, *, on_pass: Callable[[int], None] | None = None) -> R:
        """Run an item with a whole model; call ``on_pass`` with the number of sequences of each finished pass."""
        partials = [run_pass(self, lm, item, batch, on_pass=on_pass)[0] for batch in self.passes(item)]
        return self.join(item, [[partial] for partial in partials])


class InspectionTask(ABC, Generic[T, R]):
    """A task that inspects a model without running it. The model may have no weights."""

    @abstractmethod
    def __call__(self, lm: LoadedModel, item: T) -> R:
        """Inspect the model; its grid covers all layers."""


def run_pass(
    task: PassTask[T, Pass, P, R],
    model: LoadedModel | Stage,
    item: T,
    batch: Pass,
    hidden: Tensor | None = None,
    *,
    on_pass: Callable[[int], None] | None = None,
) -> tuple[P, Tensor | None]:
    """Run one forward pass; if memory runs out, halve it, down to single sequences. The model remembers the size that
    ran out of memory, and later passes of that size are halved at once.

    ``hidden`` (B, N, E), on any device, enters the range of layers; None for the first range. Return the partial
    result, and the hidden states (B, N, E) that leave the range; None for the last range. Each finished pass of a whole
    model calls ``on_pass`` with its number of sequences.
    """
    lm = model.lm if isinstance(model, Stage) else model
    limit = lm.limits[type(task).__name__]
    size, half_batches = task.size(batch), task.halves(batch)
    if not half_batches or limit.allows(size):
        try:
            if not isinstance(model, Stage):
                partial = task.run(lm, item, batch)
                if on_pass is not None:
                    on_pass(len(batch))
                return partial, None
            with model.running_range(hidden) as range_pass:
                partial = task.run(lm, item, batch)
            return partial, range_pass.hidden_out
        except RuntimeError as problem:
            if not is_out_of_memory(problem):
                raise
            if not half_batches:
                raise one_sequence_too_many() from problem
            limit.ran_out(size)
        release_memory()
    hidden_halves = [None] * len(half_batches) if hidden is None else hidden.split([len(half) for half in half_batches])
    results = [
        run_pass(task, model, item, half_batch, hidden_half, on_pass=on_pass)
        for half_batch, hidden_half in zip(half_batches, hidden_halves, strict=True)
    ]
    partial = task.join_halves([half_partial for half_partial, _ in results])
    hidden_out = [half_hidden_out for _, half_hidden_out in results if half_hidden_out is not None]
    return partial, torch.cat(hidden_out) if hidden_out else None


def check_ranges(layers: Layers, ranges: Sequence[LayerRange]) -> None:
    """Raise if ranges of layers do not make up the model."""
    bounds = [0, *(last for _, last in ranges)]
    if tuple(ranges) != tuple(pairwise(bounds)) or bounds[-1] != layers.num_layers:
        raise StagingError(
            f"layer ranges {', '.join(f'{first}-{last - 1}' for first, last in ranges)} do not make up "
            f"{layers.lazy_model.source}. Put each layer from 0 to {layers.num_layers - 1} in one range, in order"
        )
    layers.inspection.check(bounds)


def check_staged(task: object) -> None:
    """Raise if a task needs the whole model."""
    if not isinstance(task, PassTask | InspectionTask):
        function = getattr(task, "func", task)  # the function of a `functools.partial`
        raise _needs_all_layers(getattr(function, "__name__", str(function)).replace("_", " "))


def refuse_staged(pool: Pool, what: str, *, instead: str | None = None) -> None:
    """Raise StagingError if the layers of a pool run range by range: ``what`` needs them all, ``instead`` does not."""
    if pool.staged:
        raise _needs_all_layers(what, instead)


def _needs_all_layers(what: str, instead: str | None = None) -> StagingError:
    remedy = "" if instead is None else f"{instead}, or "
    return StagingError(
        f"{what} needs all layers of the model at once, not range by range. Use {remedy}`placement=whole` or"
        " `placement=sharded`"
    )
