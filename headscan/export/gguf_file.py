"""A model as one GGUF file for llama.cpp, with numbers of heads by layer.

Equal layers make the architecture ``llama``. Others make ``deci``, which has the numbers of query and KV heads of each
layer as arrays; a layer without attention has 0. Within a layer all groups have one size, so smaller groups get query
heads of zeros. The cache holds the KV heads that remain, and no more.

GGUF has rotary pairs of neighbours, transformers pairs of halves: the rows of queries and keys are reordered.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from gguf import GGMLQuantizationType, GGUFWriter, LlamaFileType
from numpy.typing import NDArray
from torch import Tensor

from headscan.checkpoints.source_folder import GGUF_RECORD, gguf_file, packaged_file
from headscan.errors import ExportError, ModelLoadError, unknown_name
from headscan.export.gguf_tokenizer import Key, copied_keys, made_keys
from headscan.export.servable_model import HeadSlots, HeldSize, ServableModel, ServedForm
from headscan.models.loaded_model import LoadedModel
from headscan.settings.saving_settings import GgufType
from headscan.store.output_files import replacing

_TYPES = {
    "f32": (GGMLQuantizationType.F32, LlamaFileType.ALL_F32),
    "f16": (GGMLQuantizationType.F16, LlamaFileType.MOSTLY_F16),
    "bf16": (GGMLQuantizationType.BF16, LlamaFileType.MOSTLY_BF16),
    "q8_0": (GGMLQuantizationType.Q8_0, LlamaFileType.MOSTLY_Q8_0),
}
_MLP = {"gate_proj": "ffn_gate", "up_proj": "ffn_up", "down_proj": "ffn_down"}
_ATTENTION = {"q_proj": "attn_q", "k_proj": "attn_k", "v_proj": "attn_v", "o_proj": "attn_output"}
#: Kinds of rotary positions that have a place in the format.
_ROPE_TYPES = ("default", "linear", "llama3", "yarn")


@dataclass(frozen=True)
class WrittenGguf:
    """A written file: its architecture, its bytes, and what the original, the model and the file hold."""

    file: Path
    architecture: str
    bytes: int
    sizes: tuple[HeldSize, ...]


@dataclass(frozen=True)
class GgufTensor:
    """A tensor with its shape and its type in the file; ``make`` computes it when it is needed."""

    name: str
    make: Callable[[], Tensor]
    shape: tuple[int, ...]
    type: GGMLQuantizationType

    @property
    def number(self) -> Any:
        """The type of the array that holds it."""
        if self.is_bytes:
            return np.uint8
        return np.float16 if self.type is GGMLQuantizationType.F16 else np.float32

    @property
    def stored_shape(self) -> tuple[int, ...]:
        """The shape of that array."""
        return gguf.quant_shape_to_byte_shape(self.shape, self.type) if self.is_bytes else self.shape

    @property
    def is_bytes(self) -> bool:
        """True for types without a number of NumPy."""
        return self.type in (GGMLQuantizationType.Q8_0, GGMLQuantizationType.BF16)

    @property
    def bytes(self) -> int:
        return math.prod(self.stored_shape) * np.dtype(self.number).itemsize


def write_gguf(
    lm: LoadedModel,
    out: str | os.PathLike[str],
    *,
    type: GgufType = "f16",
    tokenizer: str | os.PathLike[str] | None = None,
) -> WrittenGguf:
    """Write a Llama-type model, from `slice_heads` or not, into a GGUF file, which replaces an older one when complete.

    Args:
        type: Type of the matrices. Vectors are float32. In a q8_0 file, matrices whose rows are no multiple of 32 are
            float16.
        tokenizer: GGUF file whose tokenizer is copied. None copies that of the file that the model was read from, or of
            the installed `smollm2` if the model came from there, and makes the keys from the model's tokenizer
            otherwise.
    """
    if type not in _TYPES:
        raise unknown_name("type", type, _TYPES)
    served = ServableModel(lm, "GGUF files of headscan")
    keys = _tokenizer_keys(served, tokenizer)
    architecture, places, tensors = _tensors(served, type)
    target = Path(out)
    try:
        with replacing(target) as fresh:
            writer = GGUFWriter(fresh, architecture)
            _add_settings(writer, served, places, _TYPES[type][1])
            writer.add_string(GGUF_RECORD, served.config.to_json_string())
            for key in keys:
                writer.add_key_value(key.name, key.value, key.type, key.part)
            _write(writer, tensors)
    except OSError as problem:
        raise ExportError(
            f"{target} cannot be written: {problem.strerror or problem}. Free space, or choose another file"
        ) from problem
    parameters = sum(math.prod(each.shape) for each in tensors)
    sizes = tuple(served.sizes(target.name, places, parameters))
    return WrittenGguf(target, architecture, target.stat().st_size, sizes)


def gguf_form(served: ServableModel) -> ServedForm:
    """Return what a file of type f16 holds of a model, without writing it."""
    architecture, places, tensors = _tensors(served, "f16")
    parameters = sum(math.prod(each.shape) for each in tensors)
    return ServedForm(architecture, places, parameters, sum(each.bytes for each in tensors))


def _tensors(served: ServableModel, type: GgufType) -> tuple[str, tuple[HeadSlots, ...], list[GgufTensor]]:
    """Return the architecture of a file, its places, and its tensors."""
    places = served.own_slots()
    architecture = "llama" if len(set(places)) == 1 else "deci"
    tensors = []
    for name, make in _entries(served, places):
        shape = tuple(make().shape)
        tensors.append(GgufTensor(name, make, shape, _type_of(shape, _TYPES[type][0])))
    return architecture, places, tensors


def _add_settings(
    writer: GGUFWriter, served: ServableModel, places: tuple[HeadSlots, ...], file_type: LlamaFileType
) -> None:
    config = served.config
    equal = len(set(places)) == 1
    writer.add_type("model")
    writer.add_name(Path(served.lm.source).name)
    writer.add_block_count(len(places))
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_head_count(places[0].heads if equal else [each.heads for each in places])
    writer.add_head_count_kv(places[0].kv_heads if equal else [each.kv_heads for each in places])
    # llama.cpp reads the length of the MLP by layer in deci.
    length = config.intermediate_size
    writer.add_feed_forward_length(length if equal else [length] * len(places))
    writer.add_key_length(served.head_dim)
    writer.add_value_length(served.head_dim)
    writer.add_rope_dimension_count(served.head_dim)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    _add_rope_scaling(writer, served)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_vocab_size(config.vocab_size)
    writer.add_file_type(file_type)
    writer.add_quantization_version(gguf.GGML_QUANT_VERSION)


def _entries(served: ServableModel, places: tuple[HeadSlots, ...]) -> Iterator[tuple[str, Callable[[], Tensor]]]:
    """Yield the name of each tensor, and a function that computes it."""
    model = served.model.model
    yield "token_embd.weight", lambda: model.embed_tokens.weight
    yield "output_norm.weight", lambda: model.norm.weight
    if not served.is_tied:
        yield "output.weight", lambda: served.model.lm_head.weight
    if (factors := _rope_factors(served)) is not None:
        yield "rope_freqs.weight", lambda: factors
    for number, layer in enumerate(served.layers):
        block = f"blk.{number}"
        if places[number].kv_heads:
            yield f"{block}.attn_norm.weight", partial(getattr, layer.input_layernorm, "weight")
        yield f"{block}.ffn_norm.weight", partial(getattr, layer.post_attention_layernorm, "weight")
        for name, value in served.attention(number, places[number]).items():
            projection, _, leaf = name.partition(".")
            heads = {"q_proj": places[number].heads, "k_proj": places[number].kv_heads}.get(projection)
            make = partial(_paired, value, heads) if heads else partial(_same, value)
            yield f"{block}.{_ATTENTION[projection]}.{leaf}", make
        for name, value in served.mlp(number, places).items():
            projection, _, leaf = name.partition(".")
            yield f"{block}.{_MLP[projection]}.{leaf}", partial(_same, value)


def _same(value: Tensor) -> Tensor:
    return value


def _paired(weight: Tensor, heads: int) -> Tensor:
    """Return rows of queries or keys in the order of GGUF: each row of the first half before that of the second."""
    return weight.unflatten(0, (heads, 2, -1)).transpose(1, 2).flatten(0, 2)


def _has_yarn_keys(served: ServableModel) -> bool:
    """Return True if keys name the rotary positions: those of yarn with its usual limits, which llama.cpp does not read
    for these architectures. Raise if the format has no place for them.
    """
    rope = served.config.rope_parameters
    kind = rope.get("rope_type", "default")
    if kind not in _ROPE_TYPES or rope.get("partial_rotary_factor", 1.0) != 1.0:
        raise ExportError(
            f"rotary positions of {served.lm.source}: {kind} (limit {', '.join(_ROPE_TYPES)}, on whole heads). Use "
            "llama.cpp's own converter on the original"
        )
    limits = rope.get("beta_fast") or 32, rope.get("beta_slow") or 1, rope.get("truncate", True)
    return bool(kind == "yarn" and limits == (32, 1, True))


def _rope_factors(served: ServableModel) -> Tensor | None:
    """Return the numbers (D / 2,) that divide the rotary frequencies; None if they are all 1, or follow from keys."""
    rope = served.config.rope_parameters
    if _has_yarn_keys(served) or rope.get("rope_type", "default") == "default":
        return None
    D = served.head_dim
    plain = rope["rope_theta"] ** -(torch.arange(0, D, 2, dtype=torch.float64) / D)
    frequencies = served.model.model.rotary_emb.inv_freq
    factors: Tensor = (plain.to(frequencies.device) / frequencies.double()).float()
    return factors


def _add_rope_scaling(writer: GGUFWriter, served: ServableModel) -> None:
    """Add the keys of yarn, and the factor of queries and keys if it is not the one that the engine computes."""
    config, rope = served.config, served.config.rope_parameters
    attention, computed = served.model.model.rotary_emb.attention_scaling, 1.0
    if _has_yarn_keys(served):
        computed = 1.0 + 0.1 * math.log(rope["factor"])
        writer.add_rope_scaling_type(gguf.RopeScalingType.YARN)
        writer.add_rope_scaling_factor(rope["factor"])
        writer.add_rope_scaling_orig_ctx_len(
            rope.get("original_max_position_embeddings") or config.max_position_embeddings
        )
    if attention != computed:
        writer.add_rope_scaling_attn_factors(attention / computed)


def _write(writer: GGUFWriter, tensors: list[GgufTensor]) -> None:
    """Write header, keys and tensors; one tensor after the other is in memory in the type of the file."""
    for each in tensors:
        writer.add_tensor_info(each.name, each.stored_shape, np.dtype(each.number), each.bytes, raw_dtype=each.type)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    for each in tensors:
        writer.write_tensor_data(_stored(each))
    writer.close()


def _type_of(shape: tuple[int, ...], kind: GGMLQuantizationType) -> GGMLQuantizationType:
    if len(shape) == 1:
        return GGMLQuantizationType.F32
    block, _ = gguf.GGML_QUANT_SIZES[kind]
    return GGMLQuantizationType.F16 if shape[-1] % block else kind


def _stored(tensor: GgufTensor) -> NDArray[Any]:
    kind = tensor.type
    value = tensor.make().detach().float().cpu().contiguous().numpy()
    with np.errstate(over="ignore"):
        quantised: NDArray[Any] = gguf.quants.quantize(value, kind)
    if kind is not GGMLQuantizationType.F32 and not np.isfinite(_numbers(quantised, kind)).all():
        raise ExportError(f"{tensor.name} has numbers beyond {kind.name} (limit 65504). Write type f32")
    return quantised


def _numbers(stored: NDArray[Any], kind: GGMLQuantizationType) -> NDArray[Any]:
    """Return the 16-bit numbers of a stored tensor: all, or the scales of its blocks."""
    if kind is GGMLQuantizationType.F16:
        return stored
    if kind is GGMLQuantizationType.BF16:
        return gguf.quants.dequantize(stored, kind)
    _, size = gguf.GGML_QUANT_SIZES[kind]
    return stored.reshape(-1, size)[:, :2].copy().view(np.float16)


def _tokenizer_keys(served: ServableModel, tokenizer: str | os.PathLike[str] | None) -> list[Key]:
    vocabulary = served.model.model.embed_tokens.weight.shape[0]
    record = getattr(served.config, "gguf_source", None)
    file = None if tokenizer is None else Path(tokenizer)
    if file is None and record is not None:
        file = gguf_file(Path(served.lm.source)) or _packaged(record["file"])
        if file is None:
            raise ExportError(
                f"{served.lm.source} was read from {record['file']}, whose tokenizer is copied. Pass that file as "
                "`tokenizer`"
            )
    if file is None:
        return made_keys(served.lm.tokenizer, vocabulary, served.lm.source)
    keys = copied_keys(file)
    count = len(next(key.value for key in keys if key.name == "tokenizer.ggml.tokens"))
    if count != vocabulary:
        raise ExportError(
            f"the tokenizer of {file} has {count} tokens (limit {vocabulary}, the rows of the embedding). Name the "
            "GGUF file of this model"
        )
    return keys


def _packaged(name: str) -> Path | None:
    """Return the file of the installed `smollm2` if it has this name."""
    try:
        file = packaged_file()
    except ModelLoadError:
        return None
    return file if file.name == name else None
