"""The headers of a checkpoint's safetensors files.

A header has the dtype, shape and bytes of each tensor, without its numbers.
"""

from __future__ import annotations

import json
import logging
import math
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from huggingface_hub import get_safetensors_metadata, try_to_load_from_cache
from huggingface_hub.errors import (
    EntryNotFoundError,
    HfHubHTTPError,
    NotASafetensorsRepoError,
    SafetensorsParsingError,
)

from headscan.checkpoints.hub import hub_answers
from headscan.errors import ModelLoadError

_log = logging.getLogger("headscan")

#: Errors of the hub's client: its own, and those of its HTTP library, which differs between versions. The bases of
#: ``HfHubHTTPError`` name that library's base class.
_HUB_ERRORS: tuple[type[Exception], ...] = (
    *cast("tuple[type[Exception], ...]", HfHubHTTPError.__bases__),
    EntryNotFoundError,
    SafetensorsParsingError,
    ValueError,
)

#: Longest header of a file in bytes; safetensors has the same limit.
_LONGEST = 100_000_000

#: Bytes of a floating-point number, by name of its dtype.
FLOATS = {"F64": 8, "F32": 4, "F16": 2, "BF16": 2}


@dataclass(frozen=True)
class SavedTensor:
    """A tensor of a checkpoint.

    Attributes:
        dtype: Name in safetensors: ``BF16``, ``F8_E4M3``, ...
        shape: Its shape.
        nbytes: Bytes in the file.
        begin: Offset in bytes behind the header of its file.
    """

    dtype: str
    shape: tuple[int, ...]
    nbytes: int
    begin: int

    @property
    def numel(self) -> int:
        """Number of elements of the shape.

        An element that packs several quantised numbers counts once.
        """
        return math.prod(self.shape)


@dataclass(frozen=True)
class FileHeader:
    """The header of one file.

    Attributes:
        nbytes: Bytes of the header; the first tensor follows it.
        tensors: The file's tensors, by name.
    """

    nbytes: int
    tensors: dict[str, SavedTensor]


def read_headers(source: str, revision: str | None = None) -> dict[str, SavedTensor]:
    """Return all tensors of a checkpoint by name.

    The result is empty without safetensors files, or if the hub does not answer.

    Args:
        source: A folder, or a name on the hub; a few kilobytes a file are downloaded.
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
    except NotASafetensorsRepoError:
        return {}
    except _HUB_ERRORS as problem:
        _log.warning("cannot read the tensor headers of %s from the hub: %s", source, problem)
        return {}
    return {name: _saved(vars(tensor)) for file in files for name, tensor in file.tensors.items()}


def read_header(path: Path) -> FileHeader:
    """Read the header of one file.

    It consists of its length in eight bytes, followed by JSON.

    Raises:
        ModelLoadError: The file is damaged.
    """
    try:
        with path.open("rb") as file:
            (length,) = struct.unpack("<Q", file.read(8))
            if length > _LONGEST:
                raise ValueError(f"header of {length} bytes, limit {_LONGEST}")
            entries = json.loads(file.read(length))
            tensors = {name: _saved(entry) for name, entry in entries.items() if name != "__metadata__"}
            return FileHeader(8 + length, tensors)
    except (struct.error, ValueError, KeyError, TypeError) as problem:
        raise ModelLoadError(f"{path} is not a safetensors file: {problem}. Copy or download it again") from problem


def _saved(entry: dict[str, Any]) -> SavedTensor:
    begin, end = entry["data_offsets"]
    return SavedTensor(entry["dtype"], tuple(entry["shape"]), end - begin, begin)
