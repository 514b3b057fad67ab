"""Small random-weight models of real architectures; one line of `FAMILIES` adds one to the test matrix."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from headscan.discovery import discover
from headscan.loading import LoadedModel

VOCABULARY = 97


@dataclass(frozen=True)
class Family:
    """One architecture: its model type, what differs from the common shape, and where its projection is."""

    model_type: str
    projection: str  # name of the output projection, {} for the layer
    config: dict[str, Any] = field(default_factory=dict)


_LLAMA_LIKE = {
    "hidden_size": 48,
    "intermediate_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "max_position_embeddings": 1024,
}
_O_PROJ = "model.layers.{}.self_attn.o_proj"

FAMILIES: dict[str, Family] = {
    "llama": Family("llama", _O_PROJ, _LLAMA_LIKE),
    "llama-mha": Family("llama", _O_PROJ, {**_LLAMA_LIKE, "num_key_value_heads": 6}),
    "llama-mqa-wide": Family("llama", _O_PROJ, {**_LLAMA_LIKE, "num_key_value_heads": 1, "head_dim": 20}),
    "qwen2": Family("qwen2", _O_PROJ, _LLAMA_LIKE),
    "qwen3": Family("qwen3", _O_PROJ, {**_LLAMA_LIKE, "head_dim": 16}),
    "olmo2": Family("olmo2", _O_PROJ, _LLAMA_LIKE),
    "mistral": Family("mistral", _O_PROJ, {**_LLAMA_LIKE, "sliding_window": None}),
    "mistral-sliding": Family("mistral", _O_PROJ, {**_LLAMA_LIKE, "sliding_window": 20}),
    "gemma2-softcap": Family("gemma2", _O_PROJ, {**_LLAMA_LIKE, "head_dim": 12, "sliding_window": 24}),
    "gpt2": Family(
        "gpt2", "transformer.h.{}.attn.c_proj", {"n_embd": 48, "n_layer": 3, "n_head": 6, "n_positions": 1024}
    ),
    "gpt_neox": Family(
        "gpt_neox",
        "gpt_neox.layers.{}.attention.dense",
        {k: v for k, v in _LLAMA_LIKE.items() if k != "num_key_value_heads"},
    ),
}


def make_model(
    name: str, *, seed: int = 0, dtype: torch.dtype = torch.float32, vocabulary: int = VOCABULARY
) -> PreTrainedModel:
    """A random model of a family, its weights large enough that attention is far from uniform."""
    family = FAMILIES[name]
    torch.manual_seed(seed)
    config = AutoConfig.for_model(
        family.model_type, vocab_size=vocabulary, bos_token_id=0, eos_token_id=1, pad_token_id=1, **family.config
    )
    model = AutoModelForCausalLM.from_config(config)  # sdpa where the architecture has it
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim >= 2:
                parameter.normal_(std=0.18)
            else:
                parameter.add_(torch.randn_like(parameter) * 0.05)
    return model.eval().to(dtype)


def make_loaded(name: str, *, seed: int = 0, dtype: torch.dtype = torch.float32) -> LoadedModel:
    """The same as `headscan.load` gives, without a checkpoint."""
    model = make_model(name, seed=seed, dtype=dtype)
    return LoadedModel(model, None, discover(model), name)
