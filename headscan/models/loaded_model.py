"""A model with its tokenizer and its head grid: what everything else measures."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from headscan.errors import ModelLoadError
from headscan.grid import HeadGrid
from headscan.models.forward_inputs import input_device
from headscan.models.out_of_memory import MemoryLimit
from headscan.models.positions import usable_positions
from headscan.models.rope import RopeLengths

if TYPE_CHECKING:
    from headscan.layers.blocks import Block


@dataclass(frozen=True)
class LoadedModel:
    """A model that can be measured.

    Attributes:
        model: The transformers model, in evaluation mode.
        tokenizer: Its tokenizer, or None where the source has none.
        grid: Where its heads are.
        source: Folder or hub name it came from.
        revision: Commit on the hub, or None for a folder.
        limits: By kind of work, what ran out of memory on this model's devices.
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

    blocks: dict[str, tuple[Block, ...]] = field(default_factory=dict, compare=False, repr=False, kw_only=True)

    @property
    def device(self) -> torch.device:
        """Where token ids go."""
        return input_device(self.model)

    @property
    def dtype(self) -> str:
        """Name of the weights' dtype."""
        return str(self.model.dtype).removeprefix("torch.")

    @property
    def max_tokens(self) -> int | None:
        """Tokens the model has positions for, or None where it names no limit."""
        return usable_positions(self.model)

    @cached_property
    def rope_lengths(self) -> RopeLengths:
        """The sequence lengths at which the rotary frequencies change."""
        return RopeLengths.of(self.model.config)

    @property
    def vocab_size(self) -> int:
        """Token ids the model knows."""
        embeddings: Any = self.model.get_input_embeddings()
        return int(embeddings.weight.shape[0])

    @property
    def is_encoder_decoder(self) -> bool:
        """Whether an encoder's tokens are read by a decoder."""
        return bool(self.model.config.is_encoder_decoder)

    def at(self, kind: str) -> LoadedModel:
        """The same model looked at by another kind of site: ``self``, ``encoder`` or ``cross``.

        Raises:
            HeadIndexError: The model has no such sites.
        """
        return replace(self, grid=self.grid.at(kind))

    def end_of_sequence(self, ids: Tensor) -> Tensor:
        """Return which tokens end a sequence: bool, shaped like ``ids`` (B, N).

        The first token ends nothing: in many models (GPT-2, OPT, Pythia) the id of EOS is that of BOS, too.
        """
        known = getattr(self.model.config.get_text_config(), "eos_token_id", None)
        ends = [] if known is None else known if isinstance(known, list) else [known]
        found = torch.isin(ids, torch.tensor(ends, dtype=ids.dtype, device=ids.device))
        found[:, 0] = False
        return found

    def module(self, path: str) -> nn.Module:
        """A module of the model by its name."""
        return self.model.get_submodule(path)

    def require_tokenizer(self) -> PreTrainedTokenizerBase:
        """The tokenizer.

        Raises:
            ModelLoadError: The source has none.
        """
        if self.tokenizer is None:
            raise ModelLoadError(f"{self.source} has no tokenizer: save one beside the model, as transformers does")
        return self.tokenizer
