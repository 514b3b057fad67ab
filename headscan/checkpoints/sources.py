"""Configuration and tokenizer of a model, and errors of loading."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from transformers import AutoConfig, AutoTokenizer

from headscan.checkpoints.hub import hub_options, hub_problem
from headscan.checkpoints.source_folder import check_folder
from headscan.errors import ModelLoadError

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedTokenizerBase


def load_config(source: str, revision: str | None = None, trust_remote_code: bool = False) -> PreTrainedConfig:
    """Load the configuration of a model, without its weights.

    Raises:
        ModelLoadError: There is no such model.
    """
    check_folder(source)
    options = source_options(source, revision)
    try:
        return AutoConfig.from_pretrained(source, trust_remote_code=trust_remote_code, **options)
    except Exception as problem:
        raise ModelLoadError(why_not(source, problem, options)) from problem


def load_tokenizer(
    source: str, revision: str | None = None, trust_remote_code: bool = False
) -> PreTrainedTokenizerBase | None:
    """Load the tokenizer of a model; None if it has none.

    Raises:
        ModelLoadError: The tokenizer does not load.
    """
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
            f"the tokenizer of {source} does not load: {_first_line(problem)}. Copy or download it again"
        ) from problem


def source_options(source: str, revision: str | None = None) -> dict[str, Any]:
    """Return the arguments of ``from_pretrained`` for looking up a source."""
    if Path(source).exists():
        return {"revision": revision} if revision else {}
    return hub_options(revision)


def commit_of(source: str, config: PreTrainedConfig) -> str | None:
    """Return a configuration's commit on the hub; None for a folder."""
    return None if Path(source).is_dir() else getattr(config, "_commit_hash", None)


def why_not(source: str, problem: Exception, options: Mapping[str, Any] | None = None) -> str:
    """Return an error message with a fix for a refused source.

    Args:
        options: The `source_options` of the lookup; None if there was none.
    """
    text = str(problem)
    if options and options.get("local_files_only"):
        return (
            f"no model {source!r}: there is no such folder, the cache does not hold all of it, and {hub_problem()}. "
            "Check the name or the network"
        )
    if not Path(source).exists() and ("connect" in text.lower() or "resolve" in text.lower()):
        return f"no model {source!r}: there is no such folder, and the connection to the hub failed. Try again"
    if not Path(source).exists() and (
        "not a valid model identifier" in text or "404" in text or "not a local folder" in text
    ):
        return f"no model {source!r}: not a folder, not on the hub. Check the name, or run `hf auth login`"
    if "safetensors" in text and "no file named" in text.lower():
        return f"{source} has no safetensors weights. Convert them, or pass safetensors=False"
    if "trust_remote_code" in text:
        return f"{source} needs Python code from its repository. Read that code, then pass trust_remote_code=True"
    return f"{source} does not load: {_first_line(problem)}"


def _first_line(problem: Exception) -> str:
    """Return the first line of an exception's message."""
    return (str(problem).strip().splitlines() or [type(problem).__name__])[0]
