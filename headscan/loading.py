"""Loading a model with its tokenizer and its head grid, from a folder or the hub."""

from __future__ import annotations

import copy
import hashlib
import json
import os
import shutil
import tempfile
import weakref
from collections import defaultdict
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    AutoModelForMaskedLM,
    AutoModelForSeq2SeqLM,
    AutoTokenizer,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

from headscan.discovery import discover
from headscan.errors import InterventionError, ModelLoadError
from headscan.grid import HeadGrid
from headscan.inputs import input_device
from headscan.layout import Device, Sharding
from headscan.memory import MemoryLimit

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

#: How much of a large weight file is hashed.
_SAMPLES, _SAMPLE_BYTES, _HEADER_BYTES = 1024, 64 << 10, 4 << 20

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16, "float64": torch.float64}


@dataclass(frozen=True)
class LoadedModel:
    """A model that can be measured.

    Attributes:
        model: The transformers model, in evaluation mode.
        tokenizer: Its tokenizer, or None where the source has none.
        grid: Where its heads are.
        source: Folder or hub name it came from.
        revision: Commit on the hub, or None for a folder.
        limits: By kind of work, what ran out of memory on this model's devices.
    """

    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase | None
    grid: HeadGrid
    source: str
    revision: str | None = None
    limits: defaultdict[str, MemoryLimit] = field(
        default_factory=lambda: defaultdict(MemoryLimit), compare=False, repr=False, kw_only=True
    )

    @property
    def device(self) -> torch.device:
        """Where token ids go."""
        return input_device(self.model)

    @property
    def dtype(self) -> str:
        """Name of the weights' dtype."""
        return str(self.model.dtype).removeprefix("torch.")

    @property
    def max_tokens(self) -> int | None:
        """Tokens the model has positions for, or None where it names no limit."""
        return _usable_positions(self.model)

    @property
    def vocab_size(self) -> int:
        """Token ids the model knows."""
        embeddings: Any = self.model.get_input_embeddings()
        return int(embeddings.weight.shape[0])

    @property
    def is_encoder_decoder(self) -> bool:
        """Whether an encoder's tokens are read by a decoder."""
        return bool(self.model.config.is_encoder_decoder)

    def at(self, kind: str) -> LoadedModel:
        """The same model looked at by another kind of site: ``self``, ``encoder`` or ``cross``.

        Raises:
            HeadIndexError: The model has no such sites.
        """
        return replace(self, grid=self.grid.at(kind))

    def end_of_sequence(self, ids: Tensor) -> Tensor:
        """Which ids end a sequence: bool, shaped like ``ids``."""
        known = getattr(self.model.config.get_text_config(), "eos_token_id", None)
        ends = [] if known is None else known if isinstance(known, list) else [known]
        return torch.isin(ids, torch.tensor(ends, dtype=ids.dtype, device=ids.device))

    def module(self, path: str) -> nn.Module:
        """A module of the model by its name."""
        return self.model.get_submodule(path)

    def require_tokenizer(self) -> PreTrainedTokenizerBase:
        """The tokenizer.

        Raises:
            ModelLoadError: The source has none.
        """
        if self.tokenizer is None:
            raise ModelLoadError(f"{self.source} has no tokenizer: save one beside the model, as transformers does")
        return self.tokenizer


def load(
    source: str | os.PathLike[str],
    *,
    device: str | Sharding = "auto",
    dtype: str = "auto",
    revision: str | None = None,
    trust_remote_code: bool = False,
    safetensors: bool = True,
) -> LoadedModel:
    """Load a decoder, the text backbone of a multimodal model, an encoder or an encoder-decoder.

    Args:
        source: A folder saved by transformers, or a name on the hub.
        device: ``cpu``, ``cuda``, ``cuda:1``, ...; ``auto``: accelerate places the layers on the GPUs there are and,
            where they do not suffice, on the CPU; a `Sharding` says which layers go where, RAM and disk included.
        dtype: ``float32``, ``bfloat16``, ``float16``, ``float64``; ``auto``: as the checkpoint is saved.
        revision: Branch, tag or commit on the hub.
        trust_remote_code: Allow Python code that comes with the model to run.
        safetensors: Refuse pickled weights.

    Raises:
        ModelLoadError: Missing, incomplete or not a model of text.
        UnsupportedModelError: Its heads cannot be measured rightly.
    """
    source = os.fspath(source)
    check_device(device)
    check_dtype(dtype)
    config = load_config(source, revision, trust_remote_code)
    model = read_model(
        source,
        config,
        _device_map(device, config, source, trust_remote_code),
        dtype=dtype,
        revision=revision,
        trust_remote_code=trust_remote_code,
        safetensors=safetensors,
    )
    tokenizer = load_tokenizer(source, revision, trust_remote_code)
    return LoadedModel(model, tokenizer, discover(model), source, commit_of(source, config))


