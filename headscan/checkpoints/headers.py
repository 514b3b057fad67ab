"""The headers of a checkpoint's safetensors files: what each tensor weighs, without reading one of them."""

from __future__ import annotations

import json
import math
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from huggingface_hub import get_safetensors_metadata, try_to_load_from_cache

from headscan.checkpoints.hub import hub_answers
from headscan.errors import ModelLoadError

#: The longest header that a file may have, 100 MB, as safetensors itself has it.
_LONGEST = 100_000_000

#: Names of numbers that have a fraction, and the bytes of one.
FLOATS = {"F64": 8, "F32": 4, "F16": 2, "BF16": 2}


@dataclass(frozen=True)
class SavedTensor:
    """A tensor of a checkpoint.

    Attributes:
        dtype: As safetensors names it: ``BF16``, ``F8_E4M3``, ...
        shape: Its shape.
        nbytes: What it takes in the file.
        begin: How many bytes behind the header of its file it begins.
    """

    dtype: str
    shape: tuple[int, ...]
    nbytes: int
    begin: int

    @property
    def numel(self) -> int:
        """How many numbers it holds, as far as the shape tells: packed ones count once."""
        return math.prod(self.shape)


@dataclass(frozen=True)
class FileHeader:
    """The header of one file.

    Attributes:
        nbytes: What it takes itself: the first tensor is behind it.
        tensors: The file's tensors, by name.
    """

    nbytes: int
    tensors: dict[str, SavedTensor]


def read_headers(source: str, revision: str | None = None) -> dict[str, SavedTensor]:
    """All tensors of a checkpoint by name; none where there are no safetensors files, or the hub does not answer.

    Args:
        source: A folder, or a name on the hub, of which a few kilobytes a file are fetched.
        revision: Branch, tag or commit on the hub.

    Raises:
        ModelLoadError: A file is damaged.
    """
    folder = Path(source)
    if not folder.exists():
        cached = try_to_load_from_cache(source, "config.json", revision=revision)
        folder = Path(cached).parent if isinstance(cached, str) else folder
    found: dict[str, SavedTensor] = {}
    for path in sorted(folder.glob("*.safetensors")) if folder.is_dir() else []:
        found.update(read_header(path).tensors)
    if found or Path(source).exists() or not hub_answers():
        return found
    try:
        files = get_safetensors_metadata(source, revision=revision).files_metadata.values()
    except Exception:  # no such files, no access, no network: the client raises errors of several libraries
        return {}
    return {name: _saved(vars(tensor)) for file in files for name, tensor in file.tensors.items()}


def read_header(path: Path) -> FileHeader:
    """The header of one file: its length in eight bytes, then JSON.

    Raises:
        ModelLoadError: The file is damaged.
    """
    try:
        with path.open("rb") as file:
            (length,) = struct.unpack("<Q", file.read(8))
            if length > _LONGEST:
                raise ValueError("its header is longer than 100 MB")
            entries = json.loads(file.read(length))
            tensors = {name: _saved(entry) for name, entry in entries.items() if name != "__metadata__"}
            return FileHeader(8 + length, tensors)
    except (struct.error, ValueError, KeyError, TypeError) as problem:
        raise ModelLoadError(f"{path} is no safetensors file ({problem}): copy or download it again") from problem


def _saved(entry: dict[str, Any]) -> SavedTensor:
    begin, end = entry["data_offsets"]
    return SavedTensor(entry["dtype"], tuple(entry["shape"]), end - begin, begin)
