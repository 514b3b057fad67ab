"""Whether the hub answers, headers of safetensors files, and the hash of a model's weights.

A header has the dtype, shape and bytes of each tensor, without its numbers.
"""

from __future__ import annotations

import hashlib
import json
import logging
import math
import os
import ssl
import struct
from dataclasses import dataclass
from functools import lru_cache
from http.client import HTTPException
from pathlib import Path
from threading import Thread
from time import monotonic
from typing import Any, cast
from urllib.error import HTTPError, URLError
from urllib.request import Request, urlopen

from huggingface_hub import constants, get_safetensors_metadata, is_offline_mode, try_to_load_from_cache
from huggingface_hub.errors import EntryNotFoundError, HfHubHTTPError, NotASafetensorsRepoError, SafetensorsParsingError

from headscan.errors import ModelLoadError, first_line

_log = logging.getLogger("headscan")

#: Seconds without an answer after which a warning is logged.
_PATIENCE = 3.0
#: Seconds for which the result is cached.
_REMEMBERED = 300.0
#: Status codes of gateways that cannot reach the hub.
_NO_ANSWER = (502, 503, 504)


def hub_options(revision: str | None = None) -> dict[str, Any]:
    """Return the arguments for looking up a hub name, in the cache alone if the hub does not answer.

    Without a network the hub's client retries every request for half a minute, and waits as long for a hub that accepts
    the connection and sends nothing.
    """
    return ({"revision": revision} if revision else {}) | ({} if hub_answers() else {"local_files_only": True})


def hub_answers() -> bool:
    """Return True if the hub answers, with any status but a gateway error, and the client is online. The request takes
    at most ``HF_HUB_ETAG_TIMEOUT`` seconds (default 10); a warning is logged after 3 seconds.
    """
    return not is_offline_mode() and _answers(constants.ENDPOINT, int(monotonic() / _REMEMBERED))


def hub_problem() -> str:
    """Return why the hub is not used, for error messages."""
    if is_offline_mode():
        return "HF_HUB_OFFLINE is set"
    return f"the hub ({constants.ENDPOINT}) does not answer"


@lru_cache(maxsize=1)
def _answers(endpoint: str, period: int) -> bool:
    """Return whether a hub answers, cached for a period of time."""
    limit = float(constants.HF_HUB_ETAG_TIMEOUT)
    answers: list[bool] = []
    # A thread bounds the time: looking up the host's name has no timeout, and a socket's timeout is per address.
    asking = Thread(target=lambda: answers.append(_ask(endpoint, limit)), daemon=True)
    asking.start()
    asking.join(min(_PATIENCE, limit))
    if asking.is_alive():
        _log.warning("waiting up to %g s for the hub (%s) to answer", limit, endpoint)
        asking.join(limit - min(_PATIENCE, limit))
    return any(answers)


def _ask(endpoint: str, timeout: float) -> bool:
    try:
        with urlopen(Request(endpoint, method="HEAD"), timeout=timeout):
            return True
    except HTTPError as error:
        return error.code not in _NO_ANSWER
    except URLError as error:
        # The hub's client may use other certificates.
        return isinstance(error.reason, ssl.SSLError)
    except (OSError, HTTPException):
        return False


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

#: Number and size of the hashed samples of a large weight file, and hashed bytes at its start.
_SAMPLES, _SAMPLE_BYTES, _HEADER_BYTES = 1024, 64 << 10, 4 << 20
#: Bytes of a floating-point number, by name of its dtype.
FLOATS = {"F64": 8, "F32": 4, "F16": 2, "BF16": 2}


@dataclass(frozen=True)
class SavedTensor:
    """A tensor of a checkpoint, with its offset in bytes behind the header of its file."""

    dtype: str
    shape: tuple[int, ...]
    nbytes: int
    begin: int

    @property
    def numel(self) -> int:
        """Number of elements of the shape. An element that packs several quantised numbers counts once."""
        return math.prod(self.shape)


@dataclass(frozen=True)
class FileHeader:
    """The header of one file: its bytes, which the first tensor follows, and the file's tensors by name."""

    nbytes: int
    tensors: dict[str, SavedTensor]


def read_headers(source: str, revision: str | None = None) -> dict[str, SavedTensor]:
    """Return all tensors of a folder or hub name by name; empty without safetensors files, or if the hub is silent."""
    folder = Path(source)
    if not folder.exists():
        cached = try_to_load_from_cache(source, "config.json", revision=revision)
        folder = Path(cached).parent if isinstance(cached, str) else folder
    tensors: dict[str, SavedTensor] = {}
    for path in sorted(folder.glob("*.safetensors")) if folder.is_dir() else []:
        tensors.update(read_header(path).tensors)
    if tensors or Path(source).exists() or not hub_answers():
        return tensors
    try:
        files = get_safetensors_metadata(source, revision=revision).files_metadata.values()
    except NotASafetensorsRepoError:
        return {}
    except _HUB_ERRORS as problem:
        _log.warning("cannot read the tensor headers of %s from the hub: %s", source, problem)
        return {}
    return {name: _saved(vars(tensor)) for file in files for name, tensor in file.tensors.items()}


def read_header(path: Path) -> FileHeader:
    """Read the header of one file: eight bytes with its length, followed by JSON."""
    try:
        with path.open("rb") as file:
            (length,) = struct.unpack("<Q", file.read(8))
            if length > _LONGEST:
                raise ValueError(f"header of {length} bytes, limit {_LONGEST}")
            entries = json.loads(file.read(length))
            tensors = {name: _saved(entry) for name, entry in entries.items() if name != "__metadata__"}
            return FileHeader(8 + length, tensors)
    except (struct.error, ValueError, KeyError, TypeError) as problem:
        raise ModelLoadError(
            f"{path} is not a safetensors file: {first_line(problem)}. Copy or download it again"
        ) from problem


def _saved(entry: dict[str, Any]) -> SavedTensor:
    begin, end = entry["data_offsets"]
    return SavedTensor(entry["dtype"], tuple(entry["shape"]), end - begin, begin)


def weights_hash(source: str | os.PathLike[str]) -> str | None:
    """Return a hash of a folder's weights by names, sizes, headers and samples; None for a name on the hub.

    A large file is represented by its header and 1,024 evenly spaced samples of 64 KiB, which detect every changed
    tensor above a thousandth of the file: hashing hundreds of gigabytes takes longer than loading them.
    """
    if not (folder := Path(source)).is_dir():
        return None
    digest = hashlib.sha256()
    for path in sorted(folder.glob("*.safetensors")) or sorted(folder.glob("*.bin")):
        digest.update(f"{path.name}:{path.stat().st_size}".encode())
        update_with_samples(digest, path)
    return digest.hexdigest()[:16]


def update_with_samples(digest: hashlib._Hash, path: Path) -> None:
    """Add a file's contents to a hash; of a large file its start and evenly spaced samples."""
    size = path.stat().st_size
    with path.open("rb") as file:
        if size <= _SAMPLES * _SAMPLE_BYTES:
            digest.update(file.read())
            return
        digest.update(file.read(_HEADER_BYTES))
        for sample in range(_SAMPLES):
            file.seek(sample * (size - _SAMPLE_BYTES) // (_SAMPLES - 1))
            digest.update(file.read(_SAMPLE_BYTES))