def read_model(
    source: str,
    config: PreTrainedConfig,
    device_map: str | dict[str, Device],
    *,
    dtype: str = "auto",
    revision: str | None = None,
    trust_remote_code: bool = False,
    safetensors: bool = True,
) -> PreTrainedModel:
    """The model that `load` loads, before its heads are looked for.

    Args:
        config: Its configuration.
        device_map: Accelerate's. Onto ``meta`` nothing is read of the checkpoint but the headers of its files: the
            model comes without weights, and what the checkpoint lacks is told all the same.
        source, dtype, revision, trust_remote_code, safetensors: As for `load`.

    Raises:
        ModelLoadError: Missing, incomplete or not a model of text.
    """
    auto = _auto_class(config, source, trust_remote_code)
    # What transformers cannot read from the checkpoint as it is, it writes here first.
    to_disk = isinstance(device_map, dict) and "disk" in device_map.values()
    offload = Path(tempfile.mkdtemp(prefix="headscan-offload-")) if to_disk else None
    try:
        model, report = auto.from_pretrained(
            source,
            config=config,
            dtype=check_dtype(dtype),
            device_map=device_map,
            offload_folder=offload,
            trust_remote_code=trust_remote_code,
            use_safetensors=True if safetensors else None,
            output_loading_info=True,
            **({"revision": revision} if revision else {}),
        )
    except Exception as problem:
        if offload is not None:
            shutil.rmtree(offload, ignore_errors=True)
        raise ModelLoadError(_why(source, problem)) from problem
    if offload is not None:
        weakref.finalize(model, shutil.rmtree, offload, ignore_errors=True)
    if missing := sorted(report["missing_keys"]):
        raise ModelLoadError(f"{source} lacks {len(missing)} weights of its model, the first is {missing[0]}")
    model.register_forward_pre_hook(_refuse_head_masks, with_kwargs=True)
    found: PreTrainedModel = model.eval()
    return found


def commit_of(source: str, config: PreTrainedConfig) -> str | None:
    """The commit on the hub that a configuration came from; None for a folder."""
    return None if Path(source).is_dir() else getattr(config, "_commit_hash", None)


def max_tokens(config: PreTrainedConfig) -> int | None:
    """Tokens that a model with this configuration has positions for, or None where it names no limit."""
    if is_encoder(config):
        with torch.device("meta"):  # only its modules tell; without weights they are had at once
            return _usable_positions(AutoModelForMaskedLM.from_config(config))
    return _named_positions(config)


def _named_positions(config: PreTrainedConfig) -> int | None:
    limit = getattr(config.get_text_config(), "max_position_embeddings", None)
    return int(limit) if limit else None


def _usable_positions(model: PreTrainedModel) -> int | None:
    """RoBERTa and its kin count positions from behind their padding's, in a table as long as the limit they name."""
    limit = _named_positions(model.config)
    words = model.get_input_embeddings()
    tables = [module for module in model.modules() if isinstance(module, nn.Embedding) and module is not words]
    for table in tables:
        if limit and table.num_embeddings == limit and table.padding_idx is not None:
            return limit - table.padding_idx - 1
    return limit


def is_encoder(config: PreTrainedConfig) -> bool:
    """Whether a model reads both ways; a class for decoders there may be, too, for those that were trained as such."""
    return (
        type(config) in AutoModelForMaskedLM._model_mapping
        and not config.is_encoder_decoder
        and not getattr(config, "is_decoder", False)
    )


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


def check_dtype(dtype: str) -> torch.dtype | str:
    """The dtype of this name, or ``auto``.

    Raises:
        ModelLoadError: There is none.
    """
    if dtype != "auto" and dtype not in _DTYPES:
        raise ModelLoadError(f"unknown dtype {dtype!r}: choose auto, {', '.join(_DTYPES)}")
    return _DTYPES.get(dtype, "auto")


