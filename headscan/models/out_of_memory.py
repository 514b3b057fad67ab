"""Out-of-memory errors: recognition, release of memory, and limits."""

from __future__ import annotations

import ctypes
import gc
import math
import sys

import torch

from headscan.errors import MemoryLimitError

#: Messages of out-of-memory errors of other types: the CPU's allocator, CUDA outside torch's allocator, cuBLAS.
_OUT_OF_MEMORY = ("can't allocate memory", "CUDA error: out of memory", "CUBLAS_STATUS_ALLOC_FAILED")


class MemoryLimit:
    """The smallest size that ran out of memory.

    It is not tried again: a failed pass takes time and fragments the memory.

    Sizes have any unit that grows with the memory used, the same for all work under one limit.
    """

    def __init__(self) -> None:
        self._too_much = math.inf

    def allows(self, size: float) -> bool:
        """Return True unless this or a smaller size ran out of memory."""
        return size < self._too_much

    def ran_out(self, size: float) -> None:
        """Record a size that ran out of memory."""
        self._too_much = min(size, self._too_much)


def is_out_of_memory(problem: RuntimeError) -> bool:
    """Return True if a GPU or CPU ran out of memory."""
    return isinstance(problem, torch.OutOfMemoryError) or any(text in str(problem) for text in _OUT_OF_MEMORY)


def release_memory() -> None:
    """Free the memory of a failed pass.

    Call it outside the handler, because the traceback keeps tensors alive.
    """
    gc.collect()
    return_freed_memory()


def return_freed_memory() -> None:
    """Return freed memory to the system and to the GPUs."""
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
    trim_heap()


def trim_heap() -> None:
    """Return freed RAM to the system.

    glibc keeps holes that later tensors may not fit into.

    It takes less than a millisecond. Other C libraries keep less and are left alone.
    """
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None) if sys.platform == "linux" else None
    if trim is not None:
        trim(0)


def one_sequence_too_many() -> MemoryLimitError:
    """Return the error for a single sequence that does not fit."""
    return MemoryLimitError("one sequence does not fit into memory. Shorten it, or use a device with more memory")
