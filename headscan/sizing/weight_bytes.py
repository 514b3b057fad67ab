"""Bytes of a model's weights by part, from headers or modules."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from transformers import PreTrainedModel

from headscan.checkpoints.headers import FLOATS, SavedTensor
from headscan.models.layout import Layout

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

_TORCH = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}


def saved_dtype(config: PreTrainedConfig, saved: Mapping[str, SavedTensor]) -> torch.dtype:
    """Return the dtype of ``dtype="auto"``: the configuration's, or else the checkpoint's."""
    named = getattr(config, "dtype", None) or getattr(config.get_text_config(), "dtype", None)
    if isinstance(named, torch.dtype):
        return named
    floats: Counter[str] = Counter()
    for tensor in saved.values():
        if tensor.dtype in FLOATS:
            floats[tensor.dtype] += tensor.nbytes
    return _TORCH[floats.most_common(1)[0][0]] if floats else torch.get_default_dtype()


def saved_bytes(
    layout: Layout, saved: Mapping[str, SavedTensor], dtype: torch.dtype | None, built: Counter[int | str]
) -> Counter[int | str] | None:
    """Return the bytes of loaded weights by part.

    None means that the tensors' names do not fit the model.

    A checkpoint's names may have another prefix than the model's (``h.0`` for ``transformer.h.0``), and it may contain
    other lists of blocks, such as a vision tower's.

    Args:
        dtype: Dtype of the loaded weights; None keeps the saved ones.
    """
    lists = {block.rpartition(".")[0] for block in layout.blocks}
    prefixes = {path: _prefix_in(saved, path) for path in lists}
    if not lists or None in prefixes.values():
        return None
    found: Counter[int | str] = Counter()
    for name, tensor in saved.items():
        part = layout.part_of(_renamed(name, prefixes))
        if part == "rest" and any(name.startswith(f"{prefix}.") for prefix in prefixes.values()):
            continue  # a block after the last layer, which predicts a further token and is not loaded
        found[part] += tensor.nbytes if dtype is None else _loaded_bytes(tensor, dtype)
    if not all(found[index] for index in range(len(layout.blocks))):
        return None
    for part in ("embedding", "head"):
        if not found[part]:  # saved under another name
            found[part] = min(built[part], found["rest"])
            found["rest"] -= found[part]
    return found


def _prefix_in(saved: Mapping[str, SavedTensor], path: str) -> str | None:
    """Return the name of a list of blocks in a checkpoint.

    It is the largest list with the same last part of its name.
    """
    leaf = path.rpartition(".")[2]
    found: Counter[str] = Counter()
    for name, tensor in saved.items():
        parts = name.split(".")
        for place in range(1, len(parts)):
            if parts[place].isdecimal() and parts[place - 1] == leaf:
                found[".".join(parts[:place])] += tensor.nbytes
                break
    return path if path in found else found.most_common(1)[0][0] if found else None


def _renamed(name: str, prefixes: Mapping[str, str | None]) -> str:
    """Return a block tensor's name in the model.

    Other names stay as they are.
    """
    for path, prefix in prefixes.items():
        if prefix is not None and name.startswith(f"{prefix}."):
            return path + name[len(prefix) :]
    return name


def _loaded_bytes(tensor: SavedTensor, dtype: torch.dtype) -> int:
    return tensor.numel * dtype.itemsize if tensor.dtype in FLOATS else tensor.nbytes


def built_bytes(model: PreTrainedModel, layout: Layout, config: PreTrainedConfig) -> Counter[int | str]:
    """Return the bytes by part of a meta-device model, after quantisation."""
    found: Counter[int | str] = Counter()
    quantised = _quantised(model, config)
    for name, parameter in model.named_parameters():
        found[layout.part_of(name)] += quantised.get(name, parameter.nbytes)
    return found


def _quantised(model: PreTrainedModel, config: PreTrainedConfig) -> dict[str, int]:
    """Return the bytes of quantised weights.

    They are the weights of linear layers and experts in blocks.
    """
    settings: Any = getattr(config, "quantization_config", None) or {}
    settings = settings if isinstance(settings, dict) else settings.to_dict()
    bits = _bits(settings)
    if bits is None:
        return {}
    left_out = [
        *(settings.get("modules_to_not_convert") or ()),
        *(settings.get("llm_int8_skip_modules") or ()),
        *(settings.get("ignore") or ()),
    ]
    head = model.get_output_embeddings()
    found = {}
    for path, module in model.named_modules():
        if module is head or any(path == name or name in path.split(".") for name in left_out):
            continue
        for leaf, parameter in module.named_parameters(recurse=False):
            if parameter.ndim == 3 or (parameter.ndim == 2 and isinstance(module, nn.Linear)):
                found[f"{path}.{leaf}"] = int(parameter.numel() * bits / 8)
    return found


def _bits(settings: Mapping[str, Any]) -> float | None:
    """Return the bits of a quantised weight, including its scales.

    None means no quantisation, or an unknown one.
    """
    method = settings.get("quant_method")
    if method == "fp8" and (block := settings.get("weight_block_size")):
        return 8 + 32 / (block[0] * block[1])
    if method == "mxfp4":
        return 4 + 8 / 32
    if method == "bitsandbytes":
        return 4.5 if settings.get("load_in_4bit") else 8
    if method == "compressed-tensors":
        groups = [group.get("weights") or {} for group in (settings.get("config_groups") or {}).values()]
        return max((group.get("num_bits") or 16 for group in groups), default=None)
    if "bits" in settings:
        return settings["bits"] + 32 / (settings.get("group_size") or 128)
    return 8 if method in ("fp8", "fbgemm_fp8") else None
