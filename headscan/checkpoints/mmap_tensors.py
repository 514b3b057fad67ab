"""Tensors in pages of memory of their own.

What is allocated and freed among much else leaves holes that the process keeps. The pages of such a tensor are the
system's again as soon as nobody holds it, so that one range of weights can follow another in the same room.
"""

from __future__ import annotations

import math
import mmap

import torch
from torch import Tensor

#: Smaller tensors are not worth pages of their own, in bytes.
_LEAST = 1 << 20


def empty_mmap(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """A tensor on the CPU whose numbers are still to come."""
    size = math.prod(shape) * dtype.itemsize
    if size < _LEAST:
        return torch.empty(shape, dtype=dtype)
    # Private, as what is allocated elsewhere is: neighbours become one area, of which a process may have 65,530.
    pages = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    return torch.frombuffer(pages, dtype=dtype).view(shape)


def mmap_copy(tensor: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """A copy of a tensor in such pages, on the CPU, in its own dtype or another."""
    return empty_mmap(tuple(tensor.shape), dtype or tensor.dtype).copy_(tensor)


def bytes_of(tensor: Tensor) -> memoryview:
    """The memory of a contiguous tensor on the CPU."""
    return tensor.view(-1).view(torch.uint8).numpy().data
