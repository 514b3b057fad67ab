"""Checks of the configuration of a pruned model, against itself and the weights, before anything is built from it.

This file is copied next to a pruned model's weights.

Shapes: H query heads and K KV heads that remain.
"""

from __future__ import annotations

import math
import os
import re
import zlib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open

from .attention_parts import OUTPUTS, LayerHeads


def crc32(heads: Sequence[int]) -> int:
    """Return a checksum: other heads of as many groups would have weights of the same shapes."""
    return zlib.crc32(",".join(map(str, heads)).encode())


def base_of(fields: Mapping[str, Any], own_type: str) -> Any:
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    name = fields.get("base_model_type")
    if not isinstance(name, str) or name == own_type or name not in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES:
        raise _wrong("base_model_type", name, "a decoder of transformers")
    return CONFIG_MAPPING[name]


def _wrong(field: str, value: Any, limit: str) -> ValueError:
    return ValueError(f"{field} in config.json: {str(value)[:80]} (limit {limit}). Copy config.json again")


#: Types with a number for each element; quantised weights pack several numbers into one, and have other shapes.
_WHOLE_NUMBERS = ("F64", "F32", "F16", "BF16", "F8_E4M3", "F8_E5M2")


def saved_shapes(folder: Any) -> dict[str, tuple[int, ...]]:
    """Return the shapes of all tensors in a folder by name, () for one that may be packed; empty for a name on the
    hub, or without safetensors.
    """
    shapes: dict[str, tuple[int, ...]] = {}
    if not isinstance(folder, (str, os.PathLike)) or not Path(folder).is_dir():
        return shapes
    try:
        for path in sorted(Path(folder).glob("model*.safetensors")):
            with safe_open(path, "pt") as file:
                for name in file.keys():  # noqa: SIM118
                    tensor = file.get_slice(name)
                    shapes[name] = tuple(tensor.get_shape()) if tensor.get_dtype() in _WHOLE_NUMBERS else ()
    except (OSError, SafetensorError):
        return {}  # transformers reports damaged files
    return shapes


#: Sizes that are a dimension of a weight, and others that some architectures do not use, which are bounded.
_DIMENSIONS = ("hidden_size", "vocab_size")
_BOUNDED = ("intermediate_size", "head_dim")
#: Largest number of heads if the weight files are not at hand.
_MOST_HEADS = 65536


def check_fields(fields: Mapping[str, Any], base: Any, shapes: Mapping[str, tuple[int, ...]]) -> None:
    """Raise ValueError if a field of ``config.json`` is impossible or does not fit the shapes of the saved tensors,
    which are empty if unknown; nothing large is made before. ``base`` is the original configuration class.
    """
    name = fields.get("pruned_attention")
    if not isinstance(name, str) or not re.fullmatch(r"\w+(\.\w+)*\.\{\}(\.\w+)+", name):
        raise _wrong("pruned_attention", name, "a module name with {} for the layer")
    # A model without its head has the body's modules at its top.
    for attention in (name, name.partition(".")[2]):
        blocks = attention.partition("{}")[0]
        numbers = {each[len(blocks) :].partition(".")[0] for each in shapes if each.startswith(blocks)}
        if numbers:
            break
    else:
        if shapes:
            raise _wrong("pruned_attention", name, "a module of the saved weights")
    layers = fields.get(base.attribute_map.get("num_hidden_layers", "num_hidden_layers"))
    if layers is not None and (not _is_count(layers, 1) or (shapes and layers != len(numbers))):
        raise _wrong("num_hidden_layers", layers, f"the {len(numbers)} layers of the saved weights" if shapes else "1")
    dimensions = {size for shape in shapes.values() for size in shape}
    largest = max(map(math.prod, shapes.values()), default=0)
    for field in (*_DIMENSIONS, *_BOUNDED):
        value = fields.get(base.attribute_map.get(field, field))
        if value is None or not shapes:
            continue
        if field in _DIMENSIONS and value not in dimensions:
            raise _wrong(field, value, "a dimension of the saved weights")
        if not _is_count(value, 0) or value > largest:
            raise _wrong(field, value, f"{largest}, the elements of the largest saved weight")
    entries = fields.get("per_layer_config")
    if not isinstance(entries, Mapping) or not entries:
        raise _wrong("per_layer_config", entries, "an object with an entry for each layer that lost heads")
    most = fields.get(base.attribute_map.get("hidden_size", "hidden_size")) if shapes else _MOST_HEADS
    seen: set[int] = set()
    for layer, entry in entries.items():
        where = f"per_layer_config, layer {layer}"
        if not str(layer).isdecimal() or (layers is not None and int(layer) >= layers):
            raise _wrong(where, layer, f"{layers} layers")
        if int(layer) in seen:
            raise _wrong(where, layer, "each layer once")
        seen.add(int(layer))
        if not isinstance(entry, Mapping):
            raise _wrong(where, entry, "an object")
        for field, value, limit in _wrong_heads(entry, _head_counts(fields), most or _MOST_HEADS):
            raise _wrong(f"{where}: {field}", value, limit)
        for field, value, limit in _wrong_shapes(entry, attention.format(int(layer)), shapes, most):
            raise _wrong(f"{where}: {field}", value, limit)