def check_device(device: str | Sharding) -> None:
    """Refuse devices that are not here.

    Raises:
        ModelLoadError: There is no such device.
    """
    if isinstance(device, Sharding):
        for each in device.devices:
            check_device(f"cuda:{each}" if isinstance(each, int) else each)
    elif device != "auto":
        try:
            kind = torch.device(device)
        except RuntimeError as problem:
            raise ModelLoadError(f"unknown device {device!r}: choose auto, cpu, cuda or cuda:N") from problem
        if kind.type not in ("cpu", "cuda"):
            raise ModelLoadError(f"unknown device {device!r}: choose auto, cpu, cuda or cuda:N")
        if kind.type == "cuda" and (kind.index or 0) >= torch.cuda.device_count():
            raise ModelLoadError(
                f"device {device!r} asked for, but {torch.cuda.device_count()} CUDA devices are here: use cpu"
            )


def _device_map(
    device: str | Sharding, config: PreTrainedConfig, source: str, trust_remote_code: bool
) -> str | dict[str, Device]:
    if isinstance(device, Sharding):
        # A map of names that a quantised model has, too: quantising replaces modules under their own names.
        return device.device_map(empty_model(config, source, trust_remote_code, torch.get_default_dtype()))
    if device == "auto":
        return "auto" if torch.cuda.is_available() else {"": "cpu"}
    return {"": device}


def empty_model(config: PreTrainedConfig, source: str, trust_remote_code: bool, dtype: torch.dtype) -> PreTrainedModel:
    """The model that `load` gives, on the meta device: modules and shapes, without a weight.

    Raises:
        ModelLoadError: It is no model of text, or its code does not make one.
    """
    auto = _auto_class(config, source, trust_remote_code)
    try:
        with torch.device("meta"):
            model: PreTrainedModel = auto.from_config(
                copy.deepcopy(config), dtype=dtype, trust_remote_code=trust_remote_code
            )
    except Exception as problem:
        raise ModelLoadError(_why(source, problem)) from problem
    return model.eval()


def load_config(source: str, revision: str | None = None, trust_remote_code: bool = False) -> PreTrainedConfig:
    """The configuration of a model, without its weights.

    Raises:
        ModelLoadError: There is no such model.
    """
    folder = Path(source)
    if not folder.exists() and (source.startswith((".", "/", "~")) or source.count("/") > 1):
        raise ModelLoadError(f"no model at {source}: there is no such folder")
    if folder.is_dir() and not (folder / "config.json").is_file():
        raise ModelLoadError(f"no model at {source}: it has no config.json; give a folder that transformers saved")
    try:
        return AutoConfig.from_pretrained(
            source, trust_remote_code=trust_remote_code, **({"revision": revision} if revision else {})
        )
    except Exception as problem:
        raise ModelLoadError(_why(source, problem)) from problem


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
    try:
        return AutoTokenizer.from_pretrained(
            source, trust_remote_code=trust_remote_code, **({"revision": revision} if revision else {})
        )
    except Exception as problem:
        raise ModelLoadError(f"the tokenizer of {source} does not load: {_first_line(problem)}") from problem


def _auto_class(config: PreTrainedConfig, source: str, trust_remote_code: bool) -> Any:
    """The class that loads a text model of this configuration.

    Raises:
        ModelLoadError: Its tokens are not text's, or it has no head that predicts them.
    """
    if trust_remote_code and "AutoModelForCausalLM" in (getattr(config, "auto_map", None) or {}):
        return AutoModelForCausalLM
    order: tuple[Any, ...] = (AutoModelForCausalLM, AutoModelForMaskedLM, AutoModelForImageTextToText)
    if config.is_encoder_decoder:
        order = (AutoModelForSeq2SeqLM,)
    elif is_encoder(config):
        order = (AutoModelForMaskedLM,)
    for auto in order:
        if type(config) in auto._model_mapping:
            return auto
    raise ModelLoadError(f"{source} is a {config.model_type!r} model, which predicts no tokens of a text")


def _refuse_head_masks(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Transformers 5 takes these arguments silently, and they change nothing."""
    for name in ("head_mask", "decoder_head_mask", "cross_attn_head_mask"):
        if kwargs.get(name) is not None:
            raise InterventionError(
                f"{name}= has no effect since transformers 5: use headscan.intervene(lm, headscan.HeadMask([(layer, "
                "head), ...]))"
            )


def _why(source: str, problem: Exception) -> str:
    text = str(problem)
    if not Path(source).exists() and (
        "connect" in text.lower() or "offline" in text.lower() or "resolve" in text.lower()
    ):
        return (
            f"no model {source!r}: there is no such folder, and the hub does not answer; check the name or the network"
        )
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
    return (str(problem).strip().splitlines() or [type(problem).__name__])[0]
