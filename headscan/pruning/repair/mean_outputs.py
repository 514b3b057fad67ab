"""The simplest repair: the mean output of removed heads becomes a part of the output projection's bias.

Shapes: M real tokens, F columns of a projection's input, E width of a hidden state.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor
from transformers.pytorch_utils import Conv1D

from headscan.ablation.masks import HeadMask
from headscan.layers.blocks import find_blocks
from headscan.models.forward_inputs import run
from headscan.models.loaded_model import LoadedModel
from headscan.pruning.calibration import Calibration
from headscan.pruning.edited_model import read_bias, read_weight, watched_modules


@torch.no_grad()
def mean_outputs(lm: LoadedModel, calibration: Calibration, removed: Iterable[tuple[int, int]]) -> dict[str, Tensor]:
    """Return new biases of output projections by parameter name, float32.

    The model without the heads then computes what the original does with their outputs replaced by their means over the
    tokens of the texts (mean ablation).

    Args:
        removed: Removed heads.

    Raises:
        HeadIndexError: The model lacks a head.
        UnsupportedModelError: A projection is quantised, or the model has no blocks that run one after another.
    """
    heads = lm.grid.check(removed)
    blocks = find_blocks(lm)
    sites = [site for site in lm.grid.sites if site.layer in {head.layer for head in heads}]
    sums: dict[str, Any] = dict.fromkeys((site.output_projection for site in sites), 0.0)
    for batch in calibration.batches(lm.device):
        with watched_modules(blocks, sums) as seen:
            run(lm.model, {"input_ids": batch.ids})
        for path, inputs in seen.inputs.items():
            real = batch.real_BN.to(inputs.device)
            sums[path] = sums[path] + batch.by_token(inputs)[real].sum(0, dtype=torch.float32)
    found = {}
    for site in sites:
        module = lm.module(site.output_projection)
        weight = read_weight(module)
        weight = (weight.T if isinstance(module, Conv1D) else weight).float()
        mean = sums[site.output_projection].to(weight.device) / calibration.tokens
        gone = HeadMask(heads).heads_at(site).repeat_interleave(site.value_dim).to(weight.device)
        change = weight[:, gone] @ mean[gone]
        found[f"{site.output_projection}.bias"] = read_bias(module, change) + change
    return found
