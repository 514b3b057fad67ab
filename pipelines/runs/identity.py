"""What a run is made of: the model, the tokenizer and the software, as hashes and names."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from headscan.checkpoints.fingerprints import code_files_hash, config_hash, weights_hash
from headscan.checkpoints.sources import load_config, load_tokenizer
from headscan.cluster.tasks.staged_task import Question
from headscan.errors import ModelLoadError, UnsupportedModelError
from headscan.grid import HeadGrid
from headscan.model_spec import ModelSpec
from headscan.models.loaded_model import LoadedModel
from headscan.models.positions import max_tokens
from headscan.models.rope import UNVARYING, RopeLengths
from headscan.sizing.kv_cache import NO_CACHE, LayerCache, find_caches

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


@dataclass(frozen=True)
class ModelIdentity:
    """A model as the driver knows it, before any weight is loaded.

    Attributes:
        name: Folder name or hub name, for people.
        revision: Commit on the hub, or None.
        config_hash, weights_hash, tokenizer_hash: What tells this model from another.
        max_tokens: Positions, or None where the model names no limit.
        found_tokenizer: Its tokenizer, or None where there is none.
        rope_lengths: The sequence lengths at which its rotary frequencies change.
        code_files_hash: Hash of the Python files that come with it; None if it runs transformers' own code.
    """

    name: str
    revision: str | None
    config_hash: str
    weights_hash: str | None
    tokenizer_hash: str | None
    max_tokens: int | None
    found_tokenizer: PreTrainedTokenizerBase | None
    rope_lengths: RopeLengths = UNVARYING
    code_files_hash: str | None = None

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
        """What of it decides numbers; not the name, for the same model may lie elsewhere.

        A run whose model brings other code files is the same run: it resumes only where the user confirms it.
        """
        return {
            "revision": self.revision,
            "config": self.config_hash,
            "weights": self.weights_hash,
            "tokenizer": self.tokenizer_hash,
        }


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
    revision = None if folder.is_dir() else getattr(config, "_commit_hash", None) or spec.revision
    return ModelIdentity(
        name=folder.resolve().name if folder.is_dir() else spec.source,
        revision=revision,
        config_hash=config_hash(config),
        weights_hash=weights_hash(spec.source),
        tokenizer_hash=None if tokenizer is None else _tokenizer_hash(tokenizer),
        max_tokens=max_tokens(config),
        rope_lengths=RopeLengths.of(config),
        found_tokenizer=tokenizer,
        code_files_hash=code_files_hash(config, spec.source, revision) if spec.trust_remote_code else None,
    )


@dataclass(frozen=True)
class ModelFacts:
    """What only a loaded model shows: sent from a replica to the driver.

    Attributes:
        dtype: Of its weights.
        device: Where token ids go.
        hardware: Kind and name of the devices that hold its weights, such as ``cuda (NVIDIA H200)``.
        grid: Where its heads are.
        caches: What each layer caches, see `kv_cache.find_caches`; None where that cannot be found.
    """

    dtype: str
    device: str
    hardware: str
    grid: HeadGrid
    caches: Mapping[str, Sequence[LayerCache]] | None

    @property
    def sites(self) -> list[dict[str, Any]]:
        """The attentions of every kind of site and what they cache, as plain data."""
        return [self._with_cache(site) for kind in self.grid.kinds for site in self.grid.at(kind).as_dicts()]

    def _with_cache(self, site: dict[str, Any]) -> dict[str, Any]:
        if self.caches is None:
            return site
        layers = self.caches.get(site["site"], ())
        cache = layers[site["layer"]] if site["layer"] < len(layers) else NO_CACHE
        return {
            **site,
            # Of a model that computes its attention weights itself, the keys are seen in the cache alone.
            "head_dim": site["head_dim"] or cache.key_dim,
            "cache_heads": cache.heads,
            "cache_bytes_per_token": cache.bytes_per_token,
            "cache_tokens": cache.tokens,
        }

    @property
    def attention_path(self) -> str:
        """How attention is reached: by transformers' interface, watched inside the model, or both."""
        reached = {site["by_interface"] for site in self.sites}
        return " and ".join(name for name, found in (("interface", True), ("watched", False)) if found in reached)


class _ModelFacts(Question[object, ModelFacts]):
    """A pool task: describe the replica's model."""

    def __call__(self, lm: LoadedModel, item: object) -> ModelFacts:
        return ModelFacts(lm.dtype, str(lm.device), _hardware(lm), lm.grid, _caches(lm))


model_facts = _ModelFacts("model_facts")


def _caches(lm: LoadedModel) -> dict[str, tuple[LayerCache, ...]] | None:
    try:
        return find_caches(lm.model)
    except UnsupportedModelError:  # plans need them, and refuse a run without
        return None


def fingerprint(facts: Mapping[str, Any]) -> str:
    """Hash of plain data, whatever the order of its keys."""
    return hashlib.sha256(json.dumps(facts, sort_keys=True, default=str).encode()).hexdigest()[:32]


def _hardware(lm: LoadedModel) -> str:
    # Weights that accelerate offloads, or that are not loaded yet, are on the meta device and run elsewhere.
    devices = {lm.device, *(weight.device for weight in lm.model.parameters() if not weight.is_meta)}
    return ", ".join(sorted({_device_name(device) for device in devices}))


def _device_name(device: torch.device) -> str:
    return f"cuda ({torch.cuda.get_device_name(device)})" if device.type == "cuda" else device.type


def _no_tokenizer(source: str) -> ModelLoadError:
    return ModelLoadError(f"{source} has no tokenizer: save one beside the model, as transformers does")


def _tokenizer_hash(tokenizer: PreTrainedTokenizerBase) -> str:
    backend = getattr(tokenizer, "backend_tokenizer", None)
    text = backend.to_str() if backend is not None else json.dumps(tokenizer.get_vocab(), sort_keys=True)
    specials = json.dumps(tokenizer.special_tokens_map, sort_keys=True, default=str)
    return hashlib.sha256(f"{type(tokenizer).__name__}{specials}{text}".encode()).hexdigest()[:16]
