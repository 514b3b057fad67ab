"""Small copies of models: the same code with narrow layers, few of each type, and windows of a few tokens.

Whether a model attends as headscan measures can depend on the length of the text: sliding windows, chunks and the keys
that an indexer chooses hide nothing from a short one. A text longer than 4,096 tokens takes minutes on a large model.
In a small copy with random weights, windows are a few tokens long, and a longer text takes milliseconds.
"""

from __future__ import annotations

import copy
import logging
import re
from collections.abc import Mapping
from typing import Any

import torch
from huggingface_hub.errors import StrictDataclassError
from transformers import PreTrainedConfig, PreTrainedModel

from headscan.models.model_facts import MODEL_ERRORS, typed_line

_log = logging.getLogger("headscan")

#: Width of hidden states, heads and width of one in a small copy.
_WIDTH, _HEADS, _HEAD = 64, 4, 16
_VOCABULARY, _POSITIONS = 160, 512
#: Most parameters of a small copy: the other towers of multimodal models may stay wide.
_MOST = 5_000_000
#: Layers in a small copy, and more if it needs them for one of each type.
_LAYERS = 2
#: Fields that bound the keys of a query, and their value in a small copy.
_WINDOWS = {
    r"(sliding_)?window(_size)?|sliding_window_size|attention_window(_size)?|local_attention(_window_len)?": 8,
    r"attention_chunk_size|local_radius|keep_window_size|rel_extent|index_topk|index_kpool|indexer_budget": 8,
    r"index_topk_blocks": 2,
    r"(index_|global_)?block_size|indexer_compress_ratio": 4,
}
#: Other fields, by the pattern of their names, and their value in a small copy; None is the number of layers.
_SIZES: dict[str, int | None] = {
    r"(hidden|embedding|d_embed)(_size)?|d_model|n_embd|(word_)?embed(_proj)?_dim|dim|emb(edding)?_dim": _WIDTH,
    r"(encoder|decoder|text|out|true|attention|backbone|residual|pooler|image_text|patch_embed)_hidden_size": _WIDTH,
    r"hidden_size_global|lru_width|entity_emb_size|projection_dim|vision_output_dim": _WIDTH,
    r"projector_(input|output)_dim|(prediction_head|projector_hidden)_size": _WIDTH,
    r"projection_hidden_dim|ple_embed_dim|moe_hidden_size|mamba_d_ssm": _WIDTH,
    r".*(intermediate_size|ffn_dim|ffn_hidden_size|intermediate_dim)(_mlp)?|d_ff|dff|dim_ff|d_inner|n_inner": _WIDTH,
    r"hidden_dim|ff_dim|mlp_(dim|hidden_size)|intra_bottleneck_size": _WIDTH,
    r"n_heads?|num_heads|(.*_)?attention_heads": _HEADS,
    r"(mamba|linear)_(n_|num_)?(key_|value_)?heads|n_mamba_heads": _HEADS,
    r"index(er)?_n_heads": _HEADS // 2,
    r"(swa_|global_)?num_(global_|swa_)?(key_value|kv)_heads|kv_n_heads": _HEADS // 2,
    r"qk_head_dim": 2 * _HEAD,
    r"(.*_)?head_dim|d_kv|d_head|kv_channels|attention_head_size|dim_head|head_size|d_rel|mamba_d_head": _HEAD,
    r"rotary_dim|hidden_size_per_layer_input": _HEAD // 2,
    r"(mamba_)?(d|ssm)_state(_size)?|state_size|mamba_headdim": _HEAD,
    r"(q|kv|o|qk)_lora_rank|ffn_embedding_rank|laurel_rank|hc_lowrank|embedding_rank|gated_norm_rank": _HEAD,
    # Every token uses every expert, so that rounding cannot choose another one.
    r"(num|n)_(local_|routed_)?experts|moe_num_experts|zero_expert_num|experts_per_token|moe_topk": 4,
    r"num_experts_per_tok(en)?|moe_(top_?)?k|num_(selected|activated)_experts|top_k_experts": 4,
    r"n_group|topk_group|(n|num)_shared_experts|num_expert_groups?|(mamba_)?n_?groups": 1,
    r"max_window_layers|num_kv_shared_layers|first_k_dense_replace|num_dense_layers": 1,
    r"(.*_)?vocab(ulary)?_size(_per_layer_input|_base)?|encoder_hash_byte_group_vocab|num_centroids": _VOCABULARY,
    r"codebook_size|split_ngram_parts": 128,
    r"max(_encoder|_decoder|_source|_target|_2d)?_position(_embedding)?s|n_positions|n_ctx|(max_)?seq_len": _POSITIONS,
    r"model_max_length": _POSITIONS,
    r"floor_scale|log_scaling_n_floor": 16,
    r"(mamba_)?chunk_size": 8,
    r"num_query_tokens|num_latents|num_landmarks|segment_means_seq_len|mm_tokens_per_image": 4,
    r"image_size": 32,
    r"patch_size": 8,
    r"(num_)?((hidden|encoder|decoder|text|speech_encoder)_)?(hidden_)?layers|n_layers?|depth|num_blocks": None,
    r"conf_num_hidden_layers|num_layers_per_stack|t2u_(encoder|decoder)_layers": None,
}
_RULES = [(re.compile(pattern), size) for pattern, size in (_WINDOWS | _SIZES).items()]
_BOUNDS = re.compile("|".join(_WINDOWS))
_HEAD_COUNTS = {
    "num_key_value_heads": "num_attention_heads",
    "swa_num_key_value_heads": "swa_num_attention_heads",
    "num_kv_heads": "num_attention_heads",
}


