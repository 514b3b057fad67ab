"""Batches of sequences with little padding, halved when memory runs out."""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Iterator, Sequence
from typing import TypeVar

from headscan.models.out_of_memory import MemoryLimit, is_out_of_memory, one_sequence_too_many, release_memory

R = TypeVar("R")


def batches(
    lengths: Sequence[int],
    batch_tokens: int,
    *,
    pass_cost: float = math.inf,
    groups: Sequence[Hashable] | None = None,
) -> Iterator[list[int]]:
    """Yield batches as indices, longest first.

    A batch has at most ``batch_tokens`` with padding, and at least one sequence.

    The same lengths give the same batches.

    Args:
        pass_cost: Cost of one more forward pass, in tokens: a batch ends before its padding costs more.
        groups: A key for each sequence; sequences with different keys never share a batch. None allows all.
    """
    batch: list[int] = []
    padding = 0
    for index in sorted(range(len(lengths)), key=lambda i: (-lengths[i], i)):
        if batch:
            longest = lengths[batch[0]]
            padding += longest - lengths[index]
            other = groups is not None and groups[index] != groups[batch[0]]
            if other or padding > pass_cost or (len(batch) + 1) * longest > batch_tokens:
                yield batch
                batch, padding = [], 0
        batch.append(index)
    if batch:
        yield batch


def run_halving(
    batch: list[int], run: Callable[[list[int]], R], lengths: Sequence[int], limit: MemoryLimit
) -> list[tuple[list[int], R]]:
    """Run a batch; halve it if memory runs out.

    It is halved down to single sequences.

    Args:
        lengths: Tokens of every sequence, including those of other batches.
        limit: Sizes that ran out of memory before; batches above it are halved without a try.

    Raises:
        MemoryLimitError: A single sequence does not fit.
    """
    tokens = len(batch) * max(lengths[index] for index in batch)
    if len(batch) == 1 or limit.allows(tokens):
        try:
            return [(batch, run(batch))]
        except RuntimeError as problem:
            if not is_out_of_memory(problem):
                raise
            if len(batch) == 1:
                raise one_sequence_too_many() from problem
            limit.ran_out(tokens)
        release_memory()
    middle = len(batch) // 2
    return [found for half in (batch[:middle], batch[middle:]) for found in run_halving(half, run, lengths, limit)]
