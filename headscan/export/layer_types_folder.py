"""A model and a plan by layer as one folder: ``layer_types`` and ``sliding_window`` in ``config.json``.

vLLM's Llama reads both fields; transformers' Llama ignores them, and its Ministral, which is Llama otherwise, reads
them.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from headscan.errors import ExportError
from headscan.export.llama_folder import llama_fields, llama_weights, write_folder
from headscan.export.servable_model import ServableModel
from headscan.models.loaded_model import LoadedModel
from headscan.plans import HeadPlan, check_model, sliding_layers
from headscan.settings.saving_settings import Architecture

_CLASSES: dict[Architecture, str] = {"llama": "LlamaForCausalLM", "ministral": "MinistralForCausalLM"}


@dataclass(frozen=True)
class WrittenLayerTypes:
    """A written folder, the bytes of its weights, and the fields of its windows."""

    folder: Path
    bytes: int
    windows: dict[str, Any]


def write_layer_types(
    lm: LoadedModel, plan: HeadPlan, folder: str | os.PathLike[str], *, architecture: Architecture = "llama"
) -> WrittenLayerTypes:
    """Write a Llama-type model with the windows of a plan into a folder, which appears when it is complete. All layers
    have equal heads, and whole layers have windows of one width, without sinks. Architecture ``llama`` is for vLLM,
    ``ministral`` for transformers.
    """
    served = ServableModel(lm, "folders with layer types")
    windows = windows_of(lm, plan)
    places = served.own_slots()
    if odd := next((layer for layer, each in enumerate(places) if each != places[0]), None):
        raise ExportError(
            f"layer {odd} of {lm.source} has other heads than layer 0 (limit: equal layers). Write a DeciLM folder"
            " with the plan"
        )
    weights = llama_weights(served, places)
    config = llama_fields(served, places, weights)
    if architecture == "ministral" and (config["attention_bias"] or config["mlp_bias"]):
        raise ExportError(f"{lm.source} has biases, which Ministral lacks. Choose architecture llama")
    config |= {
        "architectures": [_CLASSES[architecture]],
        "model_type": architecture,
        "num_key_value_heads": places[0].kv_heads,
        **windows,
    }
    nbytes = write_folder(lm, folder, weights, config)
    return WrittenLayerTypes(Path(folder), nbytes, windows)


def windows_of(lm: LoadedModel, plan: HeadPlan) -> dict[str, Any]:
    """Return the fields of a plan; raise PlanError if it is for a model with other heads."""
    check_model(plan, grid=lm.grid.at("self").as_dicts())
    return sliding_layers(plan)
