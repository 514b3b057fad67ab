"""The largest number of tokens with positions."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import nn
from transformers import AutoModelForMaskedLM

from headscan.models.model_class import is_encoder
from headscan.models.rope import RopeLengths

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel


def max_tokens(config: PreTrainedConfig) -> int | None:
    """Return a configuration's largest number of tokens; None without a limit."""
    if is_encoder(config):
        with torch.device("meta"):  # the limit shows in the modules, which take no time without weights
            return usable_positions(AutoModelForMaskedLM.from_config(config))
    return _named_positions(config)


def usable_positions(model: PreTrainedModel) -> int | None:
    """Return a model's largest number of tokens; None without a limit.

    RoBERTa and similar models number positions from after the padding position, in a table of the length they name.
    """
    limit = _named_positions(model.config)
    words = model.get_input_embeddings().weight  # encoder and decoder may have a table each with the same weight
    tables = [module for module in model.modules() if isinstance(module, nn.Embedding) and module.weight is not words]
    for table in tables:
        if limit and table.num_embeddings == limit and table.padding_idx is not None:
            return limit - table.padding_idx - 1
    return limit


def _named_positions(config: PreTrainedConfig) -> int | None:
    # With dynamic scaling the configuration names the length before scaling.
    limit = RopeLengths.of(config).scaled_to or getattr(config.get_text_config(), "max_position_embeddings", None)
    return int(limit) if limit else None
