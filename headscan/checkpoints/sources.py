"""What stands beside a model's weights, in a folder or on the hub, and why a source may not load."""

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
    """The configuration of a model, without its weights.

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
    """The tokenizer beside a model, or None where there is none.

    Raises:
        ModelLoadError: There is one, and it does not load.
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
        raise ModelLoadError(f"the tokenizer of {source} does not load: {_first_line(problem)}") from problem


def source_options(source: str, revision: str | None = None) -> dict[str, Any]:
    """The arguments of ``from_pretrained`` that say where to look a source up; a folder is never looked up."""
    if Path(source).exists():
        return {"revision": revision} if revision else {}
    return hub_options(revision)


def commit_of(source: str, config: PreTrainedConfig) -> str | None:
    """The commit on the hub that a configuration came from; None for a folder."""
    return None if Path(source).is_dir() else getattr(config, "_commit_hash", None)


def why_not(source: str, problem: Exception, options: Mapping[str, Any] | None = None) -> str:
    """What transformers' refusal of a source means, and what its user can do.

    Args:
        options: The `source_options` with which it was looked up.
    """
    text = str(problem)
    if options and options.get("local_files_only"):
        return (
            f"no model {source!r}: there is no such folder, the cache does not hold all of it, and {hub_problem()}; "
            "check the name or the network"
        )
    if not Path(source).exists() and ("connect" in text.lower() or "resolve" in text.lower()):
        return f"no model {source!r}: there is no such folder, and the hub broke off; run the same command again"
    if not Path(source).exists() and (
        "not a valid model identifier" in text or "404" in text or "not a local folder" in text
    ):
        return f"no model {source!r}: neither a folder nor a name on the hub (a private one needs `hf auth login`)"
    if "safetensors" in text and "no file named" in text.lower():
        return f"{source} has no safetensors weights: convert them, or allow others with --pickled-weights"
    if "trust_remote_code" in text:
        return f"{source} brings Python code of its own: read it, then allow it with --trust-remote-code"
    return f"{source} does not load: {_first_line(problem)}"


def _first_line(problem: Exception) -> str:
    """An exception in one line."""
    return (str(problem).strip().splitlines() or [type(problem).__name__])[0]
