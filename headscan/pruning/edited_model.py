"""A model with removed heads and replaced weights, as a reversible context.

The model itself is not changed: the heads' outputs are zeroed, and the outputs of edited modules are corrected. So it
works on whole, sharded and offloaded models alike.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from accelerate.utils import align_module_device
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from headscan.ablation.intervene import intervene
from headscan.ablation.masks import HeadMask
from headscan.errors import UnsupportedModelError
from headscan.grid import Head
from headscan.models.loaded_model import LoadedModel


@dataclass(frozen=True)
class Edits:
    """Removed heads, and new weights of projections.

    Attributes:
        removed: Removed heads.
        weights: New weights and biases of projections by parameter name, with the shape of the old ones. A projection
            without a bias can get one.
    """

    removed: tuple[Head, ...] = ()
    weights: Mapping[str, Tensor] = field(default_factory=dict)


NO_EDITS = Edits()


@contextmanager
def edited(lm: LoadedModel, edits: Edits) -> Iterator[None]:
    """Let a model run without heads and with new weights.

    Raises:
        HeadIndexError: The model lacks a head.
        UnsupportedModelError: An edited module does not multiply by its weight.
    """
    with ExitStack() as hooks:
        if edits.removed:
            hooks.enter_context(intervene(lm, HeadMask(edits.removed)))
        for name, weight in edits.weights.items():
            path, _, leaf = name.rpartition(".")
            module = lm.module(path)
            correction = _shift(module, weight) if leaf == "bias" else _correction(module, weight)
            hooks.callback(module.register_forward_hook(correction).remove)
        yield


def _correction(module: nn.Module, weight: Tensor) -> Any:
    """Return a hook that adds the product with the difference of the weights."""
    change = weight - read_weight(module).to(weight)
    by_columns = isinstance(module, Conv1D)

    def correct(_: nn.Module, args: tuple[Any, ...], out: Tensor) -> Tensor:
        inputs = args[0]
        here = change.to(inputs.device, inputs.dtype)
        return out + (inputs @ here if by_columns else inputs @ here.T)

    return correct


def _shift(module: nn.Module, bias: Tensor) -> Any:
    """Return a hook that adds the difference of the biases."""
    change = bias - read_bias(module, bias)
    return lambda _, __, out: out + change.to(out)


def read_bias(module: nn.Module, like: Tensor) -> Tensor:
    """Return a copy of a projection's bias, as ``like``; zeros if it has none."""
    with align_module_device(module), torch.no_grad():
        bias: Tensor | None = getattr(module, "bias", None)
        return torch.zeros_like(like) if bias is None else bias.detach().clone().to(like)


def read_weight(module: nn.Module) -> Tensor:
    """Return a copy of a projection's weight; offloaded weights are loaded for it.

    Raises:
        UnsupportedModelError: The module is quantised or no plain matrix product.
    """
    if not isinstance(module, (nn.Linear, Conv1D)) or type(module) not in (nn.Linear, Conv1D):
        raise UnsupportedModelError(
            f"a {type(module).__name__} cannot be repaired: it is no plain matrix product. Load the model without "
            "quantisation or adapters"
        )
    with align_module_device(module), torch.no_grad():
        return module.weight.detach().clone()
