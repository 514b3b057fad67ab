"""Configuration and tokenizer of a model, hashes that identify it, and errors of loading."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from huggingface_hub import try_to_load_from_cache
from transformers import AutoConfig, AutoTokenizer, PreTrainedConfig, PreTrainedTokenizerBase
from transformers.dynamic_module_utils import get_cached_module_file, get_relative_import_files
from transformers.utils import HF_MODULES_CACHE

from headscan.checkpoints.headers import hub_options, hub_problem
from headscan.checkpoints.source_folder import DEMO_MODEL, SMOLLM2, check_folder
from headscan.errors import ModelLoadError, first_line


def load_config(source: str, revision: str | None = None, trust_remote_code: bool = False) -> PreTrainedConfig:
    """Load the configuration of a model, without its weights."""
    check_folder(source)
    options = source_options(source, revision)
    try:
        return AutoConfig.from_pretrained(source, trust_remote_code=trust_remote_code, **options)
    except Exception as problem:
        raise ModelLoadError(why_not(source, problem, options)) from problem


def load_tokenizer(
    source: str, revision: str | None = None, trust_remote_code: bool = False
) -> PreTrainedTokenizerBase | None:
    """Load the tokenizer of a model; None if it has none."""
    folder = Path(source)
    if folder.is_dir() and not any(folder.glob("tokenizer*")) and not any(folder.glob("vocab*")):
        return None
    options = source_options(source, revision)
    try:
        return AutoTokenizer.from_pretrained(source, trust_remote_code=trust_remote_code, **options)
    except Exception as problem:
        if "local_files_only" in options:
            raise ModelLoadError(why_not(source, problem, options)) from problem
        raise ModelLoadError(
            f"the tokenizer of {source} does not load: {first_line(problem)}. Copy or download it again"
        ) from problem


def source_options(source: str, revision: str | None = None) -> dict[str, Any]:
    """Return the arguments of ``from_pretrained`` for looking up a source."""
    if Path(source).exists():
        return {"revision": revision} if revision else {}
    return hub_options(revision)


def commit_of(source: str, revision: str | None = None) -> str | None:
    """Return the commit on the hub of a configuration that `load_config` read before; None for a folder."""
    cached = None if Path(source).exists() else try_to_load_from_cache(source, "config.json", revision=revision)
    # The cache holds each commit in a folder of its own.
    return Path(cached).parent.name if isinstance(cached, str) else None


def why_not(source: str, problem: Exception, options: Mapping[str, Any] | None = None) -> str:
    """Return an error message with a fix for a source that was refused with these `source_options`."""
    text = str(problem)
    near = "" if Path(source).exists() else _similar_name(source)
    if options and options.get("local_files_only"):
        return (
            f"no model {source!r}: there is no such folder, the cache does not hold all of it, and {hub_problem()}. "
            f"Check the name or the network{near}"
        )
    if not Path(source).exists() and ("connect" in text.lower() or "resolve" in text.lower()):
        return f"no model {source!r}: there is no such folder, and the connection to the hub failed. Try again{near}"
    if not Path(source).exists() and (
        "not a valid model identifier" in text or "404" in text or "not a local folder" in text
    ):
        return f"no model {source!r}: not a folder, not on the hub. Check the name, or run `hf auth login`{near}"
    if "file named config.json" in text and not Path(source).exists():
        return (
            f"{source} has no config.json on the hub. If it holds an adapter, download it (`hf download`) and give its "
            "folder"
        )
    if "safetensors" in text and "no file named" in text.lower():
        return f"{source} has no safetensors weights. Convert them, or pass `safetensors=False`"
    if "trust_remote_code" in text:
        return f"{source} needs Python code from its repository. Read that code, then pass `trust_remote_code=True`"
    damaged = "No such file" in text or "deserializing header" in text
    fix = ". Copy or download it again" if damaged and Path(source).exists() else ""
    return f"{source} does not load: {first_line(problem)}{fix}"


def _similar_name(source: str) -> str:
    """Return a question with the bundled or packaged model whose name is similar, or nothing."""
    near = get_close_matches(source, (DEMO_MODEL, SMOLLM2), n=1)
    return f"; did you mean {near[0]}?" if near else ""


#: Keys of a configuration's ``auto_map`` whose code runs when a model is loaded for text.
_CODE_CLASSES = (
    "AutoConfig",
    "AutoModelForCausalLM",
    "AutoModelForMaskedLM",
    "AutoModelForImageTextToText",
    "AutoModelForSeq2SeqLM",
    "AutoModelForSequenceClassification",
    "AutoModel",
)


def config_hash(config: PreTrainedConfig) -> str:
    """Return the hash of a configuration, which depends neither on the path nor on the version of transformers."""
    facts = config.to_dict()
    for volatile in ("_name_or_path", "transformers_version", "dtype", "torch_dtype"):
        facts.pop(volatile, None)
    _set_defaults(facts)
    return hashlib.sha256(json.dumps(facts, sort_keys=True, default=str).encode()).hexdigest()[:16]


def _set_defaults(facts: dict[str, Any]) -> None:
    """Give settings that change no number their default, in nested configurations too. Their names stay, because stored
    hashes have them.
    """
    for name, value in facts.items():
        if name == "use_cache":
            facts[name] = True
        elif isinstance(value, dict):
            _set_defaults(value)


def code_files_hash(config: PreTrainedConfig, source: str, revision: str | None = None) -> str | None:
    """Return the hash of a model's Python files; None without such files.

    The hash covers the files of the configuration and model classes and all files of the repository that they import,
    as copied into transformers' cache of modules. Tokenizers are identified by their token ids instead.
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
