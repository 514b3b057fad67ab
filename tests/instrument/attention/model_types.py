"""Small models of every model type with text that transformers has, whether or not headscan lists it."""

from __future__ import annotations

from typing import Any

import torch
from transformers import CONFIG_MAPPING, PreTrainedModel
from transformers.models.auto import modeling_auto

from headscan.attention.small_copy import randomise, small_config
from headscan.models.model_facts import auto_class

_MAPPINGS = (
    modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    modeling_auto.MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES,
    modeling_auto.MODEL_FOR_MASKED_LM_MAPPING_NAMES,
    modeling_auto.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES,
)
MODEL_TYPES = sorted({model_type for mapping in _MAPPINGS for model_type in mapping})

_SECTIONS = "text_config.rope_parameters.mrope_section"
_MROPE = {_SECTIONS: [2, 3, 3]}
_ZAMBA = {
    "attention_hidden_size": 128,
    "attention_head_dim": 32,
    "num_hidden_layers": 4,
    "layers_block_type": ["mamba", "hybrid", "mamba", "hybrid"],
}
_COMPASS = {
    "layer_types": ["sliding_attention", "full_attention"] * 20,
    "rope_parameters": {
        layers: {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 3, 3]}
        for layers in ("sliding_attention", "full_attention")
    },
}
_QWEN4 = {
    "indexer_n_heads": 4,
    "indexer_kv_heads": 1,
    "indexer_head_dim": 256,
    "indexer_budget": 8,
    "indexer_compress_ratio": 4,
    "ple_embed_dim": 64,
}
#: Arguments of a type's own configuration, where its defaults do not build a model, or have no attention.
_BASE: dict[str, dict[str, Any]] = {
    "bamba": {"attn_layer_indices": [1]},
    "cohere_compass": {"text_config": _COMPASS},
    "cohere_compass_text": _COMPASS,
    "deepseek_v2": {"num_experts_per_tok": 4, "topk_group": 1, "n_group": 1},
    "dots1": {"n_routed_experts": 8, "n_shared_experts": 1, "num_experts_per_tok": 4, "n_group": 1, "topk_group": 1},
    "esm": {"vocab_size": 160, "pad_token_id": 1, "mask_token_id": 4, "position_embedding_type": "rotary"},
    "funnel": {"block_sizes": [1, 1]},
    "granitemoehybrid": {"layer_types": ["mamba", "attention"] * 16},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"] * 16},
    "nemotron": {"num_key_value_heads": 8},
    "qwen3_next": {"layer_types": ["linear_attention", "full_attention"] * 24},
    "qwen4_exp": {"text_config": _QWEN4},
    "qwen4_exp_text": _QWEN4,
    "xmod": {"default_language": "en_XX"},
}
#: Changes of a type's small configuration, where its fields are tied to each other.
_CHANGES: dict[str, dict[str, Any]] = {
    "bamba": {"mamba_n_heads": 8, "mamba_d_head": 16},
    "dbrx": {"attn_config": {"kv_n_heads": 2, "clip_qkv": 2.0, "rope_theta": 1e4}},
    "falcon_h1": {"mamba_d_ssm": 64, "mamba_n_heads": 4, "mamba_d_head": 16},
    "gemma3n_text": {"num_kv_shared_layers": 0},
    "glm46v": _MROPE,
    "glm4v": _MROPE,
    "glm4v_moe": {_SECTIONS: [1, 1, 2]},
    "glm_ocr": _MROPE,
    "glmga": _MROPE,
    "granitemoehybrid": {"mamba_n_heads": 8},
    "hunyuan_v1_dense": {"head_dim": 16},
    "hunyuan_v1_moe": {"head_dim": 16},
    "hunyuan_vl": {"text_config.head_dim": 16},
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 0},
    "minimax_m3_vl": {"text_config.layer_types": ["full_attention", "minimax_m3_sparse"]},
    "mamba2": {"num_heads": 8},
    "ministral": {"head_dim": 16},
    "mistral4": {"rope_parameters.partial_rotary_factor": 1.0},
    "nemotron": {"head_dim": 16},
    "paddleocr_vl": _MROPE,
    "qwen2_5_omni_thinker": {**_MROPE, "vision_start_token_id": 20},
    "qwen2_5_vl": _MROPE,
    "qwen2_vl": _MROPE,
    "qwen3_omni_moe_thinker": {"vision_start_token_id": 20},
    "qwen4_exp": {"text_config.indexer_head_dim": 16},
    "qwen4_exp_text": {"indexer_head_dim": 16},
    "recurrent_gemma": {"num_hidden_layers": 3},
    "reformer": {"axial_pos_embds_dim": [32, 32], "axial_pos_shape": [16, 32]},
    "step3p7": {"text_config.sliding_window": 8},
    "zamba": _ZAMBA,
    "zamba2": {**_ZAMBA, "n_mamba_heads": 8, "hybrid_layer_ids": [1, 3], "num_mem_blocks": 1},
}


def make_small(model_type: str, **changes: Any) -> PreTrainedModel:
    """Return a small random float32 model of a type."""
    config = CONFIG_MAPPING[model_type](**_BASE.get(model_type, {}))
    config = small_config(config, _CHANGES.get(model_type, {}) | changes)
    torch.manual_seed(0)
    model: PreTrainedModel = auto_class(config, model_type, False).from_config(config, dtype=torch.float32)
    model.set_experts_implementation("eager")
    randomise(model)
    return model.eval()
