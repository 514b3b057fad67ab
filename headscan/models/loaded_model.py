"""A loaded model with its tokenizer and its head grid, and its logits at chosen positions of a batch.

Shapes: B sequences, N tokens, M chosen positions, V vocabulary.
"""

from __future__ import annotations

import inspect
from collections import defaultdict
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from headscan.errors import ModelLoadError, UnsupportedModelError
from headscan.grid import HeadGrid
from headscan.models.forward_inputs import input_device
from headscan.models.layout import FoundBlocks
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

    def sink_tokens(self, ids: Tensor) -> Tensor:
        """Return the tokens to which heads attend when they have nothing to read, bool, shaped like ``ids`` (B, N): the
        first token of a sequence (arXiv 2309.17453), and tokens that end one (arXiv 1905.09418).
        """
        known = getattr(self.model.config.get_text_config(), "eos_token_id", None)
        ends = [] if known is None else known if isinstance(known, list) else [known]
        found = torch.isin(ids, torch.tensor(ends, dtype=ids.dtype, device=ids.device))
        found[:, 0] = True
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


def logits_at(lm: LoadedModel, ids: Tensor, rows: list[int], columns: list[int], **kwargs: Any) -> Tensor:
    """Return logits (M, V) at the positions ``(rows[i], columns[i])`` of a batch of ids (B, N).

    An output head that is a module receives the hidden states of these positions only; otherwise logits are computed
    for whole columns, or for all positions.
    """
    head = lm.model.get_output_embeddings()
    gather = _Gather(rows, columns, tuple(ids.shape))
    handle = head.register_forward_pre_hook(gather) if isinstance(head, nn.Module) else None
    # With logits_to_keep, layers that reuse keys of others see kept tokens only, but rules need whole sequences.
    borrows = getattr(lm.model.config.get_text_config(), "num_kv_shared_layers", 0)
    if handle is None and not borrows and "logits_to_keep" in inspect.signature(lm.model.forward).parameters:
        kept = sorted(set(columns))
        kwargs["logits_to_keep"] = torch.tensor(kept, device=lm.device)
        columns = [kept.index(column) for column in columns]
    try:
        logits: Tensor | None = getattr(lm.model(input_ids=ids.to(lm.device), **kwargs), "logits", None)
    finally:
        if handle is not None:
            handle.remove()
    if logits is None:
        raise UnsupportedModelError(
            f"{lm.source} predicts no tokens: it was saved without an output head. Measure its heads with a scan, or"
            " load a model with a head"
        )
    return logits[0] if gather.done else logits[rows, columns]


class _Gather:
    """A pre-hook that keeps only the chosen hidden states. It replaces the output head's input (B, N, E) by (1, M,
    E).
    """

    def __init__(self, rows: list[int], columns: list[int], shape: tuple[int, ...]) -> None:
        self._rows, self._columns, self._shape = rows, columns, shape
        self.done = False

    def __call__(self, module: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...] | None:
        if not args or args[0].ndim != 3 or tuple(args[0].shape[:2]) != self._shape or self.done:
            return None  # a head with another call signature computes all logits
        self.done = True
        return (args[0][self._rows, self._columns][None], *args[1:])
