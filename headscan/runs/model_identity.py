"""A model's identity, known before its weights are loaded, and facts that only the loaded model shows."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedTokenizerBase

from headscan.checkpoints.headers import weights_hash
from headscan.checkpoints.sources import code_files_hash, config_hash
from headscan.cluster.pool import InspectionTask
from headscan.errors import ModelLoadError, UnsupportedModelError
from headscan.grid import HeadGrid
from headscan.model_spec import ModelSpec
from headscan.models.loaded_model import LoadedModel
from headscan.models.model_facts import UNVARYING, RopeLengths, max_tokens
from headscan.sizing.model_sizes import NO_CACHE, LayerCache, find_caches


@dataclass(frozen=True)
class ModelIdentity:
    """Names and hashes of a model, known before any weight is loaded.

    Attributes:
        name: Folder name or hub name.
        revision: Commit on the hub; None for a folder.
        max_tokens: Number of positions; None if the model has no limit.
        rope_lengths: Sequence lengths at which its rotary frequencies change.
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
        if self.found_tokenizer is None:
            raise _no_tokenizer(self.name)
        return self.found_tokenizer

    def columns(self) -> dict[str, Any]:
        """Return its columns of the table ``runs``."""
        return {
            "model": self.name,
            "model_revision": self.revision,
            "model_config_hash": self.config_hash,
            "weights_hash": self.weights_hash,
            "tokenizer_hash": self.tokenizer_hash,
        }

    def fingerprint(self) -> dict[str, Any]:
        """Return the fields that decide numbers. The name is left out, because a model can be moved. The hash of the
        model's own code is left out, because a run with changed code may resume with ``resume_anyway``.
        """
        return {
            "revision": self.revision,
            "config": self.config_hash,
            "weights": self.weights_hash,
            "tokenizer": self.tokenizer_hash,
        }


def identify(spec: ModelSpec, *, need_tokenizer: bool = True) -> ModelIdentity:
    """Return the identity of a model without loading its weights."""
    config = spec.config()
    tokenizer = spec.tokenizer()
    if tokenizer is None and need_tokenizer:
        raise _no_tokenizer(spec.folder)
    folder = Path(spec.folder)
    revision = None if folder.is_dir() else getattr(config, "_commit_hash", None) or spec.revision
    return ModelIdentity(
        name=folder.resolve().name if folder.is_dir() else spec.folder,
        revision=revision,
        config_hash=config_hash(config),
        weights_hash=weights_hash(spec.folder),
        tokenizer_hash=None if tokenizer is None else _tokenizer_hash(tokenizer),
        max_tokens=max_tokens(config),
        rope_lengths=RopeLengths.of(config),
        found_tokenizer=tokenizer,
        code_files_hash=code_files_hash(config, spec.folder, revision) if spec.trust_remote_code else None,
    )


@dataclass(frozen=True)
class ModelFacts:
    """Facts that only a loaded model shows. A replica sends them to the driver.

    Attributes:
        device: Device of its token ids.
        hardware: Type and name of the devices that hold its weights, such as ``cuda (NVIDIA H200)``.
        caches: KV cache of each layer, see `headscan.sizing.model_sizes`; None if it cannot be determined.
        max_tokens: Largest number of tokens with positions; None without a limit.
    """

    dtype: str
    device: str
    hardware: str
    grid: HeadGrid
    caches: Mapping[str, Sequence[LayerCache]] | None
    max_tokens: int | None = None

    @property
    def sites(self) -> list[dict[str, Any]]:
        """Attention sites of every kind, their KV cache and their positions, as plain data."""
        sites = [site for kind in self.grid.kinds for site in self.grid.at(kind).as_dicts()]
        return [self._with_cache(site) | {"max_tokens": self.max_tokens} for site in sites]

    def _with_cache(self, site: dict[str, Any]) -> dict[str, Any]:
        if self.caches is None:
            return site
        layers = self.caches.get(site["site"], ())
        cache = layers[site["layer"]] if site["layer"] < len(layers) else NO_CACHE
        return {
            **site,
            # If a model computes its attention weights itself, only the cache shows the width of its keys.
            "head_dim": site["head_dim"] or cache.key_dim,
            "cache_heads": cache.heads,
            "cache_bytes_per_token": cache.bytes_per_token,
            "cache_tokens": cache.tokens,
        }

    @property
    def attention_path(self) -> str:
        """Hook point of attention: transformers' interface, inside the model (watched), or both."""
        reached = {site["by_interface"] for site in self.sites}
        return " and ".join(name for name, seen in (("interface", True), ("watched", False)) if seen in reached)


class _ModelFacts(InspectionTask[object, ModelFacts]):
    def __call__(self, lm: LoadedModel, item: object) -> ModelFacts:
        return ModelFacts(lm.dtype, str(lm.device), _hardware(lm), lm.grid, _caches(lm), lm.max_tokens)


model_facts = _ModelFacts()


def _caches(lm: LoadedModel) -> dict[str, tuple[LayerCache, ...]] | None:
    try:
        return find_caches(lm.model)
    except UnsupportedModelError:  # plans need the caches and raise for a run without them
        return None


def fingerprint(facts: Mapping[str, Any]) -> str:
    """Return a hash of plain data, independent of key order."""
    return hashlib.sha256(json.dumps(facts, sort_keys=True, default=str).encode()).hexdigest()[:32]


def _hardware(lm: LoadedModel) -> str:
    # Weights that are offloaded or not loaded yet are on the meta device, which is not where they run.
    devices = {lm.device, *(weight.device for weight in lm.model.parameters() if not weight.is_meta)}
    names = {f"cuda ({torch.cuda.get_device_name(each)})" if each.type == "cuda" else each.type for each in devices}
    return ", ".join(sorted(names))


def _no_tokenizer(source: str) -> ModelLoadError:
    return ModelLoadError(f"{source} has no tokenizer. Save one in the model's folder with `save_pretrained`")


def _tokenizer_hash(tokenizer: PreTrainedTokenizerBase) -> str:
    backend = getattr(tokenizer, "backend_tokenizer", None)
    text = backend.to_str() if backend is not None else json.dumps(tokenizer.get_vocab(), sort_keys=True)
    specials = json.dumps(tokenizer.special_tokens_map, sort_keys=True, default=str)
    return hashlib.sha256(f"{type(tokenizer).__name__}{specials}{text}".encode()).hexdigest()[:16]
