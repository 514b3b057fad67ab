"""Folders of models with the names of Llama's weights, which appear when they are complete."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from huggingface_hub import save_torch_state_dict
from torch import Tensor

from headscan.errors import ExportError
from headscan.export.servable_model import HeadSlots, ServableModel
from headscan.models.loaded_model import LoadedModel
from headscan.pruning.save_model import complete_folder, open_weights

#: Fields of the original's configuration that are the same in a folder.
_SAME = """
    bos_token_id eos_token_id pad_token_id hidden_act hidden_size initializer_range intermediate_size
    max_position_embeddings num_hidden_layers rms_norm_eps rope_parameters tie_word_embeddings vocab_size
""".split()


def write_folder(
    lm: LoadedModel,
    folder: str | os.PathLike[str],
    weights: Mapping[str, Tensor],
    config: Mapping[str, Any],
    *,
    code: Mapping[str, str] | None = None,
    max_shard_size: int | str = "5GB",
) -> int:
    """Write weights, ``config.json``, code by file name, and the tokenizer of a model; return the bytes of weights."""
    with complete_folder(folder, ExportError) as made:
        save_torch_state_dict(dict(weights), made, max_shard_size=max_shard_size, metadata={"format": "pt"})
        (made / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
        open_weights(made)
        for name, text in (code or {}).items():
            (made / name).write_text(text, encoding="utf-8")
        if lm.tokenizer is not None:
            lm.tokenizer.save_pretrained(made)
        if lm.model.can_generate():
            lm.model.generation_config.save_pretrained(made)
    return sum(path.stat().st_size for path in Path(folder).glob("*.safetensors"))


def llama_fields(served: ServableModel, places: Sequence[HeadSlots], weights: Mapping[str, Tensor]) -> dict[str, Any]:
    """Return the fields of ``config.json`` that all these folders have, but for KV heads and architecture."""
    config, dtype = served.config, str(served.model.dtype).removeprefix("torch.")
    return {name: getattr(config, name, None) for name in _SAME} | {
        "attention_bias": any(_is_bias(name, _ATTENTION) for name in weights),
        "mlp_bias": any(_is_bias(name, _MLP) for name in weights),
        "dtype": dtype,
        "torch_dtype": dtype,
        "head_dim": served.head_dim,
        "num_attention_heads": max(each.heads for each in places),
        "rope_theta": config.rope_parameters["rope_theta"],
        "use_cache": True,
    }


def llama_weights(served: ServableModel, places: Sequence[HeadSlots]) -> dict[str, Tensor]:
    """Return the weights by their names in Llama. If one attention or MLP has a bias, all their matrices have one:
    engines know one switch for each.
    """
    model = served.model.model
    weights = {"model.embed_tokens.weight": model.embed_tokens.weight, "model.norm.weight": model.norm.weight}
    if not served.is_tied:
        weights["lm_head.weight"] = served.model.lm_head.weight
    for number, layer in enumerate(served.layers):
        block = f"model.layers.{number}"
        if places[number].kv_heads:
            weights[f"{block}.input_layernorm.weight"] = layer.input_layernorm.weight
        weights[f"{block}.post_attention_layernorm.weight"] = layer.post_attention_layernorm.weight
        weights |= {
            f"{block}.self_attn.{name}": each for name, each in served.attention(number, places[number]).items()
        }
        weights |= {f"{block}.mlp.{name}": each for name, each in served.mlp(number, places).items()}
    for parts in (_ATTENTION, _MLP):
        if any(_is_bias(name, parts) for name in weights):
            for name in [name for name in weights if name.endswith(".weight")]:
                module = name.removesuffix(".weight")
                if module.rpartition(".")[2] in parts:
                    weights.setdefault(f"{module}.bias", served.zeros(weights[name].shape[0]))
    return {name: each.detach().contiguous() for name, each in weights.items()}


_ATTENTION, _MLP = ("q_proj", "k_proj", "v_proj", "o_proj"), ("gate_proj", "up_proj", "down_proj")


def _is_bias(name: str, parts: Sequence[str]) -> bool:
    return name.endswith(".bias") and name.split(".")[-2] in parts
