"""Running out of memory: telling it from other errors, what is left to do then, and not doing the same again."""

from __future__ import annotations

import ctypes
import gc
import math
import sys

import torch

from headscan.errors import MemoryLimitError

#: What such errors say that have another type: of the CPU's allocator, of CUDA beside torch's allocator, of cuBLAS.
_OUT_OF_MEMORY = ("can't allocate memory", "CUDA error: out of memory", "CUBLAS_STATUS_ALLOC_FAILED")


class MemoryLimit:
    """What ran out of memory before, so that as much is not tried again: a failed pass takes time, and leaves holes.

    Sizes may be of any unit that grows with the memory taken, the same for all work under one limit.
    """

    def __init__(self) -> None:
        self._too_much = math.inf

    def allows(self, size: float) -> bool:
        """Whether nothing of this size or a smaller one has run out."""
        return size < self._too_much

    def ran_out(self, size: float) -> None:
        """Remember that this size did."""
        self._too_much = min(size, self._too_much)


def is_out_of_memory(problem: RuntimeError) -> bool:
    """Whether a pass failed for want of memory, on a GPU or on a CPU."""
    return isinstance(problem, torch.OutOfMemoryError) or any(text in str(problem) for text in _OUT_OF_MEMORY)


def release_memory() -> None:
    """Give back what a failed pass held; call it outside the handler, whose traceback keeps its tensors alive."""
    gc.collect()
    return_freed_memory()


def return_freed_memory() -> None:
    """Let the process keep no room for what has been freed, neither of the RAM nor of the GPUs."""
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
    trim_heap()


def trim_heap() -> None:
    """Give freed RAM back to the system: the C library keeps holes, which what comes next may not fit into.

    It takes less than a millisecond. Of glibc alone; other C libraries keep less.
    """
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None) if sys.platform == "linux" else None
    if trim is not None:
        trim(0)


def one_sequence_too_many() -> MemoryLimitError:
    """The error for a single sequence that does not fit."""
    return MemoryLimitError("one sequence alone does not fit into memory: shorten it, or use a larger device")
