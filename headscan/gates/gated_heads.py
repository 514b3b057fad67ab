"""Models whose heads are multiplied by gates at the input of the output projection.

Shapes: B sequences, N tokens, H query heads of a layer, Dv width of a head's output.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor

from headscan.attention.hooks import output_hook
from headscan.grid import AttentionSite
from headscan.models.loaded_model import LoadedModel


@contextmanager
def gated_heads(lm: LoadedModel, gates: Mapping[int, Tensor]) -> Iterator[None]:
    """Multiply the outputs of heads by gates while the context is open; differentiable in the gates.

    Args:
        lm: A model from `headscan.load`; `LoadedModel.at` chooses the site.
        gates: By layer, the gates of each sequence and head (B, H), float32 or wider.

    Raises:
        UnsupportedModelError: The model is compiled or in train mode.
    """

    def multiply(site: AttentionSite, heads_BNHD: Tensor) -> Tensor | None:
        if site.layer not in gates:
            return None
        gate_B1H1 = gates[site.layer][:, None, :, None].to(heads_BNHD.device)
        wide = torch.promote_types(heads_BNHD.dtype, gate_B1H1.dtype)
        return (heads_BNHD.to(wide) * gate_B1H1).to(heads_BNHD.dtype)

    with output_hook(lm, multiply):
        yield
