"""One architecture of the test matrix, and the configurations that several share."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from transformers import (
    AutoModelForCausalLM,
)

VOCABULARY = 97


LAYERS = 3


HEADS = 6


@dataclass(frozen=True)
class Family:
    """One architecture of the test matrix, with facts for its reference.

    Attributes:
        model_type: Model type of the configuration.
        projection: Name of the output projection, with {} for the layer; one name a site for an encoder-decoder.
        config: Its configuration, without the vocabulary.
        auto: The Auto class that builds it.
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
        """Return the name of a layer's output projection."""
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


DELTA = {
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
}


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