def names_windows(values: Mapping[str, Any]) -> bool:
    """Return True if a configuration, as a dict, bounds the keys of a query by their number or distance."""
    return any(
        names_windows(value) if isinstance(value, dict) else _is_count(value) and _BOUNDS.fullmatch(str(name))
        for name, value in values.items()
    )


def small_copy(model: PreTrainedModel) -> PreTrainedModel | None:
    """Return a small copy of a model, with random float32 weights on the CPU; None if its code cannot be built small.
    Random numbers continue as before.
    """
    build: Any = type(model)._from_config
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        try:
            config = small_config(model.config)
            with torch.device("meta"):
                parameters = build(copy.deepcopy(config)).num_parameters()
            if parameters > _MOST:
                _log.debug("a small copy of %s has %s parameters", type(model).__name__, f"{parameters:,}")
                return None
            with torch.device("cpu"):
                small: PreTrainedModel = build(config, dtype=torch.float32)
        except (*MODEL_ERRORS, ImportError, StrictDataclassError) as problem:
            _log.debug("no small copy of %s can be built: %s", type(model).__name__, typed_line(problem))
            return None
        randomise(small)
    return small.eval()


@torch.no_grad()
def randomise(model: PreTrainedModel) -> None:
    """Replace weights by random ones that are large enough for non-uniform attention."""
    for name, parameter in model.named_parameters():
        if parameter.ndim >= 2 and "norm" not in name:
            parameter.normal_(std=0.18)
        elif parameter.is_floating_point():
            parameter.add_(torch.randn_like(parameter) * 0.05)


def small_config(config: PreTrainedConfig, changes: Mapping[str, Any] | None = None) -> PreTrainedConfig:
    """Return a configuration of the same type with small sizes, and with ``changes`` by name, dots between levels."""
    left_out = ("transformers_version", "_name_or_path", "model_type", "dtype", "quantization_config")
    values = _small({name: value for name, value in config.to_dict().items() if name not in left_out})
    for path, value in (changes or {}).items():
        *outer, name = path.split(".")
        inner = values
        for level in outer:
            inner = inner[level]
        inner[name] = value
    small = type(config)(**values)
    small._attn_implementation_internal = config._attn_implementation
    return small


def _small(values: dict[str, Any]) -> dict[str, Any]:
    """Return the values of a configuration with small sizes, at any depth."""
    layers = next((values[name] for name in ("num_hidden_layers", "num_layers", "n_layer") if name in values), None)
    kept = _kept_layers(values)
    small: dict[str, Any] = {}
    for name, value in values.items():
        if name == "per_layer_config":  # sizes of single layers; without it all have the same
            continue
        if isinstance(value, dict):
            is_rope = str(name).startswith("rope")
            small[name] = copy.deepcopy(value) if is_rope or str(name).startswith("id2") else _small(value)
        elif isinstance(value, list | tuple):
            of_layers = [value[layer] for layer in kept] if layers and len(value) == layers > max(kept) else value
            small[name] = [_small_count(str(name), each, len(kept)) if _is_count(each) else each for each in of_layers]
        else:
            small[name] = _small_count(str(name), value, len(kept)) if _is_count(value) else value
    for kv_heads, heads in _HEAD_COUNTS.items():
        if values.get(kv_heads) is not None and values[kv_heads] == values.get(heads):
            small[kv_heads] = small[heads]
    old, new = (_head_width(each) for each in (values, small))
    for name, value in small.items():
        if str(name).startswith("rope") and isinstance(value, dict) and old:
            _shorten_rope(value, new / old)
    _shorten_originals(small, values.get("max_position_embeddings"))
    return small


def _shorten_originals(small: dict[str, Any], positions: object) -> None:
    """Keep the ratio of the original to the present length, at any depth of a small configuration."""
    for name, value in small.items():
        if isinstance(value, dict) and name.startswith("rope"):
            _shorten_originals(value, positions)
        elif name == "original_max_position_embeddings" and value and isinstance(positions, int):
            small[name] = max(1, round(value * min(positions, _POSITIONS) / positions))


def _kept_layers(values: Mapping[str, Any]) -> list[int]:
    """Return the layers to keep: the first ones, and the first of every other type."""
    kept = set(range(_LAYERS))
    for name in ("layer_types", "mlp_layer_types", "layers_block_type"):
        types = values.get(name)
        if isinstance(types, list):
            kept |= {types.index(kind) for kind in types}
    return sorted(kept)


def _small_count(name: str, value: int, layers: int) -> int:
    if name.endswith(("_id", "token_index")):
        return value if value < 8 else value % (_VOCABULARY - 8) + 8
    for pattern, size in _RULES:
        if pattern.fullmatch(name):
            return min(value, layers if size is None else size)
    return value


def _is_count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value > 0


def _head_width(values: Mapping[str, Any]) -> int:
    """Return the width of a head; 0 if the values do not name it."""
    width, heads = values.get("hidden_size"), values.get("num_attention_heads")
    named = values.get("qk_rope_head_dim") or values.get("head_dim")
    return int(named or (width // heads if isinstance(width, int) and isinstance(heads, int) and heads else 0))


def _shorten_rope(rope: dict[str, Any], share: float) -> None:
    """Shorten the lists of rotary parameters, which have one number for each frequency, or divide them up."""
    for name, value in rope.items():
        if isinstance(value, dict):
            _shorten_rope(value, share)
        elif name == "mrope_section" and isinstance(value, list):
            total = round(sum(value) * share)
            rest = [max(1, int(part * share)) for part in value[1:]]
            rope[name] = [total - sum(rest), *rest]
        elif name in ("short_factor", "long_factor") and isinstance(value, list):
            rope[name] = value[: round(len(value) * share)]
