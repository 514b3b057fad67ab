"""Running out of memory: telling it from other errors, and what is left to do then."""

from __future__ import annotations

import gc

import torch

from headscan.errors import MemoryLimitError


def is_out_of_memory(problem: RuntimeError) -> bool:
    """Whether a pass failed for want of memory, on a GPU or on a CPU."""
    return isinstance(problem, torch.OutOfMemoryError) or "can't allocate memory" in str(problem)


def release_memory() -> None:
    """Give back what a failed pass held; call it outside the handler, whose traceback keeps its tensors alive."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def one_sequence_too_many() -> MemoryLimitError:
    """The error for a single sequence that does not fit."""
    return MemoryLimitError("one sequence alone does not fit into memory: shorten it, or use a larger device")
