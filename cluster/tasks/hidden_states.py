"""Hidden states between layer ranges, in RAM and then on disk.

Shapes: B sequences, N tokens, E width of a hidden state.
"""

from __future__ import annotations

import errno
import tempfile
from dataclasses import dataclass
from typing import IO, Self

import torch
from torch import Tensor

from headscan.checkpoints.mmap_tensors import bytes_of, empty_mmap, mmap_copy
from headscan.cluster.tasks.staged_task import StagingError


@dataclass(frozen=True)
class _OnDisk:
    """Offset, shape and dtype of hidden states in the file."""

    offset: int
    shape: torch.Size
    dtype: torch.dtype


class HiddenStates:
    """A store of hidden states (B, N, E), one for each pass.

    It is a context manager. The file on disk has no name, so nothing is left of it if the process ends. It is read and
    written rather than memory-mapped: mapped pages count as the process's memory, and a full disk would kill the
    process without an error.

    Args:
        limit: Bytes of RAM that they may use.
    """

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._in_memory: dict[int, Tensor] = {}
        self._used = 0
        self._on_disk: dict[int, _OnDisk] = {}
        self._file: IO[bytes] | None = None
        self._end = 0

    @property
    def bytes_in_memory(self) -> int:
        """Bytes in RAM."""
        return self._used

    @property
    def bytes_on_disk(self) -> int:
        """Size of the file."""
        return self._end

    def put(self, key: int, hidden: Tensor) -> None:
        """Store hidden states until `take`.

        Raises:
            StagingError: The disk is full.
        """
        if self._used + hidden.nbytes > self._limit:
            self._write(key, hidden.cpu().contiguous())
            return
        # A copy in memory of its own, which the process can return to the system when it is freed.
        self._in_memory[key] = mmap_copy(hidden)
        self._used += hidden.nbytes

    def take(self, key: int) -> Tensor:
        """Return and forget stored hidden states, on the CPU."""
        if key in self._in_memory:
            hidden = self._in_memory.pop(key)
            self._used -= hidden.nbytes
            return hidden
        return self._read(key)

    def close(self) -> None:
        """Forget everything and delete the file."""
        self._in_memory.clear()
        if self._file is not None:
            self._file.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _write(self, key: int, hidden: Tensor) -> None:
        if self._file is None:
            self._file = tempfile.TemporaryFile(buffering=0)  # noqa: SIM115
        # The hidden states of a pass have the same size in every range, so they reuse the place that `take` freed.
        place = self._on_disk.get(key, _OnDisk(self._end, hidden.shape, hidden.dtype))
        self._file.seek(place.offset)
        left = bytes_of(hidden)
        try:
            while left:
                left = left[self._file.write(left) :]
        except OSError as problem:
            if problem.errno not in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
                raise
            raise StagingError(
                f"no room for hidden states: {tempfile.gettempdir()} is full after {self._end / 2**30:.2f} GiB. Set "
                "TMPDIR to a folder with room, raise `memory`, or use fewer sequences"
            ) from problem
        self._on_disk[key] = place
        self._end = max(self._end, place.offset + hidden.nbytes)

    def _read(self, key: int) -> Tensor:
        place = self._on_disk[key]
        assert self._file is not None
        hidden = empty_mmap(place.shape, place.dtype)
        self._file.seek(place.offset)
        left = bytes_of(hidden)
        while left:
            count = self._file.readinto(left)  # type: ignore[attr-defined]
            if not count:
                raise StagingError(f"hidden states in {tempfile.gettempdir()} are incomplete. Check the disk")
            left = left[count:]
        return hidden
