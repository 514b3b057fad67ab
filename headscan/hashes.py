"""Hashes that tell one model from another."""

from __future__ import annotations

import hashlib
import json
import os
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

#: How much of a large weight file is hashed.
_SAMPLES, _SAMPLE_BYTES, _HEADER_BYTES = 1024, 64 << 10, 4 << 20


def config_hash(config: PreTrainedConfig) -> str:
    """Hash of a configuration, the same wherever and with whatever version it was loaded."""
    facts = config.to_dict()
    for volatile in ("_name_or_path", "transformers_version", "dtype", "torch_dtype"):
        facts.pop(volatile, None)
    return hashlib.sha256(json.dumps(facts, sort_keys=True, default=str).encode()).hexdigest()[:16]


def weights_hash(source: str | os.PathLike[str]) -> str | None:
    """Hash that tells one set of weights from another: names, sizes, headers and samples of a folder's weight files.

    Hashing hundreds of gigabytes would take longer than loading them, so of a large file 1,024 evenly spaced samples of
    64 KiB count beside its header: a changed tensor of more than a thousandth of the file is always seen. None for a
    name on the hub, where the revision tells.
    """
    if not (folder := Path(source)).is_dir():
        return None
    digest = hashlib.sha256()
    for path in sorted(folder.glob("*.safetensors")) or sorted(folder.glob("*.bin")):
        size = path.stat().st_size
        digest.update(f"{path.name}:{size}".encode())
        with path.open("rb") as file:
            if size <= _SAMPLES * _SAMPLE_BYTES:
                digest.update(file.read())
                continue
            digest.update(file.read(_HEADER_BYTES))
            for sample in range(_SAMPLES):
                file.seek(sample * (size - _SAMPLE_BYTES) // (_SAMPLES - 1))
                digest.update(file.read(_SAMPLE_BYTES))
    return digest.hexdigest()[:16]
