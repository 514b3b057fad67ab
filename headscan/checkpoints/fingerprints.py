"""Hashes that identify a model."""

from __future__ import annotations

import hashlib
import json
import os
from pathlib import Path
from typing import TYPE_CHECKING

from transformers.dynamic_module_utils import get_cached_module_file, get_relative_import_files
from transformers.utils import HF_MODULES_CACHE

from headscan.checkpoints.sources import why_not
from headscan.errors import ModelLoadError

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

#: Number and size of the hashed samples of a large weight file, and hashed bytes at its start.
_SAMPLES, _SAMPLE_BYTES, _HEADER_BYTES = 1024, 64 << 10, 4 << 20

#: Keys of a configuration's ``auto_map`` whose code runs when a model is loaded for text.
_CODE_CLASSES = (
    "AutoConfig",
    "AutoModelForCausalLM",
    "AutoModelForMaskedLM",
    "AutoModelForImageTextToText",
    "AutoModelForSeq2SeqLM",
)


def config_hash(config: PreTrainedConfig) -> str:
    """Return the hash of a configuration.

    It does not depend on the path, nor on the version of transformers.
    """
    facts = config.to_dict()
    for volatile in ("_name_or_path", "transformers_version", "dtype", "torch_dtype"):
        facts.pop(volatile, None)
    return hashlib.sha256(json.dumps(facts, sort_keys=True, default=str).encode()).hexdigest()[:16]


def code_files_hash(config: PreTrainedConfig, source: str, revision: str | None = None) -> str | None:
    """Return the hash of a model's Python files; None without such files.

    The hash covers the files of the configuration and model classes and all files of the repository that they import,
    as copied into transformers' cache of modules. Tokenizers are identified by their token ids instead.

    Args:
        config: The model's configuration, loaded with ``trust_remote_code``.
        source: Its folder or hub name.
        revision: Commit on the hub; None for a folder.

    Raises:
        ModelLoadError: A file is missing, or imports a package that is not installed.
    """
    references = getattr(config, "auto_map", None) or {}
    files: set[tuple[str, bytes]] = set()
    for reference in {references[name] for name in _CODE_CLASSES if name in references}:
        # "other/repository--module.Class" names code of another repository, always at its newest commit.
        repository, _, name = reference.rpartition("--")
        module = f"{name.rpartition('.')[0]}.py"
        commit = revision if repository in ("", source) else None
        try:
            path = Path(HF_MODULES_CACHE) / get_cached_module_file(repository or source, module, revision=commit)
            paths = (path, *map(Path, get_relative_import_files(path)))
            files |= {(each.name, each.read_bytes()) for each in paths}
        except (OSError, ImportError) as problem:
            raise ModelLoadError(why_not(source, problem)) from problem
    digest = hashlib.sha256()
    for name, content in sorted(files):
        digest.update(f"{name}:{len(content)}:".encode() + content)
    return digest.hexdigest()[:16] if files else None


def weights_hash(source: str | os.PathLike[str]) -> str | None:
    """Return a hash of weights.

    It covers names, sizes, headers and samples of a folder's weight files.

    Hashing hundreds of gigabytes takes longer than loading them. A large file is represented by its header and 1,024
    evenly spaced samples of 64 KiB, which detect every changed tensor above a thousandth of the file. None for a name
    on the hub, where the revision identifies the weights.
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
