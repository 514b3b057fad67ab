"""A model as a folder of the architecture DeciLM, whose layers differ in KV heads, for vLLM and SGLang.

All layers have the same number of query heads, so the KV heads of a layer divide it. Of all numbers of query heads up
to the original one, the one with the smallest cache is taken. Heads that a layer lacks are zeros. A layer without
attention is skipped (``no_op``), except for the first one, which engines cannot skip.
"""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from huggingface_hub import save_torch_state_dict
from safetensors import SafetensorError
from torch import Tensor

from headscan.errors import ExportError
from headscan.models.loaded_model import LoadedModel
from headscan.pipelines.export.servable_model import HeldSize, Places, ServableModel
from headscan.pruning.save_model import check_output_folder, open_weights

#: Fields of the original's configuration that are the same in the folder.
_SAME = (
    "bos_token_id",
    "eos_token_id",
    "pad_token_id",
    "hidden_act",
    "hidden_size",
    "initializer_range",
    "intermediate_size",
    "max_position_embeddings",
    "num_hidden_layers",
    "rms_norm_eps",
    "rope_parameters",
    "tie_word_embeddings",
    "vocab_size",
)
#: The configuration class: engines read ``block_configs`` as objects, and its model type belongs to no library.
_CODE = '''"""The configuration of this model."""

from transformers import PretrainedConfig


class Settings(dict):
    """Fields that are read as attributes, too."""

    def __getattr__(self, name):
        try:
            return self[name]
        except KeyError:
            raise AttributeError(name) from None


class DeciLMConfig(PretrainedConfig):
    model_type = "nemotron-nas"

    def __init__(self, block_configs=(), **fields):
        self.block_configs = [
            Settings({part: Settings(block[part]) for part in ("attention", "ffn")}) for block in block_configs
        ]
        super().__init__(**fields)
'''
_CODE_FILE = "configuration_decilm.py"


@dataclass(frozen=True)
class WrittenDecilm:
    """A written folder: its query heads, the same in all layers, and what the original, the model and the folder hold.

    Attributes:
        bytes: Bytes of the weights.
        has_ffn_mult: The width of the MLP has the form that SGLang reads.
    """

    folder: Path
    heads: int
    bytes: int
    has_ffn_mult: bool
    sizes: tuple[HeldSize, ...]


