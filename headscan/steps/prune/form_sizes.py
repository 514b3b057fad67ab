"""What a saved model holds in each form: as headscan saves it, and in the formats of `EXPORT_FORMATS` with a form.

The configuration alone decides: the exporters run on a model without weights.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from importlib.util import find_spec
from pkgutil import resolve_name
from typing import Any

import torch

from headscan.cluster.placement_base import format_bytes
from headscan.export.formats import EXPORT_FORMATS
from headscan.export.servable_model import ServableModel, ServedForm, obstacle
from headscan.grid import HeadGrid
from headscan.loading import empty_model
from headscan.model_spec import ModelSpec
from headscan.models.loaded_model import LoadedModel
from headscan.steps.prune.model_costs import ModelCost


@dataclass(frozen=True)
class FormSize:
    """A form of a model; None where the model has no place in it.

    Attributes:
        form: ``headscan``, or the name of an export format's form, such as ``DeciLM``.
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
            "weights": None if self.bytes is None else format_bytes(self.bytes),
        }
        return {
            name: "-" if each is None else each if isinstance(each, str) else f"{each:,}"
            for name, each in cells.items()
        }


def form_sizes(folder: str | os.PathLike[str], cost: ModelCost) -> tuple[FormSize, ...]:
    """Return the forms of a saved model, whose own sizes are known; those of other formats by name."""
    spec = ModelSpec(os.fspath(folder))
    config: Any = spec.config()
    dtype = getattr(config, "dtype", None) or torch.float32
    kv_bytes = None if cost.cache_bytes is None else cost.cache_bytes * 2 // dtype.itemsize
    heads = (cost.query_heads, cost.kv_heads, kv_bytes)
    own = FormSize("headscan", config.model_type, *heads, cost.parameters, cost.weight_bytes)
    forms = sorted(each.form for each in EXPORT_FORMATS.values() if each.form is not None)
    if obstacle(config, spec.folder) is not None:
        return own, *(FormSize(form.name) for form in forms)
    # Exporters read the heads from the model; a grid would need weights.
    empty = LoadedModel(empty_model(spec, config, dtype), None, HeadGrid((), 0, ""), spec.folder)
    served = ServableModel(empty, "serving engines")
    sizes = [own]
    for form in forms:
        if form.extra and find_spec(form.extra) is None:
            sizes.append(FormSize(form.name, f"needs headscan[{form.extra}]"))
            continue
        held: ServedForm = resolve_name(f"headscan.export.{form.size}")(served)
        size = served.sizes(form.name, held.places, held.parameters)[-1]
        heads = (size.query_heads, size.kv_heads, size.kv_bytes)
        sizes.append(FormSize(form.name, held.architecture, *heads, held.parameters, held.bytes))
    return tuple(sizes)
