"""A loaded model with its tokenizer and its head grid."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from headscan.errors import ModelLoadError
from headscan.grid import HeadGrid
from headscan.models.decoder_block import FoundBlocks
from headscan.models.forward_inputs import input_device
from headscan.models.positions import RopeLengths, usable_positions
from headscan.models.token_batches import MemoryLimit


@dataclass(frozen=True)
class LoadedModel:
    """A model whose heads can be measured.

    Attributes:
        model: The transformers model, in evaluation mode.
        tokenizer: Its tokenizer; None if the source has none.
        grid: Its heads.
        source: Its folder or hub name.
        revision: Commit on the hub; None for a folder.
        limits: By kind of work, the sizes that ran out of memory on this model's devices.
        blocks: By name of a list of blocks, the result of `blocks.find_blocks`.
        projection_factors: By name of an output projection, the checksum of its weight and its factor
            (`projections.ProjectionFactors`).
    """

    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase | None
    grid: HeadGrid
    source: str
    revision: str | None = None
    limits: defaultdict[str, MemoryLimit] = field(
        default_factory=lambda: defaultdict(MemoryLimit), compare=False, repr=False, kw_only=True
    )
    projection_factors: dict[str, tuple[float | None, Tensor]] = field(
        default_factory=dict, compare=False, repr=False, kw_only=True
    )

    blocks: dict[str, FoundBlocks] = field(default_factory=dict, compare=False, repr=False, kw_only=True)

    @property
    def device(self) -> torch.device:
        """Device of token ids."""
        return input_device(self.model)

    @property
    def dtype(self) -> str:
        """Name of the weights' dtype."""
        return str(self.model.dtype).removeprefix("torch.")

    @property
    def max_tokens(self) -> int | None:
        """Largest number of tokens with positions; None without a limit."""
        return usable_positions(self.model)

    @cached_property
    def rope_lengths(self) -> RopeLengths:
        """The sequence lengths at which the rotary frequencies change."""
        return RopeLengths.of(self.model.config)

    @property
    def vocab_size(self) -> int:
        """Number of token ids."""
        embeddings: Any = self.model.get_input_embeddings()
        return int(embeddings.weight.shape[0])

    @property
    def is_encoder_decoder(self) -> bool:
        """True if the model has an encoder and a decoder."""
        return bool(self.model.config.is_encoder_decoder)

    def at(self, kind: str) -> LoadedModel:
        """Return the same model with the grid of another site.

        Raises:
            HeadIndexError: The model has no such sites.
        """
        return replace(self, grid=self.grid.at(kind))

    def end_of_sequence(self, ids: Tensor) -> Tensor:
        """Return which tokens end a sequence: bool, shaped like ``ids`` (B, N).

        The first token never ends a sequence: in many models (GPT-2, OPT, Pythia) EOS and BOS have the same id.
        """
        known = getattr(self.model.config.get_text_config(), "eos_token_id", None)
        ends = [] if known is None else known if isinstance(known, list) else [known]
        found = torch.isin(ids, torch.tensor(ends, dtype=ids.dtype, device=ids.device))
        found[:, 0] = False
        return found

    def module(self, path: str) -> nn.Module:
        """Return a module of the model by name."""
        return self.model.get_submodule(path)

    def require_tokenizer(self) -> PreTrainedTokenizerBase:
        """Return the tokenizer.

        Raises:
            ModelLoadError: The source has no tokenizer.
        """
        if self.tokenizer is None:
            raise ModelLoadError(f"{self.source} has no tokenizer. Save one to this folder with save_pretrained")
        return self.tokenizer