def _is_count(value: Any, least: int) -> bool:
    return type(value) is int and value >= least


def _head_counts(fields: Mapping[str, Any]) -> set[int]:
    """Return the numbers of query heads that a configuration names, for all layers or by layer."""
    counts: set[int] = set()
    for field, value in fields.items():
        if "head" in field and not any(word in field for word in ("kv", "key", "value", "dim", "per_layer_config")):
            counts |= {each for each in (value if isinstance(value, list) else [value]) if _is_count(each, 1)}
    return counts


#: Fields of a layer.
_ENTRY = {
    *("num_attention_heads", "num_key_value_heads", "skip", "kept_heads", "kept_heads_crc32"),
    *("original_heads", "original_kv_heads", "has_added_bias"),
}


def _wrong_heads(entry: Mapping[str, Any], counts: set[int], most: int) -> Iterator[tuple[str, Any, str]]:
    """Yield the fields of a layer that contradict the others or ``counts`` of heads: name, value and limit."""
    for field in sorted(set(entry) - _ENTRY):
        yield field, entry[field], "no such field"
    kept: Any = entry.get("kept_heads")
    heads: Any = entry.get("original_heads")
    kv_heads: Any = entry.get("original_kv_heads")
    if not _is_count(heads, 1) or heads > most or (counts and heads not in counts):
        yield "original_heads", heads, f"{' or '.join(map(str, sorted(counts)[:3]))}, the heads of the original"
    if not _is_count(kv_heads, 1) or heads % kv_heads:
        yield "original_kv_heads", kv_heads, f"a divisor of {heads} heads"
    if not isinstance(kept, list) or not all(_is_count(head, 0) and head < heads for head in kept):
        yield "kept_heads", kept, f"a list of heads from 0 to {heads - 1}"
    if kept != sorted(set(kept)):
        yield "kept_heads", kept, "ascending heads, each once"
    if entry.get("kept_heads_crc32", crc := crc32(kept)) != crc:
        yield "kept_heads", kept, "the heads that were saved, by kept_heads_crc32"
    if type(entry.get("has_added_bias", False)) is not bool:
        yield "has_added_bias", entry["has_added_bias"], "true or false"
    layer_heads = LayerHeads(tuple(kept), heads, kv_heads)
    for field, count in (("num_attention_heads", len(kept)), ("num_key_value_heads", len(layer_heads.kept_kv))):
        if entry.get(field, count) != count:
            yield field, entry[field], f"{count}, by kept_heads"
    if entry.get("skip", []) != ([] if kept else ["attention"]):
        yield "skip", entry.get("skip"), "attention, if no head is kept"


def _wrong_shapes(
    entry: Mapping[str, Any], attention: str, shapes: Mapping[str, tuple[int, ...]], width: int | None
) -> Iterator[tuple[str, Any, str]]:
    """Yield the fields of a layer that contradict its weights: name, value and limit; a width of None is unknown."""
    heads = LayerHeads(tuple(entry["kept_heads"]), entry["original_heads"], entry["original_kv_heads"])
    own = {name[len(attention) + 1 :]: shape for name, shape in shapes.items() if name.startswith(f"{attention}.")}
    H, K = len(heads.kept), len(heads.kept_kv)
    # A layer without heads may have a bias left.
    if shapes and bool(H) != bool(own.keys() - {"bias"}):
        yield "kept_heads", entry["kept_heads"], "heads in layers with weights of an attention, and none in others"
    if shapes and entry.get("has_added_bias") and not own.keys() & {"bias", *(f"{part}.bias" for part in OUTPUTS)}:
        yield "has_added_bias", True, "false: no bias of the output projection is saved"
    outputs = [_other_side(shape, width) for part in OUTPUTS if len(shape := own.get(f"{part}.weight", ())) == 2]
    if not H or len(outputs) != 1:
        return
    if outputs[0] % H:
        yield "kept_heads", entry["kept_heads"], f"a divisor of {outputs[0]} columns of the output projection"
    for part, parts in (("v_proj", K), *((part, H + 2 * K) for part in _FUSED)):
        shape = own.get(f"{part}.weight", ())
        if len(shape) == 2 and _other_side(shape, width) * H != outputs[0] * parts:
            yield "original_kv_heads", heads.kv_heads, f"as many KV heads as the saved {part} has"


#: Projections for queries, keys and values together.
_FUSED = ("qkv_proj", "query_key_value", "c_attn", "Wqkv")


def _other_side(shape: tuple[int, ...], width: int | None) -> int:
    """Return the size of a projection's weight on the side that is not that of the hidden states."""
    return shape[0] if shape[1] == width else shape[1]
