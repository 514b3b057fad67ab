"""Reading single tensors of a checkpoint, into anonymous memory maps.

The heap keeps holes of freed tensors. A map is unmapped as soon as its tensor is freed, so that a range of weights
can replace another in the same memory.
"""

from __future__ import annotations

import json
import math
import mmap
from collections.abc import Callable, Iterable, Mapping
from io import FileIO
from itertools import groupby
from pathlib import Path

import torch
from torch import Tensor
from transformers.utils import SAFE_WEIGHTS_INDEX_NAME, SAFE_WEIGHTS_NAME, cached_file

from headscan.checkpoints.headers import FileHeader, read_header
from headscan.checkpoints.sources import source_options
from headscan.errors import ModelLoadError

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


#: Dtypes of weights, by name in safetensors.
_DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}


def tensor_files(source: str, revision: str | None = None) -> dict[str, Path]:
    """Return the safetensors file of each tensor of a checkpoint.

    Args:
        source: A folder saved by transformers, or a name on the hub, whose missing files are downloaded.
        revision: Branch, tag or commit on the hub.
    """
    if index := _find(source, SAFE_WEIGHTS_INDEX_NAME, revision):
        names: Mapping[str, str] = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
        paths = {name: _find(source, name, revision) for name in set(names.values())}
        if lacking := sorted(name for name, path in paths.items() if path is None):
            raise ModelLoadError(f"{source} lacks {lacking[0]}, which its index names. Copy or download it again")
        return {tensor: path for tensor, name in names.items() if (path := paths[name]) is not None}
    if whole := _find(source, SAFE_WEIGHTS_NAME, revision):
        return dict.fromkeys(read_header(whole).tensors, whole)
    raise ModelLoadError(
        f"{source} has no safetensors weights, and others cannot be read layer by layer. Convert them with "
        "save_pretrained, or choose placement whole"
    )


def read_tensors(
    files: Mapping[str, Path], names: Iterable[str], keep: Callable[[str, Tensor], Tensor]
) -> dict[str, Tensor]:
    """Read tensors of a checkpoint into memory. They are not views of a mapped file: the system may drop and read the
    pages of a view again at any time.

    Args:
        files: The result of `tensor_files`.
        names: The tensors to read.
        keep: Takes a name and a tensor and returns the tensor to keep, in another dtype or on another device. The
            original is freed before the next one is read.
    """
    found: dict[str, Tensor] = {}
    for path, of_file in groupby(sorted(names, key=lambda name: (files[name], name)), key=files.__getitem__):
        header = read_header(path)
        try:
            with path.open("rb", buffering=0) as file:
                for name in of_file:
                    found[name] = keep(name, _read(file, header, name))
        except (OSError, EOFError, KeyError) as problem:
            raise ModelLoadError(f"{path} cannot be read: {problem}. Copy or download it again") from problem
    return found


def _read(file: FileIO, header: FileHeader, name: str) -> Tensor:
    """Read one tensor; other threads run meanwhile."""
    saved = header.tensors[name]
    tensor = empty_mmap(saved.shape, _DTYPES[saved.dtype])
    if tensor.nbytes:
        left = bytes_of(tensor)
        file.seek(header.nbytes + saved.begin)
        while left:
            count = file.readinto(left)
            if not count:
                raise EOFError(f"it ends in {name}")
            left = left[count:]
    return tensor


def _find(source: str, name: str, revision: str | None) -> Path | None:
    found = cached_file(source, name, _raise_exceptions_for_missing_entries=False, **source_options(source, revision))
    return None if found is None else Path(found)
