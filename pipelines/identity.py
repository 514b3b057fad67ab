"""What a run is made of: the model, the tokenizer and the software, as hashes and names."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any

import headscan
from cluster.pool import ModelSpec
from cluster.staged import Question
from headscan.errors import ModelLoadError
from headscan.grid import HeadGrid
from headscan.hashes import config_hash, weights_hash
from headscan.loaded_model import LoadedModel
from headscan.positions import max_tokens
from headscan.sources import load_config, load_tokenizer

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_PACKAGES = ("torch", "transformers", "accelerate", "ray", "datasets", "lm-eval", "duckdb", "numpy")


@dataclass(frozen=True)
class ModelIdentity:
    """A model as the driver knows it, before any weight is loaded.

    Attributes:
        name: Folder name or hub name, for people.
        revision: Commit on the hub, or None.
        config_hash, weights_hash, tokenizer_hash: What tells this model from another.
        max_tokens: Positions, or None where the model names no limit.
        found_tokenizer: Its tokenizer, or None where there is none.
    """

    name: str
    revision: str | None
    config_hash: str
    weights_hash: str | None
    tokenizer_hash: str | None
    max_tokens: int | None
    found_tokenizer: PreTrainedTokenizerBase | None

    @property
    def tokenizer(self) -> PreTrainedTokenizerBase:
        """The tokenizer.

        Raises:
            ModelLoadError: There is none.
        """
        if self.found_tokenizer is None:
            raise _no_tokenizer(self.name)
        return self.found_tokenizer

    def columns(self) -> dict[str, Any]:
        """Its columns in the table ``runs``."""
        return {
            "model": self.name,
            "model_revision": self.revision,
            "model_config_hash": self.config_hash,
            "weights_hash": self.weights_hash,
            "tokenizer_hash": self.tokenizer_hash,
        }

    def fingerprint(self) -> dict[str, Any]:
        """What of it decides numbers; not the name, for the same model may lie elsewhere."""
        return {
            "revision": self.revision,
            "config": self.config_hash,
            "weights": self.weights_hash,
            "tokenizer": self.tokenizer_hash,
        }


def same_model(run: Mapping[str, Any], other: Mapping[str, Any]) -> bool:
    """Whether two rows of the table ``runs`` are of one model; by name where no hash of the weights tells."""
    keys = ["model_config_hash", "weights_hash", "model_revision"]
    if run["weights_hash"] is None:
        keys.append("model")
    return all(run[key] == other[key] for key in keys)


def identify(spec: ModelSpec, *, need_tokenizer: bool = True) -> ModelIdentity:
    """Look at a model without loading its weights.

    Raises:
        ModelLoadError: No such model, or it has no tokenizer and needs one.
    """
    config = load_config(spec.source, spec.revision, spec.trust_remote_code)
    tokenizer = load_tokenizer(spec.source, spec.revision, spec.trust_remote_code)
    if tokenizer is None and need_tokenizer:
        raise _no_tokenizer(spec.source)
    folder = Path(spec.source)
    return ModelIdentity(
        name=folder.resolve().name if folder.is_dir() else spec.source,
        revision=None if folder.is_dir() else getattr(config, "_commit_hash", None) or spec.revision,
        config_hash=config_hash(config),
        weights_hash=weights_hash(spec.source),
        tokenizer_hash=None if tokenizer is None else _tokenizer_hash(tokenizer),
        max_tokens=max_tokens(config),
        found_tokenizer=tokenizer,
    )


@dataclass(frozen=True)
class ModelFacts:
    """What only a loaded model tells: sent from a replica to the driver."""

    dtype: str
    device: str
    grid: HeadGrid

    @property
    def sites(self) -> list[dict[str, Any]]:
        """The attentions of every kind of site, as plain data."""
        return [site for kind in self.grid.kinds for site in self.grid.at(kind).as_dicts()]

    @property
    def attention_path(self) -> str:
        """How attention is reached: by transformers' interface, watched inside the model, or both."""
        reached = {site["by_interface"] for site in self.sites}
        return " and ".join(name for name, found in (("interface", True), ("watched", False)) if found in reached)


class _ModelFacts(Question[object, ModelFacts]):
    """A pool task: describe the replica's model."""

    def __call__(self, lm: LoadedModel, item: object) -> ModelFacts:
        return ModelFacts(lm.dtype, str(lm.device), lm.grid)


model_facts = _ModelFacts("model_facts")


def fingerprint(facts: Mapping[str, Any]) -> str:
    """Hash of plain data, whatever the order of its keys."""
    return hashlib.sha256(json.dumps(facts, sort_keys=True, default=str).encode()).hexdigest()[:32]


def package_versions() -> dict[str, str]:
    """Versions of the packages that decide numbers."""
    versions = {}
    for name in _PACKAGES:
        try:
            versions[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return versions


def code_version() -> str:
    """Version of this software."""
    return headscan.__version__


def _no_tokenizer(source: str) -> ModelLoadError:
    return ModelLoadError(f"{source} has no tokenizer: save one beside the model, as transformers does")


def _tokenizer_hash(tokenizer: PreTrainedTokenizerBase) -> str:
    backend = getattr(tokenizer, "backend_tokenizer", None)
    text = backend.to_str() if backend is not None else json.dumps(tokenizer.get_vocab(), sort_keys=True)
    specials = json.dumps(tokenizer.special_tokens_map, sort_keys=True, default=str)
    return hashlib.sha256(f"{type(tokenizer).__name__}{specials}{text}".encode()).hexdigest()[:16]
