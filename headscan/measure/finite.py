"""The check that measured numbers are finite.

Shapes: B sequences, L layers, H query heads of the widest layer.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from headscan.grid import HeadGrid
from headscan.statistics.registry import undefined


def nonfinite(grid: HeadGrid, values: Mapping[str, Tensor], lengths: Tensor, key_lengths: Tensor) -> dict[str, Tensor]:
    """Return which statistics are unexpectedly NaN or infinite: bool (B, L, H).

    Args:
        grid: The heads; positions without a head are False.
        values: Statistics (B, L, H) and profiles (B, L, H, bins), on the CPU.
        lengths: Real queries of each sequence (B,), on the CPU.
        key_lengths: Real keys (B,).
    """
    exists = torch.zeros(grid.shape, dtype=torch.bool)
    for site in grid.sites:
        exists[site.layer, : site.num_attention_heads] = True
    by_definition = undefined(values.keys(), lengths, key_lengths, cross=grid.kind == "cross")
    wrong = {}
    for name, numbers in values.items():
        finite = numbers.isfinite() if numbers.ndim == 3 else numbers.isfinite().all(-1)
        wrong[name] = ~finite & exists
        if name in by_definition:
            wrong[name] &= ~by_definition[name][:, None, None]
    return wrong


def first_nonfinite(wrong: Mapping[str, Tensor]) -> tuple[str, int, int] | None:
    """Return name, layer and sequence of the lowest marked layer, or None.

    Later layers compute with the numbers of earlier ones, so the lowest layer is nearest to the cause.
    """
    if not wrong:
        return None
    anywhere = torch.stack([where.any(2) for where in wrong.values()]).any(0)
    if not anywhere.any():
        return None
    layer = int(anywhere.any(0).nonzero()[0])
    row = int(anywhere[:, layer].nonzero()[0])
    return next(name for name, where in wrong.items() if where[row, layer].any()), layer, row
