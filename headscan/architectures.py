"""Small random-weight models of all tested architectures; one line of a table adds one.

`headscan models` lists them, and the tests measure each against a float64 reference. All have three layers, and six
heads where the architecture allows it; a hybrid has its attention in layers 0 and 2.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    AutoModelForMaskedLM,
    AutoModelForSeq2SeqLM,
    PreTrainedModel,
)

from headscan.attention.discovery import discover
from headscan.models.loaded_model import LoadedModel

VOCABULARY = 97
LAYERS = 3
HEADS = 6


@dataclass(frozen=True)
class Family:
    """One architecture of the test matrix, with facts for its reference.

    Attributes:
        projection: Name of the output projection, with {} for the layer; one name a site for an encoder-decoder.
        layers: Layers with softmax attention.
        gated: A gate lies between ``A V`` and the output projection.
        learned_sinks: A learned logit a head reduces the weights of the keys.
        values: By site without values in the KV cache, the module whose output ends with each head's values.
        stacked: The output of that module ends with the values of all heads instead.
        borrows: By layer that uses the keys and values of an earlier layer, that layer.
    """

    model_type: str
    projection: str | dict[str, str]
    config: dict[str, Any] = field(default_factory=dict)
    auto: Any = AutoModelForCausalLM
    layers: tuple[int, ...] = tuple(range(LAYERS))
    gated: bool = False
    learned_sinks: bool = False
    values: dict[str, str] = field(default_factory=dict)
    stacked: bool = False
    borrows: dict[int, int] = field(default_factory=dict)

    def projection_of(self, layer: int, site: str = "self") -> str:
        pattern = self.projection if isinstance(self.projection, str) else self.projection[site]
        return pattern.format(layer)


MHA = {
    "hidden_size": 48,
    "intermediate_size": 64,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": HEADS,
    "max_position_embeddings": 1024,
}

GQA = {**MHA, "num_key_value_heads": 2}

SLIDING = {"sliding_window": 20, "layer_types": ["sliding_attention", "full_attention", "sliding_attention"]}

PER_LAYER_INPUT = {"hidden_size_per_layer_input": 8}

HYBRID = {"layer_types": ["full_attention", "linear_attention", "full_attention"]}

MAMBA2 = {"mamba_n_heads": 4, "mamba_d_state": 8, "mamba_chunk_size": 16}

DELTA = {"linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 8, "linear_value_head_dim": 8}

# Every token uses every expert, so that a near tie of the router gives the same result in float32 and float64.
MOE = {"num_experts": 4, "num_local_experts": 4, "num_experts_per_tok": 4, "moe_intermediate_size": 16}

SHARED_MOE = {**MOE, "shared_expert_intermediate_size": 16}

MLA = {
    **MHA,
    "num_key_value_heads": HEADS,
    "q_lora_rank": 24,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 4,
    "v_head_dim": 10,
    "n_routed_experts": 4,
    "num_experts_per_tok": 4,
    "n_shared_experts": 1,
    "moe_intermediate_size": 16,
    "first_k_dense_replace": 1,
    "n_group": 1,
    "topk_group": 1,
}

VISION = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}

PATCHES = {"image_size": 8, "patch_size": 4}

O_PROJ = "model.layers.{}.self_attn.o_proj"
DENSE = "model.layers.{}.self_attn.dense"
OUT_PROJ = "model.layers.{}.self_attn.out_proj"
SELF_ATTENTION = "transformer.h.{}.self_attention.dense"
KV_B_PROJ = {"self": "model.layers.{}.self_attn.kv_b_proj"}
WRAPPED = "model.language_model.layers.{}.self_attn.o_proj"

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
    "falcon-gqa": Family("falcon", SELF_ATTENTION, {**MHA, "new_decoder_architecture": True, "num_kv_heads": 2}),
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
        "jamba", O_PROJ, GQA | MOE | {"attn_layer_period": 2, "attn_layer_offset": 0, "mamba_d_state": 8}, layers=(0, 2)
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


def _encoder(model_type: str, projection: str, values: str, config: dict[str, Any], **more: Any) -> Family:
    return Family(model_type, projection, config, AutoModelForMaskedLM, values={"encoder": values}, **more)


def _bert_like(model_type: str, config: dict[str, Any]) -> Family:
    attention = f"{model_type}.encoder.layer.{{}}.attention"
    return _encoder(model_type, f"{attention}.output.dense", f"{attention}.self.value", config)


ENCODERS: dict[str, Family] = {
    "bert": _bert_like("bert", MHA),
    "roberta": _bert_like("roberta", {**MHA, "max_position_embeddings": 1026}),  # the first two are never used
    "electra": _bert_like("electra", {**MHA, "embedding_size": 48}),
    "distilbert": _encoder(
        "distilbert",
        "distilbert.transformer.layer.{}.attention.out_lin",
        "distilbert.transformer.layer.{}.attention.v_lin",
        {**MHA, "hidden_dim": 64},
    ),
    "modernbert": _encoder(
        "modernbert",
        "model.layers.{}.attn.Wo",
        "model.layers.{}.attn.Wqkv",
        MHA | {"local_attention": 20, "global_attn_every_n_layers": 2, "cls_token_id": 0, "sep_token_id": 1},
        stacked=True,
    ),
}

_T5_SITES = {
    "encoder": "encoder.block.{}.layer.0.SelfAttention.o",
    "self": "decoder.block.{}.layer.0.SelfAttention.o",
    "cross": "decoder.block.{}.layer.1.EncDecAttention.o",
}
_BART_SITES = {
    "encoder": "model.encoder.layers.{}.self_attn.out_proj",
    "self": "model.decoder.layers.{}.self_attn.out_proj",
    "cross": "model.decoder.layers.{}.encoder_attn.out_proj",
}
_BART = {
    "d_model": 48,
    "max_position_embeddings": 1024,
    "scale_embedding": True,
    **{f"{side}_layers": LAYERS for side in ("encoder", "decoder")},
    **{f"{side}_attention_heads": HEADS for side in ("encoder", "decoder")},
    **{f"{side}_ffn_dim": 64 for side in ("encoder", "decoder")},
}
_T5 = {"d_model": 48, "d_kv": 4, "d_ff": 64, "num_layers": LAYERS, "num_heads": HEADS}


def _encoder_decoder(model_type: str, sites: dict[str, str], values: str, config: dict[str, Any]) -> Family:
    return Family(model_type, sites, config, AutoModelForSeq2SeqLM, values={"encoder": values})


ENCODER_DECODERS: dict[str, Family] = {
    "t5": _encoder_decoder("t5", _T5_SITES, "encoder.block.{}.layer.0.SelfAttention.v", _T5),
    "bart": _encoder_decoder("bart", _BART_SITES, "model.encoder.layers.{}.self_attn.v_proj", _BART),
    "marian": _encoder_decoder("marian", _BART_SITES, "model.encoder.layers.{}.self_attn.v_proj", _BART),
}

#: Architectures that must be refused: a norm over all heads, one module for all layers, and an output that is the
#: difference of two attentions.
REFUSED: dict[str, Family] = {
    "bitnet": Family("bitnet", O_PROJ, GQA),
    "albert": Family("albert", "", MHA | {"embedding_size": 16}, AutoModelForMaskedLM),
    "diffllama": Family("diffllama", O_PROJ, GQA),
}

#: Every kind of site of every family.
SITES = [(name, "self") for name in [*FAMILIES, *ENCODERS]] + [
    (name, site) for name in ENCODER_DECODERS for site in ("encoder", "self", "cross")
]
ALL = FAMILIES | ENCODERS | ENCODER_DECODERS | REFUSED


def make_model(
    name: str, *, seed: int = 0, dtype: torch.dtype = torch.float32, vocabulary: int = VOCABULARY
) -> PreTrainedModel:
    """Return a random model of a family. Its weights are large enough for non-uniform attention."""
    family = ALL[name]
    torch.manual_seed(seed)
    words = {"vocab_size": vocabulary, "bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 1}
    config = dict(family.config)
    if "hidden_size_per_layer_input" in config:
        config["vocab_size_per_layer_input"] = vocabulary
    if "text_config" in config:
        config["text_config"] = config["text_config"] | words
    # The default attention is sdpa for most architectures.
    model = family.auto.from_config(AutoConfig.for_model(family.model_type, **words, **config))
    with torch.no_grad():
        for parameter_name, parameter in model.named_parameters():
            if parameter.ndim >= 2 and not parameter_name.endswith("norm.weight"):
                parameter.normal_(std=0.18)
            elif parameter_name.endswith(".sinks"):
                parameter.normal_(mean=2.0)  # large enough to reduce the weights of many keys
            else:
                parameter.add_(torch.randn_like(parameter) * 0.05)
    return model.eval().to(dtype)


def make_loaded(name: str, *, seed: int = 0, dtype: torch.dtype = torch.float32) -> LoadedModel:
    """Return the loaded model of a family, without a checkpoint."""
    model = make_model(name, seed=seed, dtype=dtype)
    return LoadedModel(model, None, discover(model), name)
