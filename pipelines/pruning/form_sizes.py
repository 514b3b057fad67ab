"""What a saved model holds in each form: as headscan saves it, as a DeciLM folder, as a GGUF file.

The configuration alone decides: the exporters run on a model without weights.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any

import torch

from headscan.grid import HeadGrid
from headscan.loading import empty_model
from headscan.model_spec import ModelSpec
from headscan.models.loaded_model import LoadedModel
from headscan.pipelines.export.decilm_folder import decilm_weights
from headscan.pipelines.export.servable_model import HeadSlots, ServableModel, obstacle
from headscan.pipelines.pruning.model_costs import ModelCost


@dataclass(frozen=True)
class FormSize:
    """A form of a model; None where the model has no place in it.

    Attributes:
        form: ``headscan``, ``DeciLM`` or ``GGUF``.
        architecture: The one that the form names.
        kv_bytes: Bytes of the KV cache of a token in 16 bits, the width of engines.
        bytes: Bytes of the weights, in the model's dtype; in GGUF as type f16.
    """

    form: str
    architecture: str | None = None
    query_heads: int | None = None
    kv_heads: int | None = None
    kv_bytes: int | None = None
    parameters: int | None = None
    bytes: int | None = None

    def row(self) -> dict[str, str]:
        """Return the form as a row of a table."""
        cells = {
            "form": self.form,
            "architecture": self.architecture,
            "query heads": self.query_heads,
            "KV heads": self.kv_heads,
            "KV bytes per token (16 bits)": self.kv_bytes,
            "parameters": self.parameters,
            "weights": None if self.bytes is None else f"{self.bytes / 2**20:,.2f} MiB",
        }
        return {
            name: "-" if each is None else each if isinstance(each, str) else f"{each:,}"
            for name, each in cells.items()
        }


def form_sizes(folder: str | os.PathLike[str], cost: ModelCost) -> tuple[FormSize, ...]:
    """Return the forms of a saved model, whose own sizes are known. GGUF needs the package gguf.

    Raises:
        ModelLoadError: The folder has no model.
    """
    spec = ModelSpec(os.fspath(folder))
    config: Any = spec.config()
    dtype = getattr(config, "dtype", None) or torch.float32
    kv_bytes = None if cost.cache_bytes is None else cost.cache_bytes * 2 // dtype.itemsize
    heads = (cost.query_heads, cost.kv_heads, kv_bytes)
    own = FormSize("headscan", config.model_type, *heads, cost.parameters, cost.weight_bytes)
    if obstacle(config, spec.source) is not None:
        return own, FormSize("DeciLM"), FormSize("GGUF")
    # Exporters read the heads from the model; a grid would need weights.
    empty = LoadedModel(empty_model(spec, config, dtype), None, HeadGrid((), 0, ""), spec.source)
    return own, *_exported(ServableModel(empty, "serving engines"))


def _exported(served: ServableModel) -> Iterator[FormSize]:
    def form(name: str, architecture: str, places: tuple[HeadSlots, ...], parameters: int, nbytes: int) -> FormSize:
        size = served.sizes(name, places, parameters)[-1]
        return FormSize(name, architecture, size.query_heads, size.kv_heads, size.kv_bytes, parameters, nbytes)

    places, weights = decilm_weights(served)
    parameters = sum(each.numel() for each in weights.values())
    nbytes = sum(each.numel() * each.element_size() for each in weights.values())
    yield form("DeciLM", "DeciLMForCausalLM", places, parameters, nbytes)
    if find_spec("gguf") is None:
        yield FormSize("GGUF", "needs headscan[gguf]")
        return
    from headscan.pipelines.export.gguf_file import gguf_tensors

    architecture, places, tensors = gguf_tensors(served, "f16")
    numel = sum(torch.Size(each.shape).numel() for each in tensors)
    yield form("GGUF", architecture, places, numel, sum(each.bytes for each in tensors))
