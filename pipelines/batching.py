"""Batches of token sequences: little padding, and smaller ones where memory runs out.

Shapes: B sequences, N tokens of the longest.
"""

from __future__ import annotations

import gc
import math
from collections.abc import Callable, Iterator, Sequence
from typing import TypeVar

import numpy as np
import torch
from torch import Tensor

from headscan.errors import HeadscanError

R = TypeVar("R")


class MemoryLimitError(HeadscanError):
    """Not even one sequence fits."""


#: The one id that every vocabulary has; what stands in padding changes no number.
_PADDING = 0


def batches(lengths: Sequence[int], batch_tokens: int, *, pass_cost: float = math.inf) -> Iterator[list[int]]:
    """Indices of sequences that run together: longest first, at most ``batch_tokens`` with padding, at least one.

    The same lengths give the same batches.

    Args:
        pass_cost: What one more forward pass costs, in tokens: a batch ends before its padding costs more than that.
    """
    batch: list[int] = []
    padding = 0
    for index in sorted(range(len(lengths)), key=lambda i: (-lengths[i], i)):
        if batch:
            longest = lengths[batch[0]]
            padding += longest - lengths[index]
            if padding > pass_cost or (len(batch) + 1) * longest > batch_tokens:
                yield batch
                batch, padding = [], 0
        batch.append(index)
    if batch:
        yield batch


def pad(sequences: Sequence[Sequence[int] | np.ndarray]) -> tuple[Tensor, Tensor]:
    """Token ids (B, N), padded on the right, and lengths (B,)."""
    lengths = torch.tensor([len(sequence) for sequence in sequences])
    ids = torch.full((len(sequences), int(lengths.max())), _PADDING, dtype=torch.long)
    for row, sequence in enumerate(sequences):
        ids[row, : len(sequence)] = torch.as_tensor(np.asarray(sequence, dtype=np.int64))
    return ids, lengths


def run_halving(batch: list[int], run: Callable[[list[int]], R]) -> list[tuple[list[int], R]]:
    """Run a batch; when memory runs out, run its halves instead, down to single sequences.

    Raises:
        MemoryLimitError: A single sequence does not fit.
    """
    try:
        return [(batch, run(batch))]
    except RuntimeError as problem:
        if not _is_out_of_memory(problem):
            raise
        if len(batch) == 1:
            raise MemoryLimitError(
                "one sequence alone does not fit into memory: shorten it, or use a larger device"
            ) from problem
    # Outside the handler, where the traceback no longer keeps the failed pass's tensors alive.
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
    middle = len(batch) // 2
    return run_halving(batch[:middle], run) + run_halving(batch[middle:], run)


def _is_out_of_memory(problem: RuntimeError) -> bool:
    return isinstance(problem, torch.OutOfMemoryError) or "can't allocate memory" in str(problem)
