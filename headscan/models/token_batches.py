"""Batches of sequences with little padding, halved when memory runs out.

Shapes: B sequences, N tokens of the longest.
"""

from __future__ import annotations

import ctypes
import gc
import math
import sys
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor

from headscan.errors import MemoryLimitError, SequenceError

#: Messages of out-of-memory errors of other types: the CPU's allocator, CUDA outside torch's allocator, cuBLAS.
_OUT_OF_MEMORY = ("can't allocate memory", "CUDA error: out of memory", "CUBLAS_STATUS_ALLOC_FAILED")


class MemoryLimit:
    """The smallest size that ran out of memory, in any unit that grows with the memory used; not tried again."""

    def __init__(self) -> None:
        self._too_much = math.inf

    def allows(self, size: float) -> bool:
        """Return True unless this or a smaller size ran out of memory."""
        return size < self._too_much

    def ran_out(self, size: float) -> None:
        self._too_much = min(size, self._too_much)


def is_out_of_memory(problem: RuntimeError) -> bool:
    return isinstance(problem, torch.OutOfMemoryError) or any(text in str(problem) for text in _OUT_OF_MEMORY)


def release_memory() -> None:
    """Free the memory of a failed pass. Call it outside the handler, because the traceback keeps tensors alive."""
    gc.collect()
    return_freed_memory()


def return_freed_memory() -> None:
    """Return freed memory to the system and to the GPUs."""
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
    trim_heap()


def trim_heap() -> None:
    """Return freed RAM to the system, in under a millisecond; glibc keeps holes that later tensors may not fit into."""
    malloc_trim = getattr(ctypes.CDLL(None), "malloc_trim", None) if sys.platform == "linux" else None
    if malloc_trim is not None:
        malloc_trim(0)


def one_sequence_too_many() -> MemoryLimitError:
    return MemoryLimitError("one sequence does not fit into memory. Shorten it, or use a device with more memory")


R = TypeVar("R")

#: Most tokens of one pass on devices where more are slower: on a CPU larger activations exceed its caches.
_PASS_TOKENS = {"cpu": 2048}


def pass_tokens(device: str, batch_tokens: int) -> int:
    """Return the tokens of one pass on a device, such as ``cuda:0``: ``batch_tokens``, or fewer if those are faster."""
    return min(batch_tokens, _PASS_TOKENS.get(device.partition(":")[0], batch_tokens))


#: Cost of one more forward pass, in tokens: on a GPU a short pass takes as long as one of hundreds of tokens.
_PASS_COST = {"cpu": 64, "cuda": 512}


def pass_cost(device: str) -> int:
    """Return the cost of one more forward pass on a type of device, in tokens."""
    return _PASS_COST.get(device, max(_PASS_COST.values()))


def integers(name: str, values: Any) -> Tensor:
    """Return an argument as a tensor of one axis or more; raise SequenceError if it holds no numbers."""
    try:
        return torch.atleast_1d(torch.as_tensor(values))
    except (TypeError, ValueError, RuntimeError):
        raise SequenceError(f"{name} are of type {type(values).__name__}. Pass one integer per sequence") from None


#: The one id that every vocabulary has; padding changes no number.
PADDING = 0


def pad(sequences: Sequence[Sequence[int] | np.ndarray], width: int | None = None) -> tuple[Tensor, Tensor]:
    """Return token ids (B, N), padded on the right to ``width`` (None: to the longest), and lengths (B,)."""
    lengths = torch.tensor([len(sequence) for sequence in sequences])
    ids = torch.full((len(sequences), width or int(lengths.max())), PADDING, dtype=torch.long)
    for row, sequence in enumerate(sequences):
        ids[row, : len(sequence)] = torch.as_tensor(np.asarray(sequence, dtype=np.int64))
    return ids, lengths


def batches(
    lengths: Sequence[int], batch_tokens: int, *, pass_cost: float = math.inf, groups: Sequence[Hashable] | None = None
) -> Iterator[list[int]]:
    """Yield batches as indices, longest first, of at most ``batch_tokens`` with padding, and at least one sequence. The
    same lengths give the same batches.

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
            is_of_other_group = groups is not None and groups[index] != groups[batch[0]]
            if is_of_other_group or padding > pass_cost or (len(batch) + 1) * longest > batch_tokens:
                yield batch
                batch, padding = [], 0
        batch.append(index)
    if batch:
        yield batch


@dataclass(frozen=True)
class Batch:
    """Sequences of one batch, by index in the list of all, padded to ``width`` tokens (N). A half keeps the width of
    the whole batch, since its hidden states have it.
    """

    sequence_indices: tuple[int, ...]
    width: int

    def __len__(self) -> int:
        return len(self.sequence_indices)

    @property
    def tokens(self) -> int:
        return len(self.sequence_indices) * self.width

    def halves(self) -> tuple[Batch, ...]:
        """Return two smaller batches; none for a single sequence."""
        middle = len(self.sequence_indices) // 2
        if not middle:
            return ()
        return Batch(self.sequence_indices[:middle], self.width), Batch(self.sequence_indices[middle:], self.width)


def whole_batches(
    lengths: Sequence[int], batch_tokens: int, rope_group: Callable[[int], Hashable], *, pass_cost: float = math.inf
) -> list[Batch]:
    """Return `batches` that keep each sequence's own rotary frequencies: lengths with different ``rope_group``, such as
    `RopeLengths.group`, never share one.
    """
    groups = [rope_group(tokens) for tokens in lengths]
    index_lists = batches(lengths, batch_tokens, pass_cost=pass_cost, groups=groups)
    return [Batch(tuple(indices), lengths[indices[0]]) for indices in index_lists]


def run_halving(
    batch: list[int], run: Callable[[list[int]], R], lengths: Sequence[int], limit: MemoryLimit
) -> list[tuple[list[int], R]]:
    """Run a batch of sequences (indices) that are padded to the longest; halve it, down to single sequences, if memory
    runs out or, by ``limit``, ran out before.
    """

    def padded_tokens(indices: list[int]) -> int:
        return len(indices) * max(lengths[index] for index in indices)

    return run_halving_by_size(batch, run, padded_tokens, limit)


def run_halving_by_size(
    batch: list[int], run: Callable[[list[int]], R], size: Callable[[list[int]], float], limit: MemoryLimit
) -> list[tuple[list[int], R]]:
    """Run a batch as `run_halving` does; ``size`` returns the size of a batch in the unit of ``limit``."""
    batch_size = size(batch)
    if len(batch) == 1 or limit.allows(batch_size):
        try:
            return [(batch, run(batch))]
        except RuntimeError as problem:
            if not is_out_of_memory(problem):
                raise
            if len(batch) == 1:
                raise one_sequence_too_many() from problem
            limit.ran_out(batch_size)
        release_memory()
    middle = len(batch) // 2
    return [
        *run_halving_by_size(batch[:middle], run, size, limit),
        *run_halving_by_size(batch[middle:], run, size, limit),
    ]
