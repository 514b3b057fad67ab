"""CPU tensors in anonymous memory maps.

The system gets the memory back when a tensor is freed.

The heap keeps holes of freed tensors. A map is unmapped as soon as its tensor is freed, so that a range of weights can
replace another in the same memory.
"""

from __future__ import annotations

import math
import mmap

import torch
from torch import Tensor

#: Smallest tensor in a map of its own, in bytes.
_LEAST = 1 << 20


def empty_mmap(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Return an uninitialised CPU tensor."""
    size = math.prod(shape) * dtype.itemsize
    if size < _LEAST:
        return torch.empty(shape, dtype=dtype)
    # Private maps merge with their neighbours; a process may have only 65,530 separate areas.
    pages = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    return torch.frombuffer(pages, dtype=dtype).view(shape)


def mmap_copy(tensor: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """Return a CPU copy of a tensor; ``dtype=None`` keeps its dtype."""
    return empty_mmap(tuple(tensor.shape), dtype or tensor.dtype).copy_(tensor)


def bytes_of(tensor: Tensor) -> memoryview:
    """Return the memory of a contiguous CPU tensor."""
    return tensor.view(-1).view(torch.uint8).numpy().data
