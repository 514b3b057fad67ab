"""The decoders of the test matrix; one line adds one."""

from __future__ import annotations

from transformers import (
    AutoModelForImageTextToText,
)

from headscan.testing.family import (
    DELTA,
    DENSE,
    GQA,
    HEADS,
    HYBRID,
    KV_B_PROJ,
    LAYERS,
    MAMBA2,
    MHA,
    MLA,
    MOE,
    O_PROJ,
    OUT_PROJ,
    PATCHES,
    PER_LAYER_INPUT,
    SELF_ATTENTION,
    SHARED_MOE,
    SLIDING,
    VISION,
    WRAPPED,
    Family,
)

FAMILIES: dict[str, Family] = {
    "llama": Family("llama", O_PROJ, GQA),
    "llama-mha": Family("llama", O_PROJ, {**GQA, "num_key_value_heads": 6}),
    "llama-mqa-wide": Family("llama", O_PROJ, {**GQA, "num_key_value_heads": 1, "head_dim": 20}),
    "qwen2": Family("qwen2", O_PROJ, GQA),
    "qwen2_moe": Family("qwen2_moe", O_PROJ, GQA | SHARED_MOE),
    "qwen3": Family("qwen3", O_PROJ, {**GQA, "head_dim": 16}),
    "qwen3_moe": Family("qwen3_moe", O_PROJ, GQA | MOE | {"head_dim": 12}),
    "qwen3_next": Family(
        "qwen3_next", O_PROJ, GQA | SHARED_MOE | HYBRID | DELTA | {"head_dim": 12}, layers=(0, 2), gated=True
    ),
    "qwen3_5": Family("qwen3_5_text", O_PROJ, GQA | HYBRID | DELTA | {"head_dim": 12}, layers=(0, 2), gated=True),
    "mistral": Family("mistral", O_PROJ, {**GQA, "sliding_window": None}),
    "mistral-sliding": Family("mistral", O_PROJ, {**GQA, "sliding_window": 20}),
    "mixtral": Family("mixtral", O_PROJ, GQA | MOE),
    "ministral3": Family("ministral3", O_PROJ, {**GQA, "head_dim": 8}),
    "gemma": Family("gemma", O_PROJ, {**GQA, "head_dim": 12}),
    "gemma2-softcap": Family(
        "gemma2", O_PROJ, {**GQA, "head_dim": 12, "query_pre_attn_scalar": 12, "sliding_window": 24}
    ),
    "gemma3": Family("gemma3_text", O_PROJ, GQA | SLIDING | {"head_dim": 12, "query_pre_attn_scalar": 12}),
    "gemma3n": Family(
        "gemma3n_text",
        O_PROJ,
        GQA | SLIDING | {"head_dim": 12, "num_kv_shared_layers": 1, "laurel_rank": 8} | PER_LAYER_INPUT,
        borrows={2: 0},
    ),
    "gemma4": Family(
        "gemma4_text",
        O_PROJ,
        GQA
        | SLIDING
        | {"layer_types": ["sliding_attention", "full_attention", "full_attention"], "num_kv_shared_layers": 1}
        | {"head_dim": 12, "global_head_dim": 16}
        | PER_LAYER_INPUT,
        borrows={2: 1},
    ),
    "olmo": Family("olmo", O_PROJ, GQA),
    "olmo2": Family("olmo2", O_PROJ, GQA),
    "olmo3": Family("olmo3", O_PROJ, GQA | SLIDING),
    "olmoe": Family("olmoe", O_PROJ, GQA | MOE),
    "phi": Family("phi", DENSE, GQA),
    "phi3": Family("phi3", O_PROJ, GQA),
    "phimoe": Family("phimoe", O_PROJ, GQA | MOE),
    "gpt2": Family("gpt2", "transformer.h.{}.attn.c_proj", MHA),
    "gpt_bigcode": Family("gpt_bigcode", "transformer.h.{}.attn.c_proj", MHA),
    "gpt_neox": Family("gpt_neox", "gpt_neox.layers.{}.attention.dense", MHA),
    "gpt_neo": Family(
        "gpt_neo",
        "transformer.h.{}.attn.attention.out_proj",
        MHA | {"attention_types": [[["local", "global", "local"], 1]], "window_size": 20},
    ),
    "gptj": Family("gptj", "transformer.h.{}.attn.out_proj", {**MHA, "rotary_dim": 4}),
    # Its heads come in multiples of four.
    "codegen": Family("codegen", "transformer.h.{}.attn.out_proj", {**MHA, "num_attention_heads": 8, "rotary_dim": 4}),
    "opt": Family(
        "opt", "model.decoder.layers.{}.self_attn.out_proj", {**MHA, "ffn_dim": 64, "word_embed_proj_dim": 48}
    ),
    "bloom": Family("bloom", SELF_ATTENTION, MHA),
    "falcon-mqa": Family("falcon", SELF_ATTENTION, MHA),
    "falcon-gqa": Family(
        "falcon",
        SELF_ATTENTION,
        {**MHA, "new_decoder_architecture": True, "num_kv_heads": 2},
    ),
    "falcon-alibi": Family("falcon", SELF_ATTENTION, {**MHA, "alibi": True, "multi_query": False}),
    "mpt": Family("mpt", "transformer.blocks.{}.attn.out_proj", {**MHA, "max_seq_len": 1024}),
    "starcoder2": Family("starcoder2", O_PROJ, {**GQA, "sliding_window": 20}),
    "stablelm": Family("stablelm", O_PROJ, GQA),
    "persimmon": Family("persimmon", DENSE, MHA),
    "cohere": Family("cohere", O_PROJ, {**GQA, "use_qk_norm": True}),
    "cohere2": Family("cohere2", O_PROJ, GQA | SLIDING),
    "granite": Family("granite", O_PROJ, {**GQA, "attention_multiplier": 0.35}),
    "granitemoe": Family("granitemoe", O_PROJ, GQA | MOE | {"attention_multiplier": 0.35}),
    "granitemoehybrid": Family(
        "granitemoehybrid",
        O_PROJ,
        GQA | MOE | HYBRID | MAMBA2 | {"shared_intermediate_size": 16, "attention_multiplier": 0.35},
        layers=(0, 2),
    ),
    "smollm3": Family("smollm3", O_PROJ, {**GQA, "no_rope_layers": [1, 0, 1]}),
    "glm": Family("glm", O_PROJ, {**GQA, "head_dim": 8}),
    "glm4": Family("glm4", O_PROJ, {**GQA, "head_dim": 8}),
    "glm4_moe": Family("glm4_moe", O_PROJ, GQA | MOE | {"head_dim": 8, "n_routed_experts": 4, "use_qk_norm": True}),
    "deepseek_v2": Family("deepseek_v2", O_PROJ, MLA, values=KV_B_PROJ),
    "deepseek_v3": Family("deepseek_v3", O_PROJ, MLA, values=KV_B_PROJ),
    "gpt_oss": Family("gpt_oss", O_PROJ, GQA | MOE | SLIDING | {"head_dim": 12}, learned_sinks=True),
    "nemotron": Family("nemotron", O_PROJ, GQA),
    "exaone4": Family("exaone4", O_PROJ, GQA | SLIDING),
    "llama4": Family(
        "llama4_text",
        O_PROJ,
        GQA
        | MOE
        | {"head_dim": 8, "attention_chunk_size": 32, "no_rope_layers": [1, 0, 1], "intermediate_size_mlp": 16}
        | {"floor_scale": 16},
    ),
    "jamba": Family(
        "jamba",
        O_PROJ,
        GQA | MOE | {"attn_layer_period": 2, "attn_layer_offset": 0, "mamba_d_state": 8},
        layers=(0, 2),
    ),
    "bamba": Family("bamba", O_PROJ, GQA | MAMBA2 | {"attn_layer_indices": [0, 2]}, layers=(0, 2)),
    "lfm2": Family("lfm2", OUT_PROJ, GQA | {"full_attn_idxs": [0, 2]}, layers=(0, 2)),
    "falcon_h1": Family("falcon_h1", O_PROJ, GQA | MAMBA2 | {"head_dim": 8, "mamba_d_ssm": 48, "mamba_d_head": 12}),
    "nemotron_h": Family(
        "nemotron_h",
        "model.layers.{}.mixer.o_proj",
        GQA
        | {"head_dim": 8, "layers_block_type": ["attention", "mamba", "attention"], "mamba_num_heads": 4}
        | {"mamba_head_dim": 12, "ssm_state_size": 8, "n_groups": 1, "chunk_size": 16},
        layers=(0, 2),
    ),
    "afmoe": Family("afmoe", O_PROJ, GQA | MOE | SLIDING | {"head_dim": 8, "num_dense_layers": 1}, gated=True),
    "laguna": Family(
        "laguna",
        O_PROJ,
        GQA | SHARED_MOE | SLIDING | {"head_dim": 8, "num_attention_heads_per_layer": [6, 4, 6]},
        gated=True,
    ),
    "nanochat": Family("nanochat", O_PROJ, GQA),
    "helium": Family("helium", O_PROJ, {**GQA, "head_dim": 8}),
    "minicpm3": Family("minicpm3", O_PROJ, MLA, values=KV_B_PROJ),
    "mimo_v2_flash": Family(
        "mimo_v2_flash",
        O_PROJ,
        GQA | MOE | SLIDING | {"num_key_value_heads": 1, "head_dim": 12, "v_head_dim": 8, "n_routed_experts": 4},
        learned_sinks=True,
    ),
    "ernie4_5": Family("ernie4_5", O_PROJ, {**GQA, "head_dim": 8}),
    "seed_oss": Family("seed_oss", O_PROJ, {**GQA, "head_dim": 12}),
    "apertus": Family("apertus", O_PROJ, GQA | {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4}}),
    "arcee": Family("arcee", O_PROJ, GQA),
    "minimax_m2": Family("minimax_m2", O_PROJ, GQA | MOE | {"head_dim": 8, "rotary_dim": 4}),
    "hunyuan_v1_dense": Family("hunyuan_v1_dense", O_PROJ, {**GQA, "head_dim": 8}),
    "biogpt": Family("biogpt", "biogpt.layers.{}.self_attn.out_proj", MHA),
    "xglm": Family("xglm", OUT_PROJ, {**MHA, "ffn_dim": 64}),
    "dbrx": Family(
        "dbrx",
        "transformer.blocks.{}.norm_attn_norm.attn.out_proj",
        {
            "d_model": 48,
            "n_heads": HEADS,
            "n_layers": LAYERS,
            "max_seq_len": 1024,
            "attn_config": {"kv_n_heads": 2, "clip_qkv": 2.0, "rope_theta": 1e4},
            "ffn_config": {"ffn_hidden_size": 16, "moe_num_experts": 4, "moe_top_k": 4},
        },
    ),
    "gemma3-wrapper": Family(
        "gemma3",
        WRAPPED,
        {
            "text_config": GQA | SLIDING | {"head_dim": 12, "query_pre_attn_scalar": 12},
            "vision_config": VISION | PATCHES,
        },
        auto=AutoModelForImageTextToText,
    ),
    "llava": Family(
        "llava",
        WRAPPED,
        {
            "text_config": {"model_type": "llama", **GQA},
            "vision_config": {"model_type": "clip_vision_model", **VISION, **PATCHES},
        },
        auto=AutoModelForImageTextToText,
    ),
    "qwen2_5_vl": Family(
        "qwen2_5_vl",
        WRAPPED,
        {
            "text_config": {**GQA, "rope_parameters": {"rope_type": "default", "mrope_section": [1, 1, 2]}},
            "vision_config": {
                "depth": 1,
                "hidden_size": 16,
                "intermediate_size": 16,
                "num_heads": 2,
                "out_hidden_size": 48,
            },
        },
        auto=AutoModelForImageTextToText,
    ),
}
