"""Small models whose rotary frequencies change at `LIMIT` tokens, loaded as every model is."""

from __future__ import annotations

from pathlib import Path

import torch
from transformers import LlamaConfig, LlamaForCausalLM, Phi3Config, Phi3ForCausalLM, PreTrainedModel

import headscan

LIMIT = 64
#: Longrope has two sets of frequencies; with dynamic scaling every length above the limit has its own.
ROPES = ("longrope", "dynamic")

_SHAPE = {
    "vocab_size": 300,
    "hidden_size": 48,
    "intermediate_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "pad_token_id": 1,
}


def make_rope_model(rope: str) -> PreTrainedModel:
    """A random model, its weights large enough that attention is far from uniform."""
    torch.manual_seed(0)
    if rope == "longrope":
        factors = {"short_factor": [1.0] * 4, "long_factor": [1.0, 4.0, 8.0, 16.0]}
        parameters = {"rope_type": "longrope", "rope_theta": 1e4, "partial_rotary_factor": 1.0, **factors}
        positions = {"max_position_embeddings": 1024, "original_max_position_embeddings": LIMIT}
        model: PreTrainedModel = Phi3ForCausalLM(Phi3Config(**_SHAPE, **positions, rope_parameters=parameters))
    else:
        parameters = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 4.0}
        config = LlamaConfig(**_SHAPE, max_position_embeddings=LIMIT, rope_parameters=parameters)
        model = LlamaForCausalLM(config)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim >= 2:
                parameter.normal_(std=0.25)
    return model.eval()


def load_rope_model(rope: str, folder: Path) -> headscan.LoadedModel:
    """A saved and loaded model of `ROPES`."""
    if not (folder / rope).exists():
        make_rope_model(rope).save_pretrained(folder / rope)
    return headscan.load(folder / rope)