def write_decilm(
    lm: LoadedModel, folder: str | os.PathLike[str], *, max_shard_size: int | str = "5GB"
) -> WrittenDecilm:
    """Write a model into a folder, which appears when it is complete.

    Args:
        lm: A Llama-type model, from `slice_heads` or not.
        folder: A folder that does not exist, or is empty.
        max_shard_size: Largest size of a weight file.

    Raises:
        ExportError: The model has no place in the format, or the folder cannot be written.
        PruningError: The folder is not empty.
    """
    served = ServableModel(lm, "DeciLM folders")
    target = Path(folder)
    check_output_folder(target)
    places = decilm_places(served.own_places(), lm_heads(served))
    weights = _weights(served, places)
    config = _config(served, places, weights)
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=target.parent, prefix=f".{target.name}-") as scratch:
            made = Path(scratch) / "model"
            made.mkdir()
            save_torch_state_dict(weights, made, max_shard_size=max_shard_size, metadata={"format": "pt"})
            (made / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
            open_weights(made)
            (made / _CODE_FILE).write_text(_CODE, encoding="utf-8")
            if lm.tokenizer is not None:
                lm.tokenizer.save_pretrained(made)
            if lm.model.can_generate():
                lm.model.generation_config.save_pretrained(made)
            made.replace(target)
    except (OSError, SafetensorError) as problem:
        reason = getattr(problem, "strerror", None) or problem
        raise ExportError(f"{target} cannot be written: {reason}. Free space, or choose another folder") from problem
    nbytes = sum(path.stat().st_size for path in target.glob("*.safetensors"))
    has_mult = "ffn_mult" in config["block_configs"][0]["ffn"]
    return WrittenDecilm(
        target, config["num_attention_heads"], nbytes, has_mult, tuple(served.sizes(target.name, places))
    )


def lm_heads(served: ServableModel) -> int:
    """Return the original's number of query heads."""
    return max(each.heads for each in served.heads)


def decilm_places(own: Sequence[Places], most: int) -> tuple[Places, ...]:
    """Return places that hold ``own`` ones and have one number of query heads, at most ``most``, in all layers with
    attention: those with the fewest KV heads, and then with the fewest query heads.
    """
    found = []
    for heads in range(1, most + 1):
        rows = [_divided(heads, each) for each in own]
        if (fitting := [each for each in rows if each is not None]) and len(fitting) == len(rows):
            found.append((sum(each.kv_heads for each in fitting), heads, tuple(fitting)))
    return min(found)[2]


def _divided(heads: int, own: Places) -> Places | None:
    """Return the fewest KV heads that divide a number of query heads and hold a layer; None if there are none."""
    if not own.kv_heads:
        return own
    fits = (K for K in range(own.kv_heads, heads + 1) if heads % K == 0 and heads // K >= own.group)
    return next((Places(K, heads // K) for K in fits), None)


def _weights(served: ServableModel, places: tuple[Places, ...]) -> dict[str, Tensor]:
    """Return the weights by their names in Llama. If one attention or MLP has a bias, all their matrices have one:
    engines know one switch for each.
    """
    model = served.model.model
    found = {"model.embed_tokens.weight": model.embed_tokens.weight, "model.norm.weight": model.norm.weight}
    if not served.is_tied:
        found["lm_head.weight"] = served.model.lm_head.weight
    for number, layer in enumerate(served.layers):
        block = f"model.layers.{number}"
        if places[number].kv_heads:
            found[f"{block}.input_layernorm.weight"] = layer.input_layernorm.weight
        found[f"{block}.post_attention_layernorm.weight"] = layer.post_attention_layernorm.weight
        found |= {f"{block}.self_attn.{name}": each for name, each in served.attention(number, places[number]).items()}
        found |= {f"{block}.mlp.{name}": each for name, each in served.mlp(number, places).items()}
    for parts in (_ATTENTION, _MLP):
        if any(_is_bias(name, parts) for name in found):
            for name in [name for name in found if name.endswith(".weight")]:
                module = name.removesuffix(".weight")
                if module.rpartition(".")[2] in parts:
                    found.setdefault(f"{module}.bias", served.zeros(found[name].shape[0]))
    return {name: each.detach().contiguous() for name, each in found.items()}


_ATTENTION, _MLP = ("q_proj", "k_proj", "v_proj", "o_proj"), ("gate_proj", "up_proj", "down_proj")


def _is_bias(name: str, parts: Sequence[str]) -> bool:
    return name.endswith(".bias") and name.split(".")[-2] in parts


def _config(served: ServableModel, places: tuple[Places, ...], weights: Mapping[str, Tensor]) -> dict[str, Any]:
    config = served.config
    fields = {name: getattr(config, name, None) for name in _SAME}
    ffn: dict[str, Any] = {
        "no_op": False,
        "replace_with_linear": False,
        "intermediate_size": config.intermediate_size,
        "hidden_act": config.hidden_act,
    }
    if config.intermediate_size % 256 == 0:
        # Another form of the same width, which is rounded up to a multiple of 256 where it is read.
        ffn["ffn_mult"] = 1.5 * config.intermediate_size / config.hidden_size
    blocks = [
        {
            "attention": {
                "no_op": not each.kv_heads,
                "n_heads_in_group": each.group or None,
                "replace_with_linear": False,
            },
            "ffn": ffn,
        }
        for each in places
    ]
    rope = dict(config.rope_parameters)
    return fields | {
        "architectures": ["DeciLMForCausalLM"],
        "auto_map": {"AutoConfig": f"{_CODE_FILE.removesuffix('.py')}.DeciLMConfig"},
        "model_type": "nemotron-nas",
        "attention_bias": any(_is_bias(name, _ATTENTION) for name in weights),
        "mlp_bias": any(_is_bias(name, _MLP) for name in weights),
        "block_configs": blocks,
        "dtype": str(served.model.dtype).removeprefix("torch."),
        "torch_dtype": str(served.model.dtype).removeprefix("torch."),
        "head_dim": served.head_dim,
        "num_attention_heads": max(each.heads for each in places),
        "num_key_value_heads": None,
        "rope_theta": rope["rope_theta"],
        "use_cache": True,
    }
