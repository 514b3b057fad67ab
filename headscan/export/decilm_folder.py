"""A model as a folder of the architecture DeciLM, whose layers differ in KV heads, for vLLM and SGLang.

All layers have the same number of query heads, so the KV heads of a layer divide it. Of all numbers of query heads up
to the original one, the one with the smallest cache is taken. Heads that a layer lacks are zeros. A layer without
attention is skipped (``no_op``), except for the first one, which engines cannot skip.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from headscan.checkpoints.decilm_source import RECORD
from headscan.export.layer_types_folder import windows_of
from headscan.export.llama_folder import llama_fields, llama_weights, write_folder
from headscan.export.servable_model import HeadSlots, HeldSize, ServableModel, ServedForm
from headscan.models.loaded_model import LoadedModel
from headscan.plans import HeadPlan

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
ARCHITECTURE = "DeciLMForCausalLM"


@dataclass(frozen=True)
class WrittenDecilm:
    """A written folder: its query heads, the same in all layers, the bytes of its weights, True if the width of the MLP
    has the form that SGLang reads, what the original, the model and the folder hold, and the windows of a plan.
    """

    folder: Path
    heads: int
    bytes: int
    has_ffn_mult: bool
    sizes: tuple[HeldSize, ...]
    windows: Mapping[str, Any] | None = None


def write_decilm(
    lm: LoadedModel, folder: str | os.PathLike[str], *, plan: HeadPlan | None = None, max_shard_size: int | str = "5GB"
) -> WrittenDecilm:
    """Write a Llama-type model, from `slice_heads` or not, into a folder, which appears when it is complete. In vLLM
    its layers have the windows of ``plan``; see `sliding_layers`.
    """
    served = ServableModel(lm, "DeciLM folders")
    windows = None if plan is None else windows_of(lm, plan)
    target = Path(folder)
    places, weights = _weights(served)
    config = _config(served, places, weights)
    if windows is not None:
        config |= windows
    nbytes = write_folder(lm, target, weights, config, code={_CODE_FILE: _CODE}, max_shard_size=max_shard_size)
    has_mult = "ffn_mult" in config["block_configs"][0]["ffn"]
    parameters = sum(each.numel() for each in weights.values())
    sizes = tuple(served.sizes(target.name, places, parameters))
    return WrittenDecilm(target, config["num_attention_heads"], nbytes, has_mult, sizes, windows)


def decilm_form(served: ServableModel) -> ServedForm:
    """Return what the folder of a model holds, without writing it."""
    places, weights = _weights(served)
    nbytes = sum(each.numel() * each.element_size() for each in weights.values())
    return ServedForm(ARCHITECTURE, places, sum(each.numel() for each in weights.values()), nbytes)


def _weights(served: ServableModel) -> tuple[tuple[HeadSlots, ...], dict[str, Tensor]]:
    """Return the places of a folder, and its weights by name."""
    places = decilm_slots(served.own_slots(), max(each.heads for each in served.heads))
    return places, llama_weights(served, places)


def decilm_slots(own: Sequence[HeadSlots], most: int) -> tuple[HeadSlots, ...]:
    """Return places that hold ``own`` ones and have one number of query heads, at most ``most``, in all layers with
    attention: those with the fewest KV heads, and then with the fewest query heads.
    """
    places = []
    for heads in range(1, most + 1):
        rows = [_divided(heads, each) for each in own]
        if (fitting := [each for each in rows if each is not None]) and len(fitting) == len(rows):
            places.append((sum(each.kv_heads for each in fitting), heads, tuple(fitting)))
    return min(places)[2]


def _divided(heads: int, own: HeadSlots) -> HeadSlots | None:
    """Return the fewest KV heads that divide a number of query heads and hold a layer; None if there are none."""
    if not own.kv_heads:
        return own
    fits = (K for K in range(own.kv_heads, heads + 1) if heads % K == 0 and heads // K >= own.group)
    return next((HeadSlots(K, heads // K) for K in fits), None)


def _own_config(served: ServableModel) -> dict[str, Any]:
    """Return the model's own configuration, from which `headscan.load` reads the folder."""
    fields: dict[str, Any] = json.loads(served.config.to_json_string())
    for name in ("auto_map", "_name_or_path"):
        fields.pop(name, None)
    return fields | {"dtype": str(served.model.dtype).removeprefix("torch.")}


def _config(served: ServableModel, places: tuple[HeadSlots, ...], weights: Mapping[str, Tensor]) -> dict[str, Any]:
    config = served.config
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
    return llama_fields(served, places, weights) | {
        "architectures": [ARCHITECTURE],
        "auto_map": {"AutoConfig": f"{_CODE_FILE.removesuffix('.py')}.DeciLMConfig"},
        "model_type": "nemotron-nas",
        "block_configs": blocks,
        RECORD: _own_config(served),
        "num_key_value_heads": None,
    }
