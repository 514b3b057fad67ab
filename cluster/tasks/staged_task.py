"""Work that can go through a model range by range of its layers: written once, and run by every pool.

A `StagedTask` is a task like any other: called with a whole model it goes through all layers at once. Where the model
is larger than the device, its forward passes go through one range of layers after another, and what each range gave is
joined at the end.

Shapes: B sequences, N tokens, E width of a hidden state.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence, Sized
from itertools import pairwise
from typing import Generic, TypeVar

import torch
from torch import Tensor

from headscan.cluster.placement.placement_base import LayerRange
from headscan.errors import HeadscanError
from headscan.model_spec import ModelSpec
from headscan.models.loaded_model import LoadedModel
from headscan.models.out_of_memory import is_out_of_memory, one_sequence_too_many, release_memory
from headscan.partial import layer_ranges as stages
from headscan.partial.inspection import Inspection
from headscan.partial.layer_ranges import Layers, Stage

T = TypeVar("T")
#: A forward pass of an item: its length is its number of sequences.
B = TypeVar("B", bound=Sized)
#: What a forward pass gives in one range of layers.
P = TypeVar("P")
R = TypeVar("R")


class StagingError(HeadscanError):
    """Work that cannot go through a model range by range."""


class StagedTask(ABC, Generic[T, B, P, R]):
    """A task whose forward passes may go through a model in parts. It has to be picklable.

    Attributes:
        name: For people.
    """

    def __init__(self, name: str) -> None:
        self.__name__ = name

    @abstractmethod
    def passes(self, item: T) -> Sequence[B]:
        """The forward passes of an item, the same wherever it is asked."""

    @abstractmethod
    def run(self, lm: LoadedModel, item: T, part: B) -> P:
        """Run a forward pass over the layers that are there: one call of the model, without a KV cache.

        Args:
            lm: The whole model, or a `layer_ranges.StageModel`; a range pass is then open around this call.
            part: One of `passes`, or one of its `halves`.
        """

    @abstractmethod
    def join(self, item: T, partials: Sequence[Sequence[P]]) -> R:
        """The result of an item from what its passes gave: by pass, then by range of layers, the lowest first."""

    def size(self, part: B) -> int:
        """What a pass takes of memory, in any unit: by it is known what ran out before."""
        return len(part)

    @abstractmethod
    def halves(self, part: B) -> Sequence[B]:
        """The two halves of a pass, its first sequences and the others, for which memory ran out; none: it has none."""

    @abstractmethod
    def glue(self, halves: Sequence[P]) -> P:
        """What a pass would have given, from what its halves gave."""

    def __call__(self, lm: LoadedModel, item: T) -> R:
        """Work on an item with a whole model."""
        return self.join(item, [[run_pass(self, lm, item, part)[0]] for part in self.passes(item)])


class Question(ABC, Generic[T, R]):
    """A task that asks what a model is, not what it does: it is called with a model that may have no weights.

    Attributes:
        name: For people.
    """

    def __init__(self, name: str) -> None:
        self.__name__ = name

    @abstractmethod
    def __call__(self, lm: LoadedModel, item: T) -> R:
        """Look at the model; its grid is the whole one."""


def run_pass(
    task: StagedTask[T, B, P, R], model: LoadedModel | Stage, item: T, part: B, hidden: Tensor | None = None
) -> tuple[P, Tensor | None]:
    """Run one forward pass of a task; when memory runs out, run its halves instead, down to single sequences.

    What ran out is remembered with the model: passes of that size are halved without being tried.

    Args:
        model: A whole model, or a range of its layers.
        part: One of the task's passes.
        hidden: What enters the range (B, N, E), on any device; None for the range that begins with the model.

    Returns:
        What the pass gave, and the hidden states that left the range (B, N, E); None where the model ends with it.

    Raises:
        MemoryLimitError: Not even one sequence fits.
    """
    lm = model.lm if isinstance(model, Stage) else model
    limit, size, halves = lm.limits[task.__name__], task.size(part), task.halves(part)
    if not halves or limit.allows(size):
        try:
            if not isinstance(model, Stage):
                return task.run(lm, item, part), None
            with model.running_range(hidden) as range_pass:
                found = task.run(lm, item, part)
            return found, range_pass.hidden_out
        except RuntimeError as problem:
            if not is_out_of_memory(problem):
                raise
            if not halves:
                raise one_sequence_too_many() from problem
            limit.ran_out(size)
        release_memory()
    parts = [None] * len(halves) if hidden is None else hidden.split([len(half) for half in halves])
    done = [run_pass(task, model, item, half, entering) for half, entering in zip(halves, parts, strict=True)]
    left = [leaving for _, leaving in done if leaving is not None]
    return task.glue([found for found, _ in done]), torch.cat(left) if left else None


def open_layers(spec: ModelSpec, device: str, inspection: Inspection | None = None) -> Layers:
    """Open a model whose layers are to be loaded range by range; see `layer_ranges.open_layers`."""
    return stages.open_layers(
        spec.source,
        device=device,
        dtype=spec.dtype,
        revision=spec.revision,
        trust_remote_code=spec.trust_remote_code,
        safetensors=spec.safetensors,
        inspection=inspection,
    )


def check_ranges(layers: Layers, ranges: Sequence[LayerRange]) -> None:
    """Refuse ranges of layers that do not make up the model, or cannot be.

    Raises:
        StagingError: A layer is in none of them or in two, or they are not in order.
        UnsupportedModelError: The model cannot be cut there.
    """
    bounds = [0, *(last for _, last in ranges)]
    if tuple(ranges) != tuple(pairwise(bounds)) or bounds[-1] != layers.num_layers:
        raise StagingError(
            f"the layers {', '.join(f'{first} to {last - 1}' for first, last in ranges)} are not those of "
            f"{layers.lazy_model.source}: they are 0 to {layers.num_layers - 1}, each in one range, in order"
        )
    layers.inspection.check(bounds)


def check_staged(task: object) -> None:
    """Refuse a task that needs the whole model.

    Raises:
        StagingError: It is neither a `StagedTask` nor a `Question`.
    """
    if not isinstance(task, StagedTask | Question):
        name = getattr(task, "__name__", str(task)).replace("_", " ")
        raise StagingError(
            f"{name} needs all layers of the model at once, not range by range. Use placement=whole or "
            "placement=sharded"
        )
