"""Tensors in memory maps of their own, which are freed with the tensor."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

from headscan.layers.lazy_model import bytes_of, empty_mmap, mmap_copy
from headscan.models.token_batches import return_freed_memory

#: One that is worth pages of its own, and one that is not.
SHAPES = [(512, 1024), (3, 5)]


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64])
def test_they_keep_their_contents(shape: tuple[int, int], dtype: torch.dtype) -> None:
    given = torch.randint(0, 100, shape).to(dtype)
    copy = mmap_copy(given)
    assert copy.dtype == dtype and torch.equal(copy, given)
    assert copy.data_ptr() != given.data_ptr()
    assert torch.equal(mmap_copy(given, torch.float64), given.double())
    empty = empty_mmap(shape, dtype)
    bytes_of(empty)[:] = bytes_of(given)
    assert torch.equal(empty, given)
    assert torch.equal(mmap_copy(given.T), given.T)


@pytest.mark.skipif(sys.platform != "linux", reason="the process's memory is read from /proc")
def test_their_memory_is_the_systems_again_at_once() -> None:
    def resident() -> int:
        lines = Path("/proc/self/status").read_text().splitlines()
        return next(1024 * int(line.split()[1]) for line in lines if line.startswith("VmRSS"))

    size = 4 << 20
    # What the C library is used to free of this size, it keeps.
    for _ in range(3):
        del [torch.ones(size // 4) for _ in range(16)][:]
    return_freed_memory()
    before = resident()
    held = [empty_mmap((size // 4,), torch.float32).fill_(1.0) for _ in range(16)]
    assert resident() - before > 15 * size
    kept = held[-1]
    del held
    assert resident() - before < 3 * size
    assert kept.sum() == size // 4
